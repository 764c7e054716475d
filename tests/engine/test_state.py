from __future__ import annotations

import io
import json
from copy import deepcopy
from typing import Any

import pytest
import torch

from halfstep.engine import MixedPrecision
from halfstep.errors import ConfigurationError, HalfstepError, HalfstepWarning, InvalidTypeError, StepOrderError
from halfstep.records import StepRecord
from halfstep.scaler import LossScaler
from tests.engine.loops import OPTIMIZERS, loss_of, make_batches, make_net, same_state

INF = float("inf")
PRECISIONS = ["fp32", "bf16", "fp16"]
FACTORS = [1.0, INF, 1.0, 1.0, INF, INF, 1.0, 1.0]
BATCHES = make_batches(len(FACTORS))
SETTINGS: dict[str, Any] = {"init_scale": 2.0**9, "growth_interval": 3}


def scaler_of(kind: str) -> torch.amp.GradScaler | None:
    made: dict[str, Any] = {
        "loss scaler": lambda: LossScaler(**SETTINGS, hysteresis=1),
        "torch's": lambda: torch.amp.GradScaler("cpu", **SETTINGS),
    }
    return made[kind]() if kind in made else None


def engine(precision: str = "fp16", *, optimizer: str = "momentum", **settings: Any) -> MixedPrecision:
    model = make_net()
    return MixedPrecision(model, OPTIMIZERS[optimizer](model.parameters()), precision, **settings)


def steps(amp: MixedPrecision, start: int, stop: int) -> list[StepRecord]:
    return [
        amp.train_step(lambda x, y, factor=factor: loss_of(amp.model, x, y, factor), x, y)
        for (x, y), factor in zip(BATCHES[start:stop], FACTORS[start:stop], strict=True)
    ]


