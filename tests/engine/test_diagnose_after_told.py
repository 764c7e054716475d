"""When an engine finds out why it skips, what it says, and what is left where that fails."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep import LossScaler, MixedPrecision
from halfstep.errors import ConfigurationError, HalfstepError, HalfstepWarning, InvalidTypeError
from halfstep.numerics import trace
from halfstep.policy import Policy, attach_policy
from halfstep.randomness import RandomState
from halfstep.records import Diagnosis
from tests.engine import watched as watched_module
from tests.engine.loops import OPTIMIZERS, same_state
from tests.engine.watched import Watched, overflowing_line


class Captures:
    """How often the random numbers were kept."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = RandomState.capture

        def capture() -> RandomState:
            self.count += 1
            return original()

        patched.setattr(RandomState, "capture", capture)


@pytest.mark.parametrize("fused", [True, False])
def test_a_healthy_run_keeps_no_random_numbers(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(
        diagnose_after=3, scheduled=False, optimizer=lambda model: OPTIMIZERS["adamw-fused" if fused else "adamw"](model.parameters())
    )
    captures = Captures(monkeypatch)
    watched.run(".........")
    assert captures.count <= (3 if fused else 0)  # The verdict of a device is read once in so many steps.
    before = captures.count
    watched.run("F")
    assert captures.count - before <= fused


def test_only_the_step_that_may_be_replayed_keeps_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(diagnose_after=3)
    captures = Captures(monkeypatch)
    counts = []
    for letter in "FF.FFFFF.":
        before = captures.count
        watched.run(letter)
        counts.append(captures.count - before)
    # The replay keeps those of outside, too.
    assert [count > 0 for count in counts] == [False, False, True, False, False, True, False, False, False]
    assert counts[2] == 1


@pytest.mark.parametrize("by_hand", [True, False])
def test_the_warning_names_the_users_line(by_hand: bool) -> None:
    watched = Watched(diagnose_after=1)
    x, y = torch.randn(6, 5), torch.zeros(6, dtype=torch.long)
    step = watched.by_hand if by_hand else watched.train_step
    if by_hand:
        step(x, y, 1e6, 1.0)
    with pytest.warns(HalfstepWarning, match=r"^1 step in a row was skipped\. Diagnosis: forward, at wide \(") as told:
        step(x, y, 1e6, 1.0)
    (warning,) = told
    assert warning.filename == watched_module.__file__
    text = Path(warning.filename).read_text(encoding="utf-8").splitlines()[warning.lineno - 1]
    assert ("self.amp.step()" if by_hand else "self.amp.train_step(") in text
    assert "amp.diagnosis holds all of it." in str(warning.message)
    diagnosis = watched.amp.diagnosis
    assert diagnosis is not None
    assert diagnosis.origin is not None
    assert diagnosis.origin.site.file.endswith("watched.py")
    assert diagnosis.origin.site.line == overflowing_line()
    assert [each.text for each in diagnosis.excerpt if each.is_marked] == ["        large = self.up(x) * factor  # here: overflows"]


def test_what_is_held_is_a_record() -> None:
    watched = Watched(diagnose_after=2)
    watched.run("F")
    nothing = watched.amp.diagnosis
    watched.run("F")
    diagnosis = watched.amp.diagnosis
    assert nothing is None
    assert diagnosis is not None
    text = diagnosis.to_json()
    assert Diagnosis.from_json(text).to_json() == text
    assert diagnosis.is_finding
    assert [each.override for each in diagnosis.remedies if each.verified] == ["wide=fp32"]
    assert diagnosis.task.endswith("<lambda>")
    watched.run(".")
    assert watched.amp.diagnosis is diagnosis


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        (0, ConfigurationError, r"MixedPrecision\(diagnose_after=0\): the number of skips in a row that is diagnosed is 1 or more"),
        (-3, ConfigurationError, r"diagnose_after=-3"),
        (2.0, InvalidTypeError, r"MixedPrecision\(diagnose_after=\.\.\.\) takes a whole number, not 2\.0"),
        (True, InvalidTypeError, r"takes a whole number, not True"),
        ("5", InvalidTypeError, r"takes a whole number, not '5'"),
    ],
)
def test_a_wrong_number_is_refused(value: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Watched(diagnose_after=value)


def test_it_never_reaches_a_limit_of_its_own_before_the_engine_raises() -> None:
    watched = Watched(diagnose_after=3, precision="bf16", max_consecutive_skips=3)
    watched.run("MM")
    with pytest.raises(HalfstepError, match="3 steps in a row were skipped"):
        watched.run("M")
    assert watched.amp.diagnosis is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("call", [1, 2, 3])  # The fourth is a further step with a remedy, which is not clean then.
@pytest.mark.parametrize("precision", ["fp16", "fp16; head=fp32"])
def test_an_exception_in_a_replay_leaves_the_engine_as_it_was(precision: str, call: int, error: type[BaseException]) -> None:
    plain = Watched(precision=precision)
    expected = plain.run("..F.F")
    watched = Watched(precision=precision, diagnose_after=1)
    watched.run("..")
    x, y = watched.batch()
    calls = itertools.count()

    def fails(x: Tensor, y: Tensor) -> Tensor:
        if next(calls) == call:
            raise error("in a replay")
        return watched.loss(x, y, 1e6, 1.0)

    before = deepcopy(watched.model.state_dict())
    with pytest.raises(error, match="in a replay"):
        watched.amp.train_step(fails, x, y)
    assert same_state(watched.model.state_dict(), before)
    assert all(each.grad is None for each in watched.model.parameters())
    assert watched.amp.stats().steps == 3
    assert watched.amp.diagnosis is None
    assert same_state(watched.run(".F")[:6], expected[:6])
    assert same_state(watched.left()[7], expected[7])
    assert watched.causes == ["forward"]


@pytest.mark.parametrize("story", ["..", "..FFF.", "FFF"])
@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("precision", ["fp16", "fp16; head=fp32"])
def test_an_engine_that_is_dropped_is_freed(precision: str, by_hand: bool, story: str) -> None:
    def gone(after: int | None) -> list[bool]:
        watched = Watched(diagnose_after=after, precision=precision, scheduled=False)
        watched.run(story, by_hand=by_hand)
        refs = [weakref.ref(each) for each in (watched.amp, watched.model, watched.optimizers[0])]
        del watched
        first = refs[0]() is None
        gc.collect()
        return [first, *(each() is None for each in refs)]

    gc.collect()
    gc.disable()
    try:
        assert gone(2) == gone(None)
        assert gone(2)[1:] == [True, True, True]
    finally:
        gc.enable()


def overridden() -> Watched:
    return Watched(diagnose_after=1, precision="fp16; head=fp32")


def test_a_policy_that_was_removed_stays_removed() -> None:
    watched = overridden()
    assert watched.amp.policy_handle is not None
    watched.amp.policy_handle.remove()
    plain = Watched(precision="fp16; head=fp32")
    assert plain.amp.policy_handle is not None
    plain.amp.policy_handle.remove()
    watched.run("F")
    with watched.amp.autocast():
        assert watched.model(torch.ones(6, 5)).dtype == torch.float16
    assert attach_policy(Policy.parse("fp16; head=fp32"), watched.model, everywhere=False) is not None


def test_a_handle_that_the_user_holds_still_removes_the_policy() -> None:
    watched = overridden()
    handle = watched.amp.policy_handle
    assert handle is not None
    watched.run("F")
    handle.remove()
    with watched.amp.autocast():
        assert watched.model(torch.ones(6, 5)).dtype == torch.float16


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_warning_that_is_an_error_leaves_the_engine_as_it_was(by_hand: bool) -> None:
    watched = Watched(diagnose_after=1)
    step = watched.by_hand if by_hand else watched.train_step
    if by_hand:
        step(*watched.batch(), 1e6, 1.0)
    before = deepcopy(watched.model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(HalfstepWarning, match="Diagnosis: forward"):
            step(*watched.batch(), 1e6, 1.0)
    assert same_state(watched.model.state_dict(), before)
    assert all(each.grad is None for each in watched.model.parameters())
    step(*watched.batch(), 1.0, 1.0)
    assert watched.amp.stats().steps == 2 + by_hand


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_loop_that_is_traced_already_goes_on(by_hand: bool) -> None:
    watched = Watched(diagnose_after=1)
    with trace(watched.model):
        watched.run("FF..", by_hand=by_hand)
    assert watched.amp.stats().steps == 4


class Compiled(Watched):
    """The same with a compiled model."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        torch._dynamo.reset()
        self.amp = MixedPrecision(
            torch.compile(self.model, backend="eager"),  # type: ignore[arg-type]
            self.optimizers[0],
            "fp16",
            diagnose_after=2,
            scaler=LossScaler(init_scale=2.0**8),
        )


@pytest.mark.parametrize(
    "by_hand",
    [
        False,
        True,
    ],
)
def test_a_compiled_model_is_said_once(by_hand: bool) -> None:
    watched = Compiled()
    step = watched.by_hand if by_hand else watched.train_step
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", HalfstepWarning)
        warnings.filterwarnings("ignore", "Using `torch.compile", UserWarning)  # torch's own, of global hooks
        for last in (1.0, 0.0, 0.0, 0.0, 1.0):
            step(*watched.batch(), 1e6 if last == 0 else 1.0, 1.0)
    assert watched.amp.stats().steps == 5
    assert watched.amp.diagnosis is not None
    assert [(each.category, each.filename) for each in told] == [(HalfstepWarning, watched_module.__file__)]
