"""Which steps are taken, what a skipped one leaves, and how they are counted, with optimizers of every kind."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.errors import PersistentSkipsError
from halfstep.scaler import LossScaler
from tests.scaler.loops import FUSED, INF, NAN, OPTIMIZERS, Model, backward, iterate, same, snapshot, weights

FLAGS = st.lists(st.booleans(), max_size=60)
KINDS = st.sampled_from(["sgd", "momentum", "sgd-fused", "adam-fused"])


@settings(max_examples=60)
@given(
    kind=KINDS,
    flags=FLAGS,
    init=st.floats(1.0, 2.0**40, width=32),
    growth=st.floats(1.0, 8.0, exclude_min=True),
    backoff=st.floats(0.25, 1.0, exclude_max=True),
    interval=st.sampled_from([1, 2]) | st.integers(1, 12),
    unscale=st.booleans(),
)
def test_the_scale_moves_as_in_torch(
    kind: str, flags: list[bool], init: float, growth: float, backoff: float, interval: int, unscale: bool
) -> None:
    factors: dict[str, Any] = {"init_scale": init, "growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval}
    ours, theirs = LossScaler("cpu", min_scale=0, **factors), torch.amp.GradScaler("cpu", **factors)
    optimizer, reference = OPTIMIZERS[kind](weights(1)), OPTIMIZERS[kind.removesuffix("-fused")](weights(1))
    for finite in flags:
        iterate(ours, optimizer, 1.0 if finite else INF, unscale=unscale)
        iterate(theirs, reference, 1.0 if finite else INF, unscale=unscale)
        assert ours.get_scale() == theirs.get_scale()
    state = ours.state_dict()
    assert {name: state[name] for name in theirs.state_dict()} == theirs.state_dict()
    assert ours.stats().steps == len(flags)
    assert ours.stats().skips == flags.count(False)


@settings(max_examples=60)
@given(
    kind=KINDS,
    flags=FLAGS,
    low=st.floats(0.0, 64.0),
    high=st.none() | st.floats(64.0, 4096.0),
    hysteresis=st.integers(0, 3),
    interval=st.sampled_from([1, 2]) | st.integers(1, 12),
    static=st.booleans(),
)
def test_the_scale_moves_as_in_the_model(
    kind: str, flags: list[bool], low: float, high: float | None, hysteresis: int, interval: int, static: bool
) -> None:
    scaler = LossScaler(
        "cpu", init_scale=64.0, min_scale=low, max_scale=high, hysteresis=hysteresis, growth_interval=interval, static=static
    )
    model, optimizer = Model(scaler), OPTIMIZERS[kind](weights(1))
    scales = []
    for finite in flags:
        iterate(scaler, optimizer, 1.0 if finite else NAN)
        scales.append(scaler.get_scale())
    assert scales == model.follow(flags)
    state = scaler.state_dict()
    assert (state["_growth_tracker"], state["tolerance"]) == (model.tracker, model.tolerance)


@settings(max_examples=60)
@given(
    kinds=st.lists(st.sampled_from(list(OPTIMIZERS)), min_size=1, max_size=3),
    steps=st.lists(st.tuples(*[st.sampled_from([1.0, 0.5, INF, -INF, NAN, None])] * 3, st.booleans()), max_size=15),
    limit=st.none() | st.just(1000),
)
def test_counts_are_exact_with_optimizers_of_every_kind(
    kinds: list[str], steps: list[tuple[float | None, float | None, float | None, bool]], limit: int | None
) -> None:
    scaler = LossScaler("cpu", init_scale=8.0, min_scale=0.5, max_consecutive_skips=limit)
    parameters = [weights(2) for _ in kinds]
    optimizers = [OPTIMIZERS[kind](each) for kind, each in zip(kinds, parameters, strict=True)]
    taken = skipped = consecutive = 0
    for *factors, look in steps:
        bad = False
        seen = [(optimizer, each, factor) for optimizer, each, factor in zip(optimizers, parameters, factors, strict=False) if factor]
        for _, each, factor in seen:
            backward(scaler, each, factor)  # None: this optimizer has no turn.
        for optimizer, _, factor in seen:
            before = snapshot(optimizer)
            scaler.step(optimizer)
            good = factor in (1.0, 0.5)
            assert same(snapshot(optimizer), before) != good
            taken, skipped, bad = taken + good, skipped + (not good), bad or not good
        scaler.update()
        if seen:
            consecutive = consecutive + 1 if bad else 0
        if look:
            stats = scaler.stats()
            assert (stats.steps, stats.skips, stats.consecutive_skips) == (taken + skipped, skipped, consecutive)
    stats = scaler.stats()
    assert (stats.steps, stats.skips, stats.consecutive_skips) == (taken + skipped, skipped, consecutive)


@pytest.mark.parametrize("bad", range(3))
def test_one_bad_optimizer_lowers_the_scale_once(bad: int) -> None:
    scaler, parameters = LossScaler("cpu", init_scale=8.0), [weights(2) for _ in range(3)]
    optimizers = [OPTIMIZERS[kind](each) for kind, each in zip(("sgd", "sgd-fused", "momentum"), parameters, strict=True)]
    for number, each in enumerate(parameters):
        backward(scaler, each, INF if number == bad else 1.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert [each[0].tolist() == [1.0, 1.0] for each in parameters] == [number == bad for number in range(3)]


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_leaves_no_trace(name: str, unscale: bool) -> None:
    parameters = weights(3, 2)
    scaler, optimizer = LossScaler("cpu"), OPTIMIZERS[name](parameters)
    for factor in (NAN, INF, 1.0, -INF, 0.5, INF):  # The very first one, too.
        before = snapshot(optimizer)
        iterate(scaler, optimizer, factor, unscale=unscale)
        assert same(snapshot(optimizer), before) == (factor not in (1.0, 0.5))
    assert (scaler.stats().steps, scaler.stats().skips, scaler.stats().consecutive_skips) == (6, 4, 1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipped_steps_are_as_if_they_had_never_been(name: str) -> None:
    parameters, expected = weights(3), weights(3)
    scaler, optimizer, plain = LossScaler("cpu"), OPTIMIZERS[name](parameters), OPTIMIZERS[name](expected)
    for factor in (INF, 1.0, NAN, 0.25, 3.0, INF, 1.0):
        iterate(scaler, optimizer, factor)
        if factor not in (INF, NAN):
            expected[0].grad = torch.full((3,), factor)
            plain.step()
    assert same(snapshot(optimizer), snapshot(plain))


@pytest.mark.parametrize("name", [*FUSED, "momentum"])
@pytest.mark.parametrize("how", ["hook", "replaced", "wrapped after a scheduler"])
def test_nobody_sees_a_step_that_did_not_happen(name: str, how: str) -> None:
    scaler, optimizer, seen = LossScaler("cpu"), OPTIMIZERS[name](weights()), []
    if how == "hook":
        optimizer.register_step_post_hook(lambda *_: seen.append(1))
    else:
        if how != "replaced":
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        inner = optimizer.step

        @functools.wraps(inner)
        def step(*args: Any, **kwargs: Any) -> Any:
            seen.append(1)
            return inner(*args, **kwargs)

        optimizer.step = step  # type: ignore[method-assign]
    counts = []
    for factor in (INF, 1.0, INF, 1.0, 1.0, NAN):
        iterate(scaler, optimizer, factor)
        counts.append(len(seen))
    assert counts == [0, 1, 1, 2, 3, 3]


@pytest.mark.parametrize("name", ["sgd", "sgd-fused", "adamw-fused"])
@pytest.mark.parametrize("limit", range(1, 8))
@pytest.mark.parametrize("good_first", [0, 1, 5])
def test_persistent_skips_end_the_run_exactly_at_the_limit(name: str, limit: int, good_first: int) -> None:
    scaler, optimizer = LossScaler("cpu", max_consecutive_skips=limit, init_scale=2.0**20), OPTIMIZERS[name](weights())
    for factor in [*[1.0] * good_first, *[INF] * (limit - 1), 1.0, *[INF] * (limit - 1)]:
        iterate(scaler, optimizer, factor)
    before = snapshot(optimizer)
    scale = scaler.get_scale() / 2
    with pytest.raises(
        PersistentSkipsError, match=rf"^{limit} steps in a row .*\(max_consecutive_skips={limit}\); .* now {scale:g}\. .*`halfstep diagnose"
    ):
        iterate(scaler, optimizer, NAN)
    assert same(snapshot(optimizer), before)
    assert scaler.get_scale() == scale
    assert scaler.stats().consecutive_skips == limit

    iterate(scaler, optimizer, 1.0)  # The scaler is usable afterwards.
    assert scaler.stats().consecutive_skips == 0
    assert not same(snapshot(optimizer), before)
    for _ in range(limit - 1):
        iterate(scaler, optimizer, INF)
    with pytest.raises(PersistentSkipsError, match=f"^{limit} steps"):
        iterate(scaler, optimizer, INF)
    with pytest.raises(PersistentSkipsError, match=f"^{limit + 1} steps"):
        iterate(scaler, optimizer, INF)


@settings(max_examples=40)
@given(kinds=st.lists(st.sampled_from(["sgd", "sgd-fused", "adam-fused"]), min_size=1, max_size=2), limit=st.integers(1, 7), flags=FLAGS)
def test_persistent_skips_are_noticed_between_good_steps(kinds: list[str], limit: int, flags: list[bool]) -> None:
    scaler = LossScaler("cpu", max_consecutive_skips=limit)
    parameters = [weights(1) for _ in kinds]
    optimizers = [OPTIMIZERS[kind](each) for kind, each in zip(kinds, parameters, strict=True)]
    consecutive = 0
    for finite in flags:
        for number, each in enumerate(parameters):  # One bad optimizer is enough.
            backward(scaler, each, INF if not finite and number == 0 else 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        consecutive = 0 if finite else consecutive + 1
        if consecutive >= limit:
            with pytest.raises(PersistentSkipsError, match=f"^{consecutive} steps in a row"):
                scaler.update()
        else:
            scaler.update()
    assert scaler.stats().consecutive_skips == consecutive


def test_unscaled_gradients_that_are_not_stepped_with_count_as_seen() -> None:
    (weight,) = weights()
    scaler, optimizer = LossScaler("cpu", init_scale=8.0), OPTIMIZERS["sgd"]([weight])
    backward(scaler, [weight], INF)
    scaler.unscale_(optimizer)
    scaler.update()
    stats = scaler.stats()
    assert (stats.steps, stats.skips, stats.consecutive_skips, stats.scale) == (0, 0, 1, 4.0)