def seen(records: list[StepRecord]) -> list[Any]:
    return [(record.step, record.skipped, record.scale, str(record.loss)) for record in records]


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def through_torch(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("travel", [lambda state: state, deepcopy, through_json, through_torch])
@pytest.mark.parametrize("stop", [0, 2, 5])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw-fused"])
@pytest.mark.parametrize(("precision", "kind"), [("fp32", ""), ("bf16", ""), ("fp16", ""), ("fp16", "loss scaler"), ("fp16", "torch's")])
def test_a_run_that_is_continued_equals_one_that_was_never_stopped(
    precision: str, kind: str, optimizer: str, stop: int, travel: Any
) -> None:
    whole, first, second = (engine(precision, optimizer=optimizer, scaler=scaler_of(kind)) for _ in range(3))
    records = steps(whole, 0, len(FACTORS))
    steps(first, 0, stop)
    state = travel(first.state_dict())
    assert state == first.state_dict()
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(deepcopy(first.optimizer.state_dict()))
    second.load_state_dict(state)
    assert seen(steps(second, stop, len(FACTORS))) == seen(records[stop:])
    assert same_state(second.model.state_dict(), whole.model.state_dict())
    assert same_state(second.optimizer.state_dict(), whole.optimizer.state_dict())
    assert second.state_dict() == whole.state_dict()
    if precision == "fp16" and kind != "torch's":
        assert second.stats() == whole.stats()


def test_a_state_names_its_parts() -> None:
    amp = engine("bf16")
    steps(amp, 0, 3)
    skips = amp.stats().skips
    assert amp.state_dict() == {
        "precision": "bf16",
        "steps": 3,
        "scaler": None,
        "counts": {"steps": 3, "skips": skips, "consecutive_skips": amp.stats().consecutive_skips},
    }
    twin = engine("bf16")
    twin.load_state_dict(amp.state_dict())
    assert twin.stats() == amp.stats()
    amp = engine("fp16")
    steps(amp, 0, 2)
    state = amp.state_dict()
    assert (state["precision"], state["steps"], state["scaler"]["scale"]) == ("fp16", 2, 2.0**15)
    plain = torch.amp.GradScaler("cpu")
    plain.load_state_dict(state["scaler"])
    assert plain.get_scale() == 2.0**15


def test_from_fp16_to_bf16_the_scale_is_set_aside() -> None:
    source, target = engine("fp16"), engine("bf16")
    steps(source, 0, 3)
    with pytest.warns(HalfstepWarning, match=r"saved in fp16 with loss scaling; bf16 here needs none, so the scale is set aside") as caught:
        target.load_state_dict(source.state_dict())
    assert caught[0].filename == __file__, "the warning points elsewhere"
    assert target.scaler is None
    assert [record.step for record in steps(target, 3, 5)] == [4, 5]


@pytest.mark.parametrize("kind", ["loss scaler", "torch's"])
def test_from_bf16_to_fp16_the_scale_is_fresh(kind: str) -> None:
    source, target = engine("bf16"), engine("fp16", scaler=scaler_of(kind))
    steps(source, 0, 3)
    with pytest.warns(HalfstepWarning, match=r"saved in bf16 without loss scaling; fp16 here starts with a fresh loss scale") as caught:
        target.load_state_dict(source.state_dict())
    assert caught[0].filename == __file__, "the warning points elsewhere"
    assert seen(steps(target, 3, 4))[0][:3] == (4, False, 2.0**9)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_between_precisions_without_scaling_nothing_is_said(precision: str) -> None:
    target = engine(precision)
    target.load_state_dict(engine("bf16").state_dict())
    assert target.stats().steps == 0


@pytest.mark.parametrize("kind", [LossScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("adopt", [True, False])
def test_settings_are_those_of_this_run_unless_they_are_adopted(adopt: bool, kind: Any) -> None:
    theirs = kind("cpu", init_scale=64.0, growth_interval=7, growth_factor=4.0, backoff_factor=0.25)
    mine = kind("cpu", init_scale=2.0, growth_interval=3)
    source, target = engine(scaler=theirs), engine(scaler=mine)
    for x, y in make_batches(5):
        source.train_step(lambda x, y: loss_of(source.model, x, y), x, y)
    target.load_state_dict(source.state_dict(), adopt_settings=adopt)
    assert mine.get_scale() == 64.0
    assert mine.get_growth_interval() == (7 if adopt else 3)
    assert mine.get_growth_factor() == (4.0 if adopt else 2.0)
    assert mine.get_backoff_factor() == (0.25 if adopt else 0.5)
    # Five good steps were counted: two more make the scale grow by the old interval, and one by the new, which is shorter.
    scales = [target.train_step(lambda x, y: loss_of(target.model, x, y), x, y).scale for x, y in make_batches(3)]
    assert scales == ([64.0, 64.0, 256.0] if adopt else [64.0, 128.0, 128.0])


@pytest.mark.parametrize("fused", [True, False])
def test_a_static_scale_that_adopts_moving_settings_is_recorded_as_it_moves(fused: bool) -> None:
    source, target = engine(scaler=LossScaler(init_scale=64.0, growth_interval=1)), engine(scaler=LossScaler(init_scale=8.0, static=True))
    if fused:
        target = engine(scaler=LossScaler(init_scale=8.0, static=True), optimizer="sgd-fused")
    assert seen(steps(target, 0, 1))[0][2] == 8.0
    target.load_state_dict(source.state_dict(), adopt_settings=True)
    assert [record.scale for record in steps(target, 2, 4)] == [64.0, 128.0]
    target.load_state_dict({**source.state_dict(), "scaler": LossScaler(init_scale=4.0, static=True).state_dict()}, adopt_settings=True)
    assert [record.scale for record in steps(target, 2, 4)] == [4.0, 4.0]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_pending_micro_batches_are_no_part_of_a_state(precision: str) -> None:
    amp = engine(precision, accumulate=3)
    state = amp.state_dict()
    amp.backward(loss_of(amp.model, *BATCHES[0]))
    with pytest.raises(StepOrderError, match=r"state_dict\(\) was called after 1 of accumulate=3 micro-batches, whose gradients would"):
        amp.state_dict()
    with pytest.raises(StepOrderError, match=r"load_state_dict\(\) was called after 1 of accumulate=3 .* end this one with flush\(\)"):
        amp.load_state_dict(state)
    assert amp.flush() is not None
    assert amp.state_dict()["steps"] == 1


def _without(state: Any, *names: str) -> Any:
    return {name: value for name, value in state.items() if name not in names}


BAD: list[tuple[Any, type[HalfstepError], str]] = [
    (lambda _: None, InvalidTypeError, r"An engine's state is a dictionary, .* not a NoneType"),
    (lambda state: [state], InvalidTypeError, r"not a list"),
    (lambda _: {}, ConfigurationError, r"The engine's state has no entry 'precision', but none\. Load what MixedPrecision\.state_dict\(\)"),
    (
        lambda state: state["scaler"],
        ConfigurationError,
        r"has no entry 'precision', but .*'scale'.* goes to amp\.scaler\.load_state_dict\(\)",
    ),
    (lambda state: _without(state, "scaler"), ConfigurationError, r"has no entry 'scaler', but 'precision', 'steps'"),
    (lambda state: {**state, "steps": 1.0}, InvalidTypeError, r"entry 'steps', is a whole number, not 1\.0"),
    (lambda state: {**state, "steps": True}, InvalidTypeError, r"entry 'steps', is a whole number, not True"),
    (lambda state: {**state, "steps": -1}, ConfigurationError, r"entry 'steps', is -1; allowed are whole numbers from 0"),
]
BAD_SCALERS: list[tuple[Any, type[HalfstepError]]] = [
    (lambda state: {**state, "scaler": 5}, InvalidTypeError),
    (lambda state: {**state, "scaler": {"scale": 4.0}}, ConfigurationError),
    (lambda state: {**state, "scaler": _without(state["scaler"], "_growth_tracker")}, ConfigurationError),
]


def check_unchanged(amp: MixedPrecision, spoil: Any, error: type[HalfstepError], match: str) -> None:
    steps(amp, 0, 2)
    before = deepcopy(amp.state_dict())
    other = engine(amp.precision, scaler=None if amp.scaler is None else type(amp.scaler)("cpu", init_scale=4.0))
    with pytest.raises(error, match=match):
        amp.load_state_dict(spoil({**other.state_dict(), "steps": 77}))
    assert amp.state_dict() == before
    fresh = engine(amp.precision, scaler=None if amp.scaler is None else scaler_of(kind_of(amp)))
    assert seen(steps(amp, 2, 5)) == seen(steps(fresh, 0, 5)[2:])


def kind_of(amp: MixedPrecision) -> str:
    return "loss scaler" if isinstance(amp.scaler, LossScaler) else "torch's"


@pytest.mark.parametrize("kind", ["", "loss scaler", "torch's"])
@pytest.mark.parametrize(("spoil", "error", "match"), BAD)
def test_a_wrong_state_is_refused_and_changes_nothing(spoil: Any, error: type[HalfstepError], match: str, kind: str) -> None:
    if not kind and "'scale'" in match:
        return  # Without a scaler its state is `None`.
    check_unchanged(engine("fp16" if kind else "bf16", scaler=scaler_of(kind)), spoil, error, match)


@pytest.mark.parametrize("kind", ["loss scaler", "torch's"])
@pytest.mark.parametrize(("spoil", "error"), BAD_SCALERS)
def test_a_wrong_state_of_the_scaler_is_refused_and_changes_nothing(spoil: Any, error: type[HalfstepError], kind: str) -> None:
    check_unchanged(engine(scaler=scaler_of(kind)), spoil, error, "state")


def test_torchs_scaler_takes_a_whole_state_or_none() -> None:
    """It would raise a KeyError in the middle, with the new scale in it."""
    check_unchanged(
        engine(scaler=scaler_of("torch's")),
        lambda state: {**state, "scaler": _without(state["scaler"], "growth_interval")},
        ConfigurationError,
        r"The scaler's state in the engine's has no entry 'growth_interval', but 'scale'",
    )


def test_torchs_scaler_keeps_no_counts() -> None:
    amp = engine(scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(
        ConfigurationError, match=r"A GradScaler does not count its steps\. Leave scaler out, or pass a halfstep\.LossScaler"
    ):
        amp.stats()
    assert engine("bf16", skip_nonfinite=False).stats().scale == 1.0
