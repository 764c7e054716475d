from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import pairwise, permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.comparison import race as race_module
from halfstep.comparison.contender import Contender
from halfstep.comparison.race import Plan, RaceResult, race
from halfstep.errors import TaskError
from halfstep.records import Precision
from halfstep.task import TaskFactory
from tests.comparison.tasks import Clock, Loss, current_precision, make_factory, noisy_task, options, square

ALL: tuple[Precision, ...] = ("fp32", "bf16", "fp16")


def run(
    factory: TaskFactory,
    *precisions: Precision,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
    compile: bool = False,
    **plan: Any,
) -> RaceResult:
    values: dict[str, Any] = {"steps": 4, "warmup": 1, "seeds": (0,), "max_slowdown": 10.0}
    return race(factory, precisions=precisions or ALL, plan=Plan(**(values | plan)), options=options(compile=compile), progress=progress)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    made.install(monkeypatch)
    return made


class TestOrder:
    def test_the_precisions_take_turns(self, clock: Clock) -> None:
        run(make_factory(clock.loss), warmup=2, steps=3)
        assert clock.steps[:6] == ["fp32", "fp32", "bf16", "bf16", "fp16", "fp16"]
        assert clock.steps[6:9] == ["fp32", "bf16", "fp16"]
        assert clock.steps[9:12] == ["fp16", "bf16", "fp32"]
        assert clock.steps[12:15] == ["bf16", "fp16", "fp32"]

    @pytest.mark.parametrize("precisions", [("fp32", "bf16"), ALL])
    def test_no_place_and_no_neighbour_is_favoured(self, clock: Clock, precisions: tuple[Precision, ...]) -> None:
        count = len(precisions)
        run(make_factory(clock.loss), *precisions, steps=2 * count)
        steps = clock.steps[count : count + 2 * count * count]
        rounds = [steps[start : start + count] for start in range(0, len(steps), count)]
        assert all(sorted(turn) == sorted(precisions) for turn in rounds)
        assert {
            (precision, [turn.index(precision) for turn in rounds].count(place)) for precision in precisions for place in range(count)
        } == {(precision, 2) for precision in precisions}
        followed = [pair for turn in rounds for pair in pairwise(turn)]
        assert {followed.count(pair) for pair in permutations(precisions, 2)} == {len(followed) // (count * (count - 1))}

    def test_one_seed_comes_after_the_other(self, clock: Clock) -> None:
        seeds = []

        def factory(seed: int) -> Any:
            seeds.append((seed, len(clock.steps)))
            return make_factory(clock.loss)(seed)

        run(factory, "fp32", "bf16", seeds=(5, 9), steps=1)
        assert seeds == [(5, 0), (5, 0), (9, 4), (9, 4)]

    def test_times_are_paired_by_seed_and_round(self, clock: Clock) -> None:
        result = run(make_factory(clock.loss), seeds=(0, 1), steps=2)
        rounds = {(0, 0), (0, 1), (1, 0), (1, 1)}
        assert [tally.seconds for tally in result.tallies] == [dict.fromkeys(rounds, clock.costs[precision]) for precision in ALL]
        assert [tally.samples for tally in result.tallies] == [[8] * 4] * 3
        assert [[len(seed) for seed in tally.losses] for tally in result.tallies] == [[3, 3]] * 3


class TestProgress:
    def test_it_counts_up_to_all_steps(self) -> None:
        calls: list[tuple[int, int, str]] = []
        run(make_factory(), "fp32", "bf16", warmup=2, steps=2, seeds=(3, 4), progress=lambda *call: calls.append(call))
        assert [done for done, _, _ in calls] == list(range(16))
        assert {total for _, total, _ in calls} == {16}
        assert [what for _, _, what in calls[3:7]] == ["bf16, warm-up", "fp32, seed 3", "bf16, seed 3", "bf16, seed 3"]

    def test_steps_that_will_not_come_are_not_waited_for(self) -> None:
        calls: list[tuple[int, int, str]] = []
        run(make_factory(fails_in("bf16", at=1)), "fp32", "bf16", steps=4, seeds=(0, 1), progress=lambda *call: calls.append(call))
        assert all(done < total for done, total, _ in calls)
        assert calls[0][1] == 20
        assert calls[-1][:2] == (10, 11), "10 steps of fp32, and the one of bf16 that failed"


def fails_in(precision: str, *, at: int, error: type[BaseException] = RuntimeError) -> Loss:
    """A loss that raises when it is called for the `at`-th time in a precision, and from then on."""
    calls = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if current_precision() == precision:
            calls.append(precision)
            if len(calls) >= at:
                raise error("no kernel for this")
        return square(model, batch)

    return loss


class TestFailure:
    @pytest.mark.parametrize(("at", "losses", "measured"), [(1, [], 0), (2, [1], 0), (4, [3], 2), (6, [5], 4), (8, [5, 2], 5)])
    def test_a_precision_that_fails_is_noted_and_the_others_go_on(self, at: int, losses: list[int], measured: int) -> None:
        result = run(make_factory(fails_in("bf16", at=at)), seeds=(0, 1))
        assert [tally.outcome for tally in result.tallies] == ["complete", "failed", "complete"]
        failed = result.tallies[1]
        assert failed.note.startswith(f"bf16 failed in step {(at - 1) % 5 + 1}: RuntimeError: no kernel for this (")
        assert [len(seed) for seed in failed.losses] == losses
        assert len(failed.seconds) == measured
        assert [[len(seed) for seed in tally.losses] for tally in result.tallies[::2]] == [[5, 5]] * 2
        assert not result.interrupted

    def test_a_precision_that_cannot_be_set_up_is_noted(self) -> None:
        calls = []

        def factory(seed: int) -> Any:
            calls.append(seed)
            if len(calls) == 3:
                raise MemoryError("no room for a third model")
            return make_factory()(seed)

        result = run(factory)
        assert [tally.outcome for tally in result.tallies] == ["complete", "complete", "failed"]
        assert "MemoryError: no room for a third model" in result.tallies[2].note

    @pytest.mark.parametrize("at", [1, 3, 7])
    def test_a_baseline_that_fails_ends_the_race(self, at: int) -> None:
        with pytest.raises(TaskError, match="fp32 failed in step"):
            run(make_factory(fails_in("fp32", at=at)), seeds=(0, 1))

    def test_what_has_failed_is_given_back_before_the_others_go_on(self) -> None:
        models: list[weakref.ref[nn.Module]] = []
        alive = []

        def model() -> nn.Module:
            made = nn.Linear(4, 2)
            models.append(weakref.ref(made))
            return made

        fail = fails_in("bf16", at=1)

        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            gc.collect()
            alive.append([ref() is not None for ref in models])
            return fail(model, batch)  # type: ignore[no-any-return]

        run(make_factory(loss, model=model), steps=1)
        assert alive[1] == [True, True, True]
        assert alive[-1] == [True, False, True]


class TestPatience:
    @staticmethod
    def slow_in_fp16(clock: Clock, *, operations: int) -> Loss:
        """A loss whose operations each take a second in fp16."""

        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            precision = current_precision()
            clock.steps.append(precision)
            out = square(model, batch)
            for _ in range(operations):
                clock.now += 1.0 if precision == "fp16" else 0.001
                out = out * 1.0
            return out

        return loss

    def test_an_overdue_first_step_is_stopped(self, clock: Clock) -> None:
        result = run(make_factory(self.slow_in_fp16(clock, operations=30)), seeds=(0, 1))
        fp16 = result.tallies[2]
        assert (fp16.outcome, fp16.losses, fp16.seconds) == ("stopped", [], {})
        assert fp16.note == "It was stopped after 11.0 s in one step; fp32 needs 0.03 s."
        assert clock.steps.count("fp16") == 1
        assert [len(tally.seconds) for tally in result.tallies] == [8, 8, 0]

    def test_the_process_is_clean_afterwards(self, clock: Clock) -> None:
        run(make_factory(self.slow_in_fp16(clock, operations=30)))
        assert current_precision() == "fp32"
        clock.now += 1e6
        assert (torch.ones(2) + 1).sum() == 4, "no watch is left on"

    def test_a_step_as_long_as_patience_is_borne(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(race_module, "_TOTAL_PATIENCE_S", 1e9)
        result = run(make_factory(self.slow_in_fp16(clock, operations=10)))
        assert [tally.outcome for tally in result.tallies] == ["complete"] * 3

    def test_a_slow_baseline_makes_patient(self, clock: Clock) -> None:
        clock.costs = {"fp32": 20.0, "bf16": 20.0, "fp16": 199.0}
        assert [tally.outcome for tally in run(make_factory(clock.loss)).tallies] == ["complete"] * 3
        clock.costs = {"fp32": 20.0, "bf16": 20.0, "fp16": 201.0}
        stopped = run(make_factory(clock.loss)).tallies[2]
        assert stopped.note == "It was stopped after 201.0 s in one step; fp32 needs 20 s."

    def test_infinite_patience(self, clock: Clock) -> None:
        clock.costs["fp16"] = 1e6
        assert run(make_factory(clock.loss), max_slowdown=float("inf")).tallies[2].outcome == "complete"

    def test_with_compile_the_first_step_is_not_watched(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "compile", lambda model: model)
        clock.costs["fp16"] = 9.0
        monkeypatch.setattr(race_module, "_PATIENCE_S", 1.0)
        assert run(make_factory(clock.loss), compile=True, max_slowdown=2.0, steps=2).tallies[2].outcome == "complete"

    def test_only_the_first_step_of_all_is_watched(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        limits: list[tuple[str, float | None]] = []

        def noted(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(self: Contender, *, limit_s: float | None = None) -> Any:
                limits.append((self.precision, limit_s))
                return method(self, limit_s=limit_s)

            return call

        monkeypatch.setattr(Contender, "step", noted(Contender.step))
        monkeypatch.setattr(Contender, "profiled_step", noted(Contender.profiled_step))
        run(make_factory(clock.loss), "fp32", "bf16", seeds=(0, 1), warmup=2, steps=1)
        first = [("fp32", float("inf")), ("fp32", None), ("bf16", 10.0), ("bf16", None)]
        second = [("fp32", None), ("fp32", None), ("bf16", None), ("bf16", None)]
        assert limits == [*first, ("fp32", None), ("bf16", None), *second, ("bf16", None), ("fp32", None)]

    @pytest.mark.parametrize(
        ("costs", "steps", "seeds", "measured"),
        [
            ((1.0, 11.0), 12, (0,), 3),  # 9 more steps would take 99 s
            ((1.0, 9.0), 12, (0,), 12),  # not slow enough
            ((0.01, 0.9), 12, (0,), 12),  # 90 times slower, but it does not take long
            ((0.01, 0.9), 37, (0,), 3),  # 34 more steps would take 30.6 s
            ((0.01, 0.9), 12, (0, 1, 2), 36),  # 33 more steps would take 29.7 s
            ((1.0, 11.0), 2, (0, 1), 4),  # after three steps there is one left
            ((1.0, 11.0), 3, (0,), 3),
        ],
    )
    def test_a_precision_that_is_far_slower_runs_a_few_steps_only(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch, costs: tuple[float, float], steps: int, seeds: tuple[int, ...], measured: int
    ) -> None:
        monkeypatch.setattr(race_module, "_PATIENCE_S", 1e9)
        clock.costs = {"fp32": costs[0], "fp16": costs[1]}
        fp32, fp16 = run(make_factory(clock.loss), "fp32", "fp16", steps=steps, seeds=seeds).tallies
        assert len(fp32.seconds) == steps * len(seeds)
        assert len(fp16.seconds) == measured
        if measured == steps * len(seeds):
            assert (fp16.outcome, fp16.note) == ("complete", "")
        else:
            times = f"{costs[1] / costs[0]:.0f}"
            note = f"It ran 3 measured steps only, since each takes {times} times as long as the baseline's."
            assert (fp16.outcome, fp16.note) == ("stopped", note)
            assert [len(seed) for seed in fp16.losses] == [4]

    def test_one_slow_moment_of_the_machine_stops_nobody(self, clock: Clock) -> None:
        calls = []

        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            calls.append(current_precision())
            clock.costs["bf16"] = 5000.0 if calls.count("bf16") == 4 else 0.5
            return clock.loss(model, batch)

        assert [tally.outcome for tally in run(make_factory(loss), "fp32", "bf16", steps=12).tallies] == ["complete"] * 2


class TestCtrlC:
    @staticmethod
    def interrupted_at(call: int) -> Loss:
        calls = []

        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) == call:
                raise KeyboardInterrupt
            return square(model, batch)

        return loss

    # Each seed has 3 warm-up steps, then rounds of 3.
    @pytest.mark.parametrize("call", [1, 3, 4])
    def test_before_there_is_a_measured_step_there_is_no_result(self, call: int) -> None:
        with pytest.raises(KeyboardInterrupt):
            run(make_factory(self.interrupted_at(call)), seeds=(0, 1))

    @pytest.mark.parametrize(
        ("call", "losses"),
        [
            (5, [[2], [1], [1]]),  # in the first round, after fp32
            (7, [[2], [2], [2]]),  # between two rounds, with the reversed one to come
            (8, [[2], [2], [3]]),
            (15, [[5], [4], [5]]),  # in the last step of the first seed
            (16, [[5], [5], [5]]),  # in the late profile of fp16, whose warm-up step was skipped
            (17, [[5], [5], [5]]),  # in the first warm-up step of the second seed
            (18, [[5, 1], [5], [5]]),
            (21, [[5, 1], [5, 1], [5, 2]]),  # in the first round of the second seed, which is reversed
        ],
    )
    def test_what_is_known_comes_back(self, call: int, losses: list[list[int]]) -> None:
        result = run(make_factory(self.interrupted_at(call)), seeds=(0, 1))
        assert result.interrupted
        assert [[len(seed) for seed in tally.losses] for tally in result.tallies] == losses
        assert [tally.outcome for tally in result.tallies] == ["complete"] * 3
        assert current_precision() == "fp32"

    def test_between_the_seeds(self) -> None:
        calls = []

        def factory(seed: int) -> Any:
            calls.append(seed)
            if calls == [0, 0, 1, 1]:
                raise KeyboardInterrupt
            return make_factory()(seed)

        result = run(factory, "fp32", "bf16", seeds=(0, 1))
        assert result.interrupted
        assert [[len(seed) for seed in tally.losses] for tally in result.tallies] == [[5], [5]]


class TestIndependence:
    def test_losses_do_not_depend_on_who_else_runs(self) -> None:
        plan: dict[str, Any] = {"seeds": (0, 1), "warmup": 2, "steps": 3}
        together = {tally.precision: tally.losses for tally in run(noisy_task, *ALL, **plan).tallies}
        (alone,) = run(noisy_task, "fp32", **plan).tallies
        fp16 = run(noisy_task, "fp32", "fp16", **plan).tallies[1]
        again = {tally.precision: tally.losses for tally in run(noisy_task, "fp32", "fp16", "bf16", **plan).tallies}
        assert together == again
        assert alone.losses == together["fp32"]
        assert fp16.losses == together["fp16"]

    def test_a_precision_beside_itself_gives_identical_losses(self) -> None:
        first, second = run(noisy_task, "fp32", "fp32", seeds=(0, 1)).tallies
        assert first.losses == second.losses


class TestForeignModels:
    @staticmethod
    def module_level() -> TaskFactory:
        model = nn.Linear(4, 2)
        return make_factory(model=lambda: model)

    @pytest.mark.parametrize("precisions", [("fp32", "bf16"), ("fp32", "fp32")])
    def test_two_precisions_must_not_train_one_model(self, precisions: tuple[Precision, ...]) -> None:
        first, second = run(self.module_level(), *precisions).tallies
        assert first.outcome == "complete"
        assert second.outcome == "failed"
        assert "Make the model inside the factory" in second.note

    def test_two_seeds_must_not_train_one_model(self) -> None:
        with pytest.raises(TaskError, match=r"returned a model that it had returned before.*anew for each call"):
            run(self.module_level(), "fp32", seeds=(0, 1))


class TestProfiles:
    def test_memory_is_that_of_the_first_seed_in_every_precision(self) -> None:
        # Batches grow with the seed, so that a profile of another seed would show.
        def factory(seed: int) -> Any:
            return make_factory(batches=lambda: [torch.randn(8 * (1 + seed), 4)])(seed)

        for tally in run(factory, seeds=(0, 1, 2), steps=1).tallies:
            assert tally.memory is not None
            assert tally.profiled is not None
            assert tally.memory.memory.batch == 8 * 4 * 4
            assert tally.profiled.profile.total_us <= tally.memory.profile.total_us

    def test_the_profile_is_of_the_last_warm_up_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        done: list[int] = []
        profiled_step = Contender.profiled_step

        def noted(self: Contender, *, limit_s: float | None = None) -> Any:
            done.append(len(self.losses))
            return profiled_step(self, limit_s=limit_s)

        monkeypatch.setattr(Contender, "profiled_step", noted)
        run(make_factory(), "fp32", "bf16", warmup=3, seeds=(0, 1), steps=1)
        assert done == [2] * 4
