"""What `import_scaler_state` refuses, and that nothing is changed then."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.checkpoint import import_scaler_state
from halfstep.engine import MixedPrecision
from halfstep.errors import (
    CheckpointError,
    ConfigurationError,
    HalfstepError,
    HalfstepWarning,
    InvalidTypeError,
    StepOrderError,
)
from halfstep.scaler import LossScaler
from tests.checkpoint.loops import (
    GROWTH,
    INF,
    KINDS,
    STATE,
    TARGETS,
    Target,
    engine,
    followed,
    scaler_of,
    target,
)

needs_a_user = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")


def unchanged(made: Target, source: Any, error: type[HalfstepError], match: str, **settings: Any) -> None:
    followed(made, [1.0])
    before = scaler_of(made).state_dict()
    with pytest.raises(error, match=match):
        import_scaler_state(source, made, **settings)
    assert scaler_of(made).state_dict() == before
    assert followed(made, [1.0])[0][0] == before["scale"]


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"scale": float("nan")},
        r"No run can go on from .* in the dictionary at 'scaler'\. 'scale': nan cannot be a loss scale\. Allowed",
    ),
    ({"scale": INF}, r"'scale': inf cannot be a loss scale"),
    ({"scale": 0.0}, r"'scale': 0\.0 cannot be a loss scale\. .* Import that of an earlier checkpoint, or start with a fresh scale"),
    ({"scale": -2.0}, r"'scale': -2\.0 cannot be a loss scale"),
    ({"scale": torch.tensor(float("nan"))}, r"'scale': nan cannot be a loss scale"),
    ({"scale": True}, r"'scale' takes a number, not True"),
    ({"scale": None}, r"'scale' takes a number, not None"),
    ({"scale": "512"}, r"in the dictionary at 'scaler' has 'scale', which is a str, not a number"),
    ({"scale": torch.ones(2)}, r"has 'scale', which is a Tensor, not a number"),
    ({"_growth_tracker": -1}, r"entry '_growth_tracker', is -1; allowed are whole numbers from 0"),
    ({"_growth_tracker": 1.5}, r"entry '_growth_tracker', is a whole number, not 1\.5"),
    ({"_growth_tracker": float("nan")}, r"entry '_growth_tracker', is a whole number, not nan"),
]


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize(("change", "match"), BAD)
def test_a_state_that_no_run_could_go_on_from(change: dict[str, Any], match: str, kind: str) -> None:
    unchanged(target(kind), {"scaler": {**STATE, **change}}, CheckpointError, match)


@pytest.mark.parametrize("kind", TARGETS)
def test_settings_that_cannot_be_adopted(kind: str) -> None:
    source = {**STATE, "growth_factor": 0.5}
    unchanged(target(kind), source, CheckpointError, r"growth_factor=0\.5\): allowed is a finite number above 1", adopt_settings=True)
    with pytest.warns(HalfstepWarning, match=r"growth_factor=0\.5 \(here 2\.0\)"):
        import_scaler_state(source, target(kind))


@pytest.mark.parametrize("kind", TARGETS)
def test_warnings_that_are_errors_change_nothing(kind: str) -> None:
    made = target(kind)
    before = scaler_of(made).state_dict()
    with pytest.raises(HalfstepWarning, match="growth_interval=100"):
        import_scaler_state({**STATE, "growth_interval": 100}, made)
    assert scaler_of(made).state_dict() == before


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_middle_of_an_iteration(kind: str) -> None:
    made = KINDS[kind]("cpu", growth_interval=GROWTH)
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    made.scale(weight * 1.0).backward()  # type: ignore[no-untyped-call]
    import_scaler_state(STATE, made)
    made.unscale_(optimizer)
    with pytest.raises(StepOrderError, match=r"was called between unscale_\(\) or step\(\) and update\(\): call it between iterations"):
        import_scaler_state({**STATE, "scale": 4.0}, made)
    made.step(optimizer)
    with pytest.raises(StepOrderError, match=r"was called between unscale_\(\) or step\(\)"):
        import_scaler_state({**STATE, "scale": 4.0}, made)
    assert made.get_scale() == 512.0
    made.update()
    assert import_scaler_state({**STATE, "scale": 4.0}, made).scale == 4.0


@pytest.mark.parametrize("kind", ["LossScaler", "GradScaler"])
def test_in_the_middle_of_a_step_of_an_engine(kind: str) -> None:
    made = engine(accumulate=2, scaler=KINDS[kind]("cpu", growth_interval=GROWTH))
    made.backward(made.model(torch.ones(1, 1)).float().sum())
    with pytest.raises(StepOrderError, match=r"load_state_dict\(\) was called after 1 of accumulate=2 micro-batches"):
        import_scaler_state(STATE, made)
    assert scaler_of(made).get_scale() == 65536.0
    made.flush()
    assert import_scaler_state(STATE, made).scale == 512.0


def test_steps_of_an_engine_go_on() -> None:
    made = target("engine")
    assert isinstance(made, MixedPrecision)
    followed(made, [1.0, 1.0])
    import_scaler_state(STATE, made)
    assert made.train_step(lambda x: made.model(x).float().sum(), torch.ones(1, 1)).step == 3


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_an_engine_that_scales_nothing(precision: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"trains in {precision} without a loss scaler, since its losses need no scaling: .* nothing to load"
    ):
        import_scaler_state(STATE, engine(precision))


def test_scalers_that_are_disabled() -> None:
    off = torch.amp.GradScaler("cpu", enabled=False)
    for each, name in ((off, "GradScaler"), (LossScaler(enabled=False), "LossScaler")):
        with pytest.raises(ConfigurationError, match=rf"This {name} is disabled: there is nothing to load .* Pass one that is enabled"):
            import_scaler_state(STATE, each)
    with pytest.warns(HalfstepWarning, match="fp16 runs without loss scaling"):
        made = engine(scaler=off)
    with pytest.raises(ConfigurationError, match="trains in fp16 without a loss scaler, since its scaler is disabled"):
        import_scaler_state(STATE, made)


@pytest.mark.parametrize("wrong", [None, "fp16", {"scaler": STATE}, nn.Linear(1, 1), torch.amp.GradScaler])
def test_what_is_no_scaler(wrong: Any) -> None:
    with pytest.raises(
        InvalidTypeError, match=r"takes a halfstep\.MixedPrecision, a halfstep\.LossScaler or a torch\.amp\.GradScaler, not"
    ):
        import_scaler_state(STATE, wrong)


@pytest.mark.parametrize("wrong", [None, 3, [STATE], b"scaler.pt", nn.Linear(1, 1)])
def test_what_is_no_source(wrong: Any) -> None:
    with pytest.raises(
        InvalidTypeError, match=r"\(source\) takes a path, or the dictionary that was loaded, not a (NoneType|int|list|by|L)"
    ):
        import_scaler_state(wrong, LossScaler("cpu"))


@pytest.mark.parametrize("wrong", [None, 3, ("generator", "scaler")])
def test_what_is_no_key(wrong: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"\(key=\.\.\.\) takes text, such as 'discriminator\.scaler', not"):
        import_scaler_state(STATE, LossScaler("cpu"), key=wrong)


def test_several_states(tmp_path: Path) -> None:
    made = LossScaler("cpu", growth_interval=GROWTH)
    torch.save({"generator": {"scaler": STATE}, "discriminator": {"scaler": {**STATE, "scale": 4.0}}}, tmp_path / "gan.pt")
    with pytest.raises(
        ConfigurationError,
        match=r"gan\.pt has several states of loss scalers, which differ: at 'generator\.scaler', 'discriminator\.scaler'\. Say which "
        r"one is meant, as in import_scaler_state\(\.\.\., key='generator\.scaler'\)",
    ):
        import_scaler_state(tmp_path / "gan.pt", made)
    assert made.get_scale() == 65536.0
    assert import_scaler_state(tmp_path / "gan.pt", made, key="discriminator").key == "discriminator.scaler"
    assert made.get_scale() == 4.0
    assert import_scaler_state(tmp_path / "gan.pt", made, key="generator.scaler").scale == 512.0
    with pytest.raises(
        ConfigurationError,
        match=r"key='x'\): there is nothing at that key\. The states of scalers are at 'generator\.scaler', 'discriminator",
    ):
        import_scaler_state(tmp_path / "gan.pt", made, key="x")


def test_several_losses_of_apex() -> None:
    saved = {"loss_scaler0": {"loss_scale": 4.0, "unskipped": 1}, "loss_scaler1": {"loss_scale": 8.0, "unskipped": 1}}
    with pytest.raises(ConfigurationError, match=r"The dictionary has several states .* at 'loss_scaler0', 'loss_scaler1'\."):
        import_scaler_state(saved, LossScaler("cpu"))
    assert import_scaler_state(saved, LossScaler("cpu"), key="loss_scaler1").scale == 8.0


def test_no_state(tmp_path: Path) -> None:
    made = LossScaler("cpu", init_scale=2048.0)
    torch.save({"state_dict": {}, "epoch": 3, "optimizer_states": []}, tmp_path / "last.ckpt")
    with pytest.raises(
        CheckpointError,
        match=r"last\.ckpt has no state of a loss scaler in it, .* Its keys are 'state_dict', 'epoch', 'optimizer_states'\. Without one "
        r"the run is not the one that was interrupted: its scale begins at 2048 again, steps are skipped until .* growth are lost\. If the",
    ):
        import_scaler_state(tmp_path / "last.ckpt", made)
    with pytest.raises(CheckpointError, match=r"Its keys are 'a0', .*'a19' and 30 more\."):
        import_scaler_state({f"a{number}": 1 for number in range(50)}, made)
    with pytest.raises(CheckpointError, match=rf"Its keys are '{'a' * 60}\.\.\.'\."):
        import_scaler_state({"a" * 1000: 1}, made)
    torch.save([1, 2], tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match=r"It holds a list\."):
        import_scaler_state(tmp_path / "last.ckpt", made)
    assert made.get_scale() == 2048.0


@pytest.mark.parametrize(("saved", "place"), [({}, ""), ({"scaler": {}, "model": {}}, " at 'scaler'")])
def test_the_state_of_a_disabled_scaler(saved: dict[str, Any], place: str, tmp_path: Path) -> None:
    torch.save(saved, tmp_path / "scaler.pt")
    with pytest.raises(
        CheckpointError, match=rf"scaler\.pt has the state of a scaler{place} that was disabled when it was saved, so that it"
    ):
        import_scaler_state(tmp_path / "scaler.pt", LossScaler("cpu"))


def test_the_state_of_an_engine_that_scaled_nothing() -> None:
    with pytest.raises(CheckpointError, match=r"The dictionary was saved in bf16, where losses are not scaled: a fresh scale is right\. L"):
        import_scaler_state(engine("bf16").state_dict(), LossScaler("cpu"))


ACCEPTED = r"Accepted are a file of torch\.save, such as Accelerate's scaler\.pt, a \.ckpt of Lightning, .* a folder with a file scaler\.pt"


def test_folders(tmp_path: Path) -> None:
    made, run = LossScaler("cpu", growth_interval=GROWTH), tmp_path / "run"
    run.mkdir()
    with pytest.raises(CheckpointError, match=rf"The folder .*run has no scaler\.pt in it, but nothing\. {ACCEPTED}"):
        import_scaler_state(run, made)
    for name in ("checkpoint-500", "checkpoint-1000"):
        (run / name).mkdir()
        torch.save(STATE, run / name / "scaler.pt")
    (run / "last.ckpt").touch()
    with pytest.raises(
        CheckpointError,
        match=r"but 'checkpoint-1000', 'checkpoint-500', 'last\.ckpt'\. Name one of the folders in it: 'checkpoint-1000', 'checkpoint.*\. "
        rf"{ACCEPTED} .* Runs in bf16 and fp32 save no scaler, because they have none\.",
    ):
        import_scaler_state(str(run), made)
    assert import_scaler_state(str(run / "checkpoint-500"), made).source == str(run / "checkpoint-500" / "scaler.pt")
    for name in ("rank-0.pt", "meta.pt"):
        (run / "checkpoint-500" / "scaler.pt").unlink(missing_ok=True)
        torch.save({"a": {"b": STATE}}, run / "checkpoint-500" / name)
        assert import_scaler_state(run / "checkpoint-500", made).source.endswith(name)
        (run / "checkpoint-500" / name).unlink()


def test_paths_that_lead_to_nothing(tmp_path: Path) -> None:
    made = LossScaler("cpu")
    for name in ("scaler.pt", "a" * 300, "nul\0"):
        with pytest.raises(CheckpointError, match=rf"(is not there\.|cannot be read: .*\.) {ACCEPTED}"):
            import_scaler_state(tmp_path / name, made)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no such files here")
def test_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(CheckpointError, match=rf"pipe\.pt is no regular file\. {ACCEPTED}"):
        import_scaler_state(tmp_path / "pipe.pt", LossScaler("cpu"))


@needs_a_user
def test_without_permission(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "scaler.pt")
    (tmp_path / "scaler.pt").chmod(0)
    with pytest.raises(CheckpointError, match=r"scaler\.pt cannot be read: Permission denied\."):
        import_scaler_state(tmp_path / "scaler.pt", LossScaler("cpu"))
    tmp_path.chmod(0)
    try:
        for path in (tmp_path, tmp_path / "scaler.pt"):
            with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
                import_scaler_state(path, LossScaler("cpu"))
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_that_may_not_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(CheckpointError, match=rf"cannot be read: Permission denied\. {ACCEPTED}"):
        import_scaler_state(tmp_path, LossScaler("cpu"))


class Harmful:
    def __reduce__(self) -> Any:
        return eval, ("open('canary.txt', 'w').close()",)


def test_a_harmful_object_beside_the_state_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"scaler": STATE, "hyper_parameters": {"layer": Harmful()}}, tmp_path / "last.ckpt")
    made = LossScaler("cpu", growth_interval=GROWTH)
    assert import_scaler_state(tmp_path / "last.ckpt", made).scale == 512.0
    torch.save({"scaler": {**STATE, "scale": Harmful()}}, tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match="has 'scale', which is a StandIn, not a number"):
        import_scaler_state(tmp_path / "last.ckpt", made)
    assert not Path("canary.txt").exists()
    torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert Path("canary.txt").exists(), "the object is harmless"
