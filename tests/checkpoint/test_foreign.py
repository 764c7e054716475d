from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfstep.checkpoint import ImportedScaler, import_scaler_state
from halfstep.checkpoint.contents import capture
from halfstep.checkpoint.writing import write_sealed
from halfstep.engine import MixedPrecision
from halfstep.errors import (
    DamagedCheckpointError,
    HalfstepWarning,
)
from halfstep.scaler import LossScaler
from tests.checkpoint.loops import (
    AFTER,
    BEFORE,
    GROWTH,
    INF,
    STATE,
    TARGETS,
    follow,
    followed,
    scaler_of,
    target,
    theirs,
)


def apex(state: dict[str, Any]) -> dict[str, Any]:
    return {"loss_scaler0": {"loss_scale": state["scale"], "unskipped": state["_growth_tracker"]}}


FORMS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "alone": (lambda state: state, ""),
    "scaler": (lambda state: {"model": {"w": torch.ones(2)}, "scaler": state}, "scaler"),
    "scaler_state_dict": (lambda state: {"epoch": 3, "scaler_state_dict": state}, "scaler_state_dict"),
    "nested": (lambda state: {"amp": {"scaler": state}}, "amp.scaler"),
    "apex": (apex, "loss_scaler0"),
    "apex in a checkpoint": (lambda state: {"model": {}, "amp": apex(state)}, "amp.loss_scaler0"),
    "lightning": (lambda state: {"pytorch-lightning_version": "2.6", "MixedPrecision": state}, "MixedPrecision"),
    "lightning 1.9": (lambda state: {"pytorch-lightning_version": "1.9", "MixedPrecisionPlugin": state}, "MixedPrecisionPlugin"),
    "lightning 1.5": (lambda state: {"pytorch-lightning_version": "1.5", "native_amp_scaling_state": state}, "native_amp_scaling_state"),
    "tensors": (lambda state: {"scaler": {name: torch.tensor(value) for name, value in state.items()}}, "scaler"),
    "numpy": (lambda state: {"scaler": {name: np.array([value])[0] for name, value in state.items()}}, "scaler"),
}


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("way", ["file", "dictionary"])
@pytest.mark.parametrize(("form", "key"), FORMS.values(), ids=FORMS)
def test_a_run_goes_on_as_the_one_that_never_stopped(
    form: Callable[[dict[str, Any]], Any], key: str, way: str, kind: str, tmp_path: Path
) -> None:
    whole, made = theirs(), target(kind)
    saved, path = form(whole.state_dict()), tmp_path / "last.pt"
    torch.save(saved, path)
    imported = import_scaler_state(saved if way == "dictionary" else path, made)
    assert imported == ImportedScaler(source="" if way == "dictionary" else str(path), key=key, scale=whole.get_scale(), growth_tracker=2)
    assert followed(made, AFTER) == follow(whole, AFTER)


@settings(max_examples=60)
@given(st.lists(st.sampled_from([1.0, 1.0, INF]), max_size=12), st.lists(st.sampled_from([1.0, 1.0, INF]), max_size=12), st.integers(1, 5))
def test_any_run_goes_on_as_the_one_that_never_stopped(before: list[float], after: list[float], interval: int) -> None:
    whole = theirs(before, growth_interval=interval, init_scale=2.0**30)  # Far above the floor that a LossScaler has.
    scalers = [LossScaler("cpu", growth_interval=interval), torch.amp.GradScaler("cpu", growth_interval=interval)]
    for made in scalers:
        follow(made, [1.0])
        import_scaler_state({"scaler": whole.state_dict()}, made)
    expected = follow(whole, after)
    assert [follow(made, after) for made in scalers] == [expected, expected]


@pytest.mark.parametrize("kind", ["LossScaler", "engine"])
def test_the_state_of_a_loss_scaler_comes_over_whole(kind: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"growth_interval": GROWTH, "hysteresis": 2, "max_scale": 2.0**20, "max_consecutive_skips": 50}
    whole, made = LossScaler("cpu", init_scale=2.0**12, **settings), target(kind, **settings)
    follow(whole, [*BEFORE, INF])
    torch.save({"scaler": whole.state_dict()}, tmp_path / "last.pt")
    import_scaler_state(tmp_path / "last.pt", made)
    mine = scaler_of(made)
    assert isinstance(mine, LossScaler)
    assert mine.stats() == whole.stats()
    assert followed(made, AFTER) == follow(whole, AFTER)
    assert {**mine.state_dict(), "init_scale": 0} == {**whole.state_dict(), "init_scale": 0}


