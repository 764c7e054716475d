"""`halfstep audit` and `halfstep ops`, run in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halfstep.cli import main
from halfstep.records import Audit, OperationLists
from tests.cli.tasks import SQUARE, write_task

OVERFLOWING = """
def loss(model, batch):
    return (model(batch * 1e6) * 1e-6).square().mean()
"""


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """What is run here is tiny."""


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert isinstance(stop.value.code, int)
    return stop.value.code


class TestAudit:
    def test_a_healthy_task(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out, page = tmp_path / "audit.json", tmp_path / "audit.html"
        assert run("audit", write_task(tmp_path, SQUARE), "--target", "cuda", "--json", str(out), "--html", str(page)) == 0
        audit = Audit.from_json(out.read_text(encoding="utf-8"))
        assert (audit.precision, audit.target) == ("fp16", "cuda")
        assert "cuda, rehearsed on a CPU" in page.read_text(encoding="utf-8")
        shown = capsys.readouterr().out
        for part in ("Run lowered", "Kept in fp32, and why", "Range headroom", "nothing overflows"):
            assert part in shown

    def test_an_overflow_is_a_finding(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("audit", write_task(tmp_path, OVERFLOWING), "--target", "cuda") == 1
        assert "Not finite: aten._to_copy.default in the forward pass" in " ".join(capsys.readouterr().out.split())

    def test_json_alone_on_standard_output(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("audit", write_task(tmp_path, SQUARE), "--precision", "bf16", "--json", "-") == 0
        assert json.loads(capsys.readouterr().out)["target"] == ""

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--precision", "fp32"), "lowers nothing"),
            (("--target", "tpu"), "known for cuda, cpu, xpu, mtia and maia"),
            (("--target", "cuda", "--device", "cuda"), "does not go with it"),
        ],
    )
    def test_what_cannot_run(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
        assert run("audit", write_task(tmp_path, SQUARE), *words) == 2
        assert message in capsys.readouterr().err


class TestOps:
    def test_all_of_a_target(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("ops") == 0
        shown = capsys.readouterr().out
        assert "softmax.int" in shown
        assert "36 run in the dtype of the region" in " ".join(shown.split())

    def test_a_part_of_a_name_and_a_pattern(self, tmp_path: Path) -> None:
        for pattern, names in (("softmax", ["log_softmax.int", "softmax.int"]), ("*layer_norm", ["layer_norm", "native_layer_norm"])):
            out = tmp_path / "ops.json"
            assert run("ops", pattern, "--json", str(out)) == 0
            lists = OperationLists.from_json(out.read_text(encoding="utf-8"))
            assert [each.name for each in lists.operations if each.treatment == "fp32"] == names

    def test_an_operation_in_no_list_runs_as_it_is(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("ops", "gelu") == 0
        assert "as_is" in capsys.readouterr().out

    def test_only_what_differs(self, tmp_path: Path) -> None:
        out = tmp_path / "ops.json"
        assert run("ops", "--against", "cpu", "--json", str(out)) == 0
        lists = OperationLists.from_json(out.read_text(encoding="utf-8"))
        found = {each.name: (each.treatment, each.other) for each in lists.operations}
        assert found["softmax.int"] == ("fp32", "as_is")
        assert "linear" not in found
        assert all(each.treatment != each.other for each in lists.operations)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("sofmax",), "matches 'sofmax'. Did you mean"),
            (("--target", "mps"), "not for 'mps'"),
            (("--against", "cuda"), "--against cuda is the target itself"),
        ],
    )
    def test_what_cannot_run(self, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
        assert run("ops", *words) == 2
        assert message in capsys.readouterr().err
