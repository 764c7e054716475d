"""What is done about a run that skips step after step, where its user asked for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep
from halfstep import HalfstepWarning, PersistentSkipsError
from halfstep.errors import ConfigurationError, InvalidTypeError
from halfstep.journal import read_run
from halfstep.records import Action, Diagnosis

pytestmark = pytest.mark.usefixtures("one_thread")


class Overflowing(nn.Module):
    """Its product passes the largest fp16 number, whatever the loss scale is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.wide = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)
        with torch.no_grad():
            self.wide.weight.copy_(3e4 * torch.tensor([[1.0, 1, 1, 1], [2, 1, 1, 1], [-1, -1, -1, -1], [-2, 1, -1, -1]]))
            self.wide.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        wide = self.wide(self.inner(x).abs() + 1.0)
        result: Tensor = self.head(nn.functional.layer_norm(wide.float(), (4,)))
        return result


def train(model: nn.Module, steps: int, *, dtype: torch.dtype = torch.float16) -> list[torch.dtype]:
    """A plain loop; returns what the wide layer computed in, step by step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    seen: list[torch.dtype] = []
    layer: Any = model.wide
    hook = layer.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = model(torch.ones(4, 4)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    hook.remove()
    return seen


def actions_in(folder: Path) -> list[Action]:
    return [*read_run(folder).actions]


def test_without_a_wish_there_is_an_alert_and_nothing_else(tmp_path: Path) -> None:
    with halfstep.watch(tmp_path, sinks=["jsonl"]) as seen:
        train(Overflowing(), 14)
    assert "persistent_skips" in {alert.rule for alert in seen.alerts}
    assert actions_in(tmp_path) == []


def test_it_warns(tmp_path: Path) -> None:
    with (
        pytest.warns(HalfstepWarning, match=r"1\d optimizer steps in a row were skipped"),
        halfstep.watch(tmp_path, sinks=["jsonl"], on_persistent_skips="warn"),
    ):
        train(Overflowing(), 16)
    assert [(each.rule, each.action) for each in actions_in(tmp_path)] == [("persistent_skips", "warn")]


def test_it_raises_between_two_steps(tmp_path: Path) -> None:
    model = Overflowing()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with (
        pytest.raises(PersistentSkipsError, match="in a row were skipped"),
        halfstep.watch(tmp_path, sinks=["jsonl"], on_persistent_skips="raise"),
    ):
        train(model, 100)
    saved = read_run(tmp_path)
    assert 10 <= len(saved.steps) < 20
    assert [each.action for each in saved.actions] == ["raise"]
    assert saved.ends[0].outcome == "PersistentSkipsError"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_it_saves_and_stops(tmp_path: Path) -> None:
    model = Overflowing()
    with (
        pytest.raises(PersistentSkipsError, match=r"stopped\.pt"),
        halfstep.watch(tmp_path, sinks=["jsonl"], on_persistent_skips="save_and_stop"),
    ):
        train(model, 100)
    kept = torch.load(tmp_path / "stopped.pt")
    fresh = Overflowing()
    fresh.load_state_dict(kept["model"])
    assert all(torch.equal(value, kept["model"][name]) for name, value in model.state_dict().items())
    assert set(kept["scaler"]) == {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
    assert kept["step"] == len(read_run(tmp_path).steps)
    assert "param_groups" in kept["optimizer"]
    assert not [*tmp_path.glob("*.part")]


def test_it_falls_back_to_the_remedy_that_a_diagnosis_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with halfstep.watch(tmp_path, sinks=["jsonl"], on_persistent_skips="fall_back"):
        dtypes = train(Overflowing(), 40)
    actions = [each for each in actions_in(tmp_path) if each.action == "fall_back"]
    assert "in fp16 with wide=fp32" in actions[-1].message
    assert dtypes[0] is torch.float16
    assert dtypes[-1] is torch.float32
    assert not read_run(tmp_path).steps.skipped[-10:].any()
    diagnosis = Diagnosis.from_json((tmp_path / "diagnosis.json").read_text())
    assert diagnosis.origin is not None
    assert diagnosis.origin.site.module == "wide"


def test_it_falls_back_to_bf16_and_then_to_fp32_where_no_operation_is_to_blame(tmp_path: Path) -> None:
    model = Overflowing()
    dtypes: list[torch.dtype] = []

    class Poisoned(nn.Module):
        """Its gradients are NaN in every precision but fp32."""

        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.wide(x)
            return out.float() * (1.0 if out.dtype is torch.float32 else float("nan"))

    with halfstep.watch(tmp_path, sinks=["jsonl"], on_persistent_skips="fall_back", model=model):
        dtypes = train(Poisoned(), 70)
    changes = [each.message for each in actions_in(tmp_path) if each.action == "fall_back"]
    assert any("goes on in bf16" in change for change in changes)
    assert "goes on in fp32" in changes[-1]
    assert torch.bfloat16 in dtypes
    assert dtypes[-1] is torch.float32
    assert not read_run(tmp_path).steps.skipped[-5:].any()


def test_what_was_changed_is_put_back(tmp_path: Path) -> None:
    model = Overflowing()
    classes = [type(module) for module in model.modules()]
    with halfstep.watch(tmp_path, sinks=["jsonl"], on_persistent_skips="fall_back"):
        train(model, 40)
    assert [type(module) for module in model.modules()] == classes
    with torch.autocast("cpu", dtype=torch.float16):
        assert model.inner(torch.ones(1, 4)).dtype is torch.float16


def test_it_looks_into_a_step_where_that_was_asked_for(tmp_path: Path) -> None:
    with halfstep.watch(tmp_path, sinks=["jsonl"], diagnose=True):
        train(Overflowing(), 12)
    assert [each.action for each in actions_in(tmp_path)] == ["diagnose"]
    assert "wide" in actions_in(tmp_path)[0].message


def test_a_healthy_run_is_left_alone(tmp_path: Path) -> None:
    model = Overflowing()
    with torch.no_grad():
        model.wide.weight.fill_(0.1)
    with halfstep.watch(tmp_path, sinks=["jsonl"], on_persistent_skips="raise", diagnose=True):
        train(model, 30)
    assert actions_in(tmp_path) == []
    assert len(read_run(tmp_path).steps) == 30


def test_an_unknown_wish_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"on_persistent_skips='stop'.*'warn', 'raise', 'save_and_stop', 'fall_back', or None"):
        halfstep.watch(tmp_path, on_persistent_skips="stop")  # type: ignore[arg-type]


def test_a_model_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidTypeError, match=r"watch\(model=\.\.\.\) takes a torch\.nn\.Module, not a list"):
        halfstep.watch(tmp_path, model=[])  # type: ignore[arg-type]
