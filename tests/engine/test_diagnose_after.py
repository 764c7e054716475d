"""An engine that finds out why it skips, and goes on as if it had not."""

from __future__ import annotations

import pytest
import torch

from halfstep import LossScaler
from tests.engine.loops import OPTIMIZERS, same_state
from tests.engine.watched import CAUSES, STORY, Watched, compare


@pytest.mark.parametrize("optimizer", [each for each in OPTIMIZERS if "fused" not in each])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_of_train_step_goes_on_bit_for_bit(optimizer: str, accumulate: int) -> None:
    watched = compare(
        optimizer=lambda model: OPTIMIZERS[optimizer](model.parameters()), accumulate=accumulate, max_grad_norm=0.5, max_grad_value=0.2
    )
    diagnosis = watched.amp.diagnosis
    assert diagnosis is not None
    assert diagnosis.origin is not None
    assert (diagnosis.origin.op, diagnosis.origin.site.module) == ("aten.mul.Tensor", "wide")
    assert (diagnosis.step, diagnosis.is_reproduced, diagnosis.verified) == (11, True, True)
    assert diagnosis.skips == 7
    assert diagnosis.precision == "fp16"


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize(
    ("optimizer", "scheduled"),
    [
        ("adamw", True),
        ("adamw", False),
        ("adamw-fused", True),
        ("sgd-fused", True),
        ("adamw-fused", False),
        ("sgd-fused", False),
    ],
)
def test_fused_or_not_and_by_hand_or_not(optimizer: str, by_hand: bool, scheduled: bool, accumulate: int) -> None:
    watched = compare(
        optimizer=lambda model: OPTIMIZERS[optimizer](model.parameters()), by_hand=by_hand, scheduled=scheduled, accumulate=accumulate
    )
    diagnosis = watched.amp.diagnosis
    assert diagnosis is not None
    assert diagnosis.origin is not None
    assert (diagnosis.origin.op, diagnosis.origin.site.module) == ("aten.mul.Tensor", "wide")
    assert (diagnosis.replays == 0) == by_hand


@pytest.mark.parametrize("retries", [1, 3])
@pytest.mark.parametrize("fused", [True, False])
def test_with_retries_each_try_counts(retries: int, fused: bool) -> None:
    watched = compare(
        "..F.F.", retries=retries, optimizer=lambda model: OPTIMIZERS["adamw-fused" if fused else "adamw"](model.parameters())
    )
    assert watched.amp.diagnosis is not None
    assert watched.amp.diagnosis.step == 3 + (retries + 1) + 1 + 1


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_with_several_optimizers(by_hand: bool, fused: bool) -> None:
    compare(
        by_hand=by_hand,
        optimizer=lambda model: [
            OPTIMIZERS["sgd-fused" if fused else "momentum"](model.wide.parameters()),
            OPTIMIZERS["adamw-fused" if fused else "adamw"](model.head.parameters()),
        ],
    )


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_with_an_optimizer_that_takes_a_closure(line_search: str | None) -> None:
    compare(optimizer=lambda model: torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3, history_size=2, line_search_fn=line_search))


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize(
    "precision", ["fp16; head=fp32", "fp16; op:log_softmax.int=fp32", "pure fp16; head=fp32", "bf16; wide=fp16; head=fp32"]
)
def test_with_a_policy_that_has_overrides(precision: str, by_hand: bool) -> None:
    watched = compare(precision=precision, by_hand=by_hand)
    assert watched.amp.diagnosis is not None
    assert watched.amp.diagnosis.origin is not None
    assert watched.amp.diagnosis.origin.site.module == "wide"
    assert watched.amp.policy_handle is not None


@pytest.mark.parametrize("letter", ["M", "D"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("fused", [True, False])
def test_what_is_not_finite_in_fp32_either(fused: bool, precision: str, letter: str) -> None:
    compare(
        STORY.replace("F", letter),
        precision=precision,
        told=[CAUSES[letter]] * 2,
        optimizer=lambda model: OPTIMIZERS["adamw-fused" if fused else "adamw"](model.parameters()),
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_trace_cannot_tell_what_fp32_would_do(precision: str) -> None:
    watched = compare(STORY.replace("F", "M"), precision=precision, by_hand=True, told=["forward"] * 2)
    assert watched.amp.diagnosis is not None
    assert watched.amp.diagnosis.origin is not None
    assert watched.amp.diagnosis.origin.op == "aten.div.Tensor"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_trace_tells_bad_data_from_bad_buffers(precision: str) -> None:
    compare(STORY.replace("F", "D"), precision=precision, by_hand=True, told=["data"] * 2)


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_loss_scale_that_is_too_high(by_hand: bool) -> None:
    def scaled(diagnose_after: int | None) -> Watched:
        scaler = LossScaler(init_scale=2.0**40, growth_interval=1000, max_consecutive_skips=None)
        return Watched(diagnose_after=diagnose_after, scaler=scaler)

    plain = scaled(None)
    expected = plain.run("." * 40, by_hand=by_hand)
    watched = scaled(5)
    assert same_state(watched.run("." * 40, by_hand=by_hand), expected)
    assert watched.causes == ["scale"]
    assert watched.amp.stats().skips > 10
    if not by_hand:
        assert watched.amp.diagnosis is not None
        assert watched.amp.diagnosis.passing_scale == watched.amp.scaler.get_scale()  # type: ignore[union-attr]


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize("fused", [False, True])
def test_it_is_said_once_for_each_run_of_skips(fused: bool, after: int, by_hand: bool) -> None:
    story = "FFFFFFF.FF.FFFFF..F.FFFF"
    runs = [len(run) for run in story.split(".") if run]
    needed = after + by_hand  # Where nothing can be replayed, the next step is looked at.
    # A step that is traced and taken ends a run of skips, and cannot tell why those before it were skipped.
    known = [None if run < after else "forward" if run >= needed else "healthy" for run in runs]
    if by_hand and runs[-1] < needed and known[-1] == "healthy":
        known.pop()
    compare(
        story,
        after=after,
        by_hand=by_hand,
        scheduled=not fused,
        told=[each for each in known if each is not None],
        optimizer=lambda model: OPTIMIZERS["adamw-fused" if fused else "adamw"](model.parameters()),
    )