def test_the_state_of_an_engine(tmp_path: Path) -> None:
    source, made = target("engine"), target("engine", init_scale=2.0)
    assert isinstance(source, MixedPrecision)
    followed(source, BEFORE)
    torch.save({"amp": source.state_dict(), "extra": {"scaler": STATE}}, tmp_path / "last.pt")
    assert import_scaler_state(source.state_dict(), target("engine")).key == "scaler"
    assert import_scaler_state(tmp_path / "last.pt", made).key == "amp.scaler"
    assert scaler_of(made).get_scale() == source.scale(torch.ones(()))
    assert followed(made, AFTER) == followed(source, AFTER)


def test_a_file_of_an_old_torch(tmp_path: Path) -> None:
    whole, made = theirs(), target("engine")
    torch.save({"scaler": whole.state_dict()}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    import_scaler_state(str(tmp_path / "old.pt"), made)
    assert followed(made, AFTER) == follow(whole, AFTER)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_of_halfstep_is_verified_first(ranks: int, tmp_path: Path) -> None:
    source, path = target("engine"), tmp_path / "rank-0.pt"
    assert isinstance(source, MixedPrecision)
    followed(source, BEFORE)
    write_sealed(capture({"": source}, step=4, extra={"note": "halfstep:"}, ranks=None), path, ranks=ranks, rank=0)
    made = target("engine")
    assert import_scaler_state(path if ranks == 1 else tmp_path, made).key == "amp.scaler"
    assert scaler_of(made).state_dict() == scaler_of(source).state_dict()
    whole = bytearray(path.read_bytes())
    whole[whole.index(b"_growth_tracker") + 20] ^= 1
    path.write_bytes(whole)
    before = scaler_of(made).state_dict()
    with pytest.raises(DamagedCheckpointError, match=r"rank-0\.pt is damaged"):
        import_scaler_state(path, made)
    assert scaler_of(made).state_dict() == before


@pytest.mark.parametrize("kind", TARGETS)
def test_settings_stay_and_those_that_differ_are_named(kind: str) -> None:
    made = target(kind, growth_interval=5)
    source = {**STATE, "growth_factor": 4.0, "growth_interval": 100, "_growth_tracker": 50}
    with pytest.warns(
        HalfstepWarning,
        match=re.escape(
            "The state of the loss scaler in the dictionary at 'scaler': It was saved with growth_factor=4.0 (here 2.0), "
            "growth_interval=100 (here 5). The settings of this run stay; to take those over, pass adopt_settings=True."
        ),
    ) as caught:
        imported = import_scaler_state({"scaler": source}, made)
    assert len(caught) == 1
    assert caught[0].filename == __file__, "the warning points elsewhere"
    assert (imported.scale, imported.growth_tracker) == (512.0, 4)
    mine = scaler_of(made)
    assert (mine.get_growth_factor(), mine.get_backoff_factor(), mine.get_growth_interval()) == (2.0, 0.5, 5)
    assert followed(made, [1.0]) == [(1024.0, 0)]


@pytest.mark.parametrize("kind", TARGETS)
def test_settings_are_adopted(kind: str) -> None:
    made = target(kind, growth_interval=5)
    source = {**STATE, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 100, "_growth_tracker": 99}
    imported = import_scaler_state({"scaler": source}, made, adopt_settings=True)
    assert (imported.scale, imported.growth_tracker) == (512.0, 99)
    mine = scaler_of(made)
    assert (mine.get_growth_factor(), mine.get_backoff_factor(), mine.get_growth_interval()) == (4.0, 0.25, 100)
    assert followed(made, [1.0, INF]) == [(2048.0, 0), (512.0, 0)]


@pytest.mark.parametrize("kind", TARGETS)
def test_there_may_be_no_settings_to_adopt(kind: str) -> None:
    made = target(kind)
    with pytest.warns(HalfstepWarning, match="It has no settings in it, so that there are none to adopt; those of this run stay"):
        import_scaler_state(apex(STATE), made, adopt_settings=True)
    assert scaler_of(made).get_growth_interval() == GROWTH
    assert scaler_of(made).get_scale() == 512.0


def test_settings_of_a_loss_scaler() -> None:
    whole = LossScaler("cpu", init_scale=64.0, growth_interval=GROWTH, hysteresis=2, max_scale=2.0**20)
    made = LossScaler("cpu", growth_interval=GROWTH)
    with pytest.warns(
        HalfstepWarning, match=r"saved with max_scale=1048576\.0 \(here None\), hysteresis=2 \(here 0\)\. The settings of this"
    ):
        import_scaler_state(whole.state_dict(), made)
    assert made.settings == LossScaler("cpu", growth_interval=GROWTH).settings
    import_scaler_state(whole.state_dict(), made, adopt_settings=True)
    assert made.settings == whole.settings


@pytest.mark.parametrize("adopt", [True, False])
@pytest.mark.parametrize("kind", ["GradScaler", "engine with a GradScaler"])
def test_what_a_scaler_of_torch_cannot_do(kind: str, adopt: bool) -> None:
    whole = LossScaler("cpu", init_scale=64.0, growth_interval=GROWTH, hysteresis=2, static=True, max_scale=2.0**20)
    made = target(kind)
    with pytest.warns(
        HalfstepWarning,
        match=r": It was saved with max_scale=1048576\.0, hysteresis=2, static=True, which this GradScaler cannot do\. Use a halfstep",
    ):
        import_scaler_state(whole.state_dict(), made, adopt_settings=adopt)
    assert scaler_of(made).get_scale() == 64.0
    with warnings.catch_warnings():
        import_scaler_state(LossScaler("cpu", growth_interval=GROWTH).state_dict(), made, adopt_settings=adopt)


@pytest.mark.parametrize("kind", ["LossScaler", "engine"])
def test_a_scale_beyond_the_bounds_of_this_run(kind: str) -> None:
    for scale, bounds, expected in ((0.25, {}, 1.0), (2.0**18, {"max_scale": 2.0**17}, 2.0**17)):
        made = target(kind, **bounds)
        with pytest.warns(HalfstepWarning, match=rf"The scale in it, {scale:g}, lies beyond this run's bounds, min_scale=1 an") as caught:
            imported = import_scaler_state({**STATE, "scale": scale}, made)
        assert len(caught) == 1
        assert imported.scale == scaler_of(made).get_scale() == expected
    made = target(kind)
    with pytest.warns(HalfstepWarning, match=r"beyond this run's bounds, min_scale=1 and max_scale=None; the run goes on with 1\."):
        import_scaler_state({**STATE, "scale": 0.25}, made, adopt_settings=True)
    for unbound in ("GradScaler", "engine with a GradScaler"):
        assert import_scaler_state({**STATE, "scale": 0.25}, target(unbound)).scale == 0.25


@pytest.mark.parametrize("kind", ["LossScaler", "engine"])
def test_a_static_scale_stays(kind: str) -> None:
    made = target(kind, init_scale=8.0, static=True)
    with pytest.warns(HalfstepWarning, match=r"The scale in it is 512, but this run's is static and stays at 8\."):
        assert import_scaler_state(STATE, made).scale == 8.0
    import_scaler_state({**STATE, "scale": 8.0}, made)
    state = LossScaler("cpu", init_scale=4.0, static=True, growth_interval=GROWTH).state_dict()
    assert import_scaler_state(state, made, adopt_settings=True).scale == 4.0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.sampled_from(["scaler", "state", "gan.scaler", "x"]), st.integers(0, 5), st.floats(2.0**-10, 2.0**30, width=32))
def test_states_at_any_depth_are_loaded(tmp_path: Path, name: str, depth: int, scale: float) -> None:
    saved: Any = {**STATE, "scale": scale}
    for _ in range(depth):
        saved = {"epoch": 1, name: saved}
    torch.save(saved, tmp_path / "last.pt")
    made = LossScaler("cpu", min_scale=0.0, growth_interval=GROWTH)
    imported = import_scaler_state(tmp_path / "last.pt", made)
    assert (imported.key, imported.scale) == (".".join([name] * depth), scale)
    assert import_scaler_state(tmp_path / "last.pt", made, key=imported.key) == imported
