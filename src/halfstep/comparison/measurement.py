"""`compare`: what mixed precision does for a task, measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Literal, cast, get_args

import torch

from halfstep.comparison.contender import RunOptions
from halfstep.comparison.lineup import line_up, lowest_precision, name_policies, policy_effects
from halfstep.comparison.parity import Parity, final_loss, first_loss, judge_losses
from halfstep.comparison.race import Plan, Progress, RaceResult, Tally, race
from halfstep.comparison.statistics import median_interval
from halfstep.comparison.verdict import Evidence, conclude, conclude_rehearsal, explain, judge, judge_rehearsal
from halfstep.errors import ConfigurationError, InvalidTypeError, did_you_mean
from halfstep.hardware import StepProfile, describe_device, matmul_gain, native_precisions, parse_device
from halfstep.numerics import rehearse
from halfstep.policy import Policy
from halfstep.precision import PRECISIONS
from halfstep.records import SCHEMA, Comparison, Interval, MemoryParts, Precision, PrecisionRun, Settings, Verdict
from halfstep.task import TaskFactory, load_task, task_name

__all__ = ["compare"]

LossScaling = Literal["dynamic", "none"]

_MIB = 2**20
_MOST_SEEDS = 1000


def _quiet(done: int, total: int, what: str) -> None:
    """Tells nobody."""


def compare(  # noqa: PLR0913 - a keyword for each thing that can be asked of a comparison
    task: str | TaskFactory,
    *,
    precisions: Sequence[str] = PRECISIONS,
    policies: Sequence[Policy | str | Path] = (),
    steps: int = 12,
    warmup: int = 2,
    seeds: int | Sequence[int] = 3,
    device: str = "auto",
    channels_last: bool = False,
    compile: bool = False,
    loss_scale: LossScaling = "dynamic",
    max_slowdown: float = 10.0,
    target: str | None = None,
    progress: Progress = _quiet,
) -> Comparison:
    """Measures what each precision does for a task, against fp32: step time, memory, and whether the training is still the same.

    The precisions run in turns, step by step, in this process, each with its own model, batches and random numbers from the same seed.
    All of them are held in memory at once.

    With a `target`, such as `cuda`, they run on the CPU with the numerics that they have there: half precision is cast, stored and rounded
    as on that device, at about the cost of fp32. That is for a machine without the device. It tells whether a precision trains as fp32
    does, which steps are skipped and where the loss scale ends, and nothing of the device's speed: no time and no memory is measured.

    Args:
        task: A task's name, `path/to/file.py:factory` or `package.module:factory`, or the factory itself.
        precisions: Which ones, of `fp32`, `bf16` and `fp16`. fp32 is the baseline, and is put first whether named or not.
        policies: Policies to measure beside them: as a `halfstep.Policy`, the path of a TOML file, or text such as `fp16; head=fp32`. Each
            is a column of its own, called by the stem of its file or by its text.
        steps: Measured steps of each precision for each seed.
        warmup: Steps before those: they train, but are not timed. At least 1, or 2 with `compile`; the last one for each seed is profiled.
        seeds: How many seeds, counted from 0, or the seeds themselves. One seed shows no spread to judge losses by.
        device: `auto`, `cpu`, `cuda` or `cuda:N`. With a `target`, `auto` is the CPU.
        channels_last: Lay out the model and 4-d inputs channels last, which convolutions prefer.
        compile: Run the model through `torch.compile`.
        loss_scale: `dynamic` for fp16 with a `torch.amp.GradScaler`, `none` for fp16 without one.
        max_slowdown: A precision whose step takes more than so many times the fp32 step is stopped early, if it would take long. With a
            `target` none is.
        target: The device type whose numerics are rehearsed on the CPU, as `halfstep.rehearse` does; `None` to measure the device itself.
        progress: Called as `progress(done, total, what)` before each step.

    Returns:
        The measurements and verdicts. After Ctrl-C, those of what had run until then, with `interrupted` set.

    Raises:
        TaskError: The task cannot be found, made or run in fp32.
        ConfigurationError: An argument has a value that is not allowed.
        InvalidTypeError: An argument is of the wrong type.

    Example:
        >>> import torch
        >>> def task(seed: int) -> "halfstep.Task":
        ...     model = torch.nn.Linear(8, 1)
        ...     batches = [torch.randn(4, 8)]
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     return halfstep.Task(model=model, optimizer=optimizer, loss=lambda m, x: m(x).square().mean(), batches=batches)
        >>> import halfstep
        >>> result = halfstep.compare(task, precisions=["fp32", "bf16"], steps=3, device="cpu")
        >>> [run.precision for run in result.runs], result.runs[1].steps
        (['fp32', 'bf16'], 9)
    """
    lineup = line_up(precisions)
    named = name_policies(policies, besides=lineup)
    plan = Plan(
        steps=_positive(steps, name="steps"),
        warmup=_positive(warmup, name="warmup"),
        seeds=_seeds(seeds),
        max_slowdown=_above_one(max_slowdown),
    )
    if compile and plan.warmup < 2:
        raise ConfigurationError("compare(compile=True, warmup=1): the first step compiles, so at least 2 steps of warm-up are needed.")
    if loss_scale not in get_args(LossScaling):
        allowed = " and ".join(get_args(LossScaling))
        raise ConfigurationError(
            f"compare(loss_scale={loss_scale!r}): allowed are {allowed}.{did_you_mean(str(loss_scale), known=get_args(LossScaling))}"
        )
    place = parse_device(device) if target is None else _rehearsing_device(device, target=target, compile=compile)
    options = RunOptions(device=place, channels_last=channels_last, compile=compile, loss_scaling=loss_scale == "dynamic", target=target)
    factory = load_task(task) if isinstance(task, str) else task
    if not callable(factory):
        raise InvalidTypeError(f"compare(task=...) takes a task's name or a factory, not a {type(task).__name__}.")
    effects = policy_effects(named, factory, seed=plan.seeds[0], device=place)
    result = race(factory, precisions=lineup, policies=named, plan=plan, options=options, progress=progress)
    runs = tuple(_run(tally, device_type=place.type) for tally in result.tallies)
    if target is None:
        verdicts, whys = _verdicts(result, runs=runs, options=options)
        conclusion = conclude(verdicts, whys=whys, baseline=lineup[0])
    else:
        verdicts = _rehearsed_verdicts(result, target=target)
        failed = [tally.outcome == "failed" for tally in result.tallies[1:]]
        conclusion = conclude_rehearsal(verdicts, failed=failed, baseline=lineup[0], target=target)
    batch = result.tallies[0].samples
    name = task_name(task)
    return Comparison(
        schema=SCHEMA,
        task=name,
        device=describe_device(place),
        settings=Settings(
            steps=plan.steps,
            warmup=plan.warmup,
            seeds=plan.seeds,
            batch_size=batch[0] if batch else None,
            channels_last=channels_last,
            compile=compile,
            loss_scale=loss_scale,
        ),
        runs=runs,
        verdicts=tuple(verdicts),
        conclusion=conclusion,
        interrupted=result.interrupted,
        policies=tuple(replace(each, task=name) for each in effects),
        target=target or "",
    )


def _rehearsing_device(device: str, *, target: str, compile: bool) -> torch.device:
    """The CPU, once it is known that the target can be rehearsed as it was asked for: before any step runs."""
    if compile:
        raise ConfigurationError(
            f"compare(target={target!r}, compile=True): what is compiled cannot be rehearsed. Leave compile out, or leave target "
            "out to measure this machine."
        )
    if str(device).startswith("cuda"):  # Whether there is one here or not.
        raise ConfigurationError(
            f"compare(target={target!r}, device={device!r}): the numerics of {target} are rehearsed on a CPU. Leave device out, or leave "
            f"target out to measure {device} itself."
        )
    place = parse_device("cpu" if device == "auto" else device)
    with rehearse(target):
        return place


def _positive(value: int, *, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidTypeError(f"compare({name}=...) takes a whole number, not {value!r}.")
    if value < 1:
        raise ConfigurationError(f"compare({name}={value}) must be 1 or more.")
    return value


def _above_one(value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidTypeError(f"compare(max_slowdown=...) takes a number, not {value!r}.")
    if not value > 1:
        raise ConfigurationError(f"compare(max_slowdown={value}) must be above 1; inf never stops a precision early.")
    return value


def _seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(seeds, int):
        if _positive(seeds, name="seeds") > _MOST_SEEDS:
            raise ConfigurationError(f"compare(seeds={seeds}) is more than {_MOST_SEEDS}. To run one certain seed, pass it in a list.")
        return tuple(range(seeds))
    if not isinstance(cast("object", seeds), Iterable):
        raise InvalidTypeError(f"compare(seeds=...) takes how many, or a sequence of whole numbers, not {seeds!r}.")
    chosen = tuple(seeds)
    if not chosen or not all(type(seed) is int and 0 <= seed < 2**32 for seed in chosen):
        raise ConfigurationError(f"compare(seeds={seeds!r}) takes how many, or whole numbers from 0 to 2**32 - 1.")
    if len(set(chosen)) < len(chosen):
        raise ConfigurationError(f"compare(seeds={seeds!r}) names a seed twice; the same seed shows no spread.")
    return chosen


def _run(tally: Tally, *, device_type: str) -> PrecisionRun:
    times_ms = tuple(seconds * 1e3 for seconds in tally.seconds.values())
    interval = median_interval(times_ms) if times_ms else None
    memory = _memory(tally)
    return PrecisionRun(
        precision=tally.precision,
        step_time_ms=interval,
        samples_per_s=fmean(tally.samples) / interval.median * 1e3 if interval and tally.samples else None,
        peak_memory_mib=memory and memory.parameters + memory.optimizer + memory.batch + memory.step,
        memory_source="cuda_allocator" if device_type == "cuda" else "tracked_tensors",
        first_loss=first_loss(tally.losses),
        final_loss=final_loss(tally.losses),
        skipped_steps=sum(map(len, tally.skipped_at)),
        final_scale=tally.final_scale,
        steps=len(times_ms),
        memory=memory,
        step_times_ms=times_ms,
        losses=tuple(tally.losses),
        skipped_at=tuple(tally.skipped_at),
        note=tally.note,
        outcome=tally.outcome,
    )


def _memory(tally: Tally) -> MemoryParts | None:
    if tally.memory is None:
        return None
    held = tally.memory.memory
    return MemoryParts(
        parameters=held.parameters / _MIB,
        optimizer=held.optimizer / _MIB,
        batch=held.batch / _MIB,
        step=tally.memory.profile.peak_bytes / _MIB,
    )


def _verdicts(result: RaceResult, *, runs: Sequence[PrecisionRun], options: RunOptions) -> tuple[list[Verdict], list[str]]:
    """The verdicts, and what explains the speed of each."""
    baseline = result.tallies[0]
    verdicts, whys = [], []
    for tally, run in list(zip(result.tallies, runs, strict=True))[1:]:
        rounds, speedup = _speedup(baseline, tally)
        computes = _computes(tally, device=options.device)
        evidence = Evidence(
            device=options.device.type,
            computes=computes,
            native=computes in native_precisions(options.device),
            gain=None if tally.note else _gain(computes, device=options.device),
            baseline=_explanation(baseline, options=options),
            profile=_explanation(tally, options=options),
            note=tally.note or ("" if tally.seconds or not run.skipped_steps else "Every measured step was skipped."),
            failed=tally.outcome == "failed",
            skipped=run.skipped_steps,
            steps=sum(map(len, run.losses)),
            identical=bool(tally.losses) and tally.losses == baseline.losses,
            rounds=rounds,
        )
        # How fast it was until it failed helps nobody: it cannot be used.
        speedup = None if evidence.failed else speedup
        whys.append("" if evidence.failed else explain(tally.precision, speedup=speedup, evidence=evidence))
        verdicts.append(
            judge(
                precision=tally.precision,
                baseline=baseline.precision,
                speedup=speedup,
                memory_ratio=_ratio(run.peak_memory_mib, runs[0].peak_memory_mib),
                parity=_parity(baseline, tally, interrupted=result.interrupted),
                evidence=evidence,
            )
        )
    return verdicts, whys


def _rehearsed_verdicts(result: RaceResult, *, target: str) -> list[Verdict]:
    baseline = result.tallies[0]
    return [
        judge_rehearsal(
            precision=tally.precision,
            baseline=baseline.precision,
            target=target,
            parity=_parity(baseline, tally, interrupted=result.interrupted),
            skipped=sum(map(len, tally.skipped_at)),
            steps=sum(map(len, tally.losses)),
            failure=tally.note,
        )
        for tally in result.tallies[1:]
    ]


def _computes(tally: Tally, *, device: torch.device) -> Precision:
    return cast("Precision", tally.precision) if tally.policy is None else lowest_precision(tally.policy, device=device)


def _gain(precision: Precision, *, device: torch.device) -> float | None:
    try:
        return matmul_gain(precision, device=device)
    except RuntimeError:  # Out of memory, say. It only explains; the measurements must not be lost for it.
        return None


def _explanation(tally: Tally, *, options: RunOptions) -> StepProfile | None:
    """The profile of a step if it can explain a time. Of a compiled model the profiler sees only what was not compiled."""
    profile = tally.profiled and tally.profiled.profile
    return profile if profile and profile.total_us and not options.compile else None


def _speedup(baseline: Tally, other: Tally) -> tuple[int, Interval | None]:
    """How many rounds both have run, and what they say.

    The steps of one seed are no independent samples: they share where the tensors happen to lie in memory, which changes the time of a
    small step by some per cent. So the interval spans the medians of the seeds, too.
    """
    ratios = {at: baseline.seconds[at] / seconds for at, seconds in other.seconds.items() if at in baseline.seconds}
    if not ratios:
        return 0, None
    within = median_interval(list(ratios.values()))
    seeds = [median(ratio for at, ratio in ratios.items() if at[0] == seed) for seed in {at[0] for at in ratios}]
    return len(ratios), replace(within, low=min(within.low, *seeds), high=max(within.high, *seeds))


def _ratio(value: float | None, baseline: float | None) -> float | None:
    return value / baseline if value is not None and baseline else None


def _parity(baseline: Tally, other: Tally, *, interrupted: bool) -> Parity:
    if other.note or not interrupted:
        return judge_losses(baseline.losses, other.losses)
    # Ctrl-C came between two precisions of a round: what both have run is compared. A seed that has only begun would show a spread that is
    # none, so only seeds count that ran as long as the longest.
    pairs = [(before[: len(after)], after[: len(before)]) for before, after in zip(baseline.losses, other.losses, strict=False)]
    longest = max((len(after) for _, after in pairs), default=0)
    whole = [pair for pair in pairs if len(pair[1]) == longest]
    return judge_losses([before for before, _ in whole], [after for _, after in whole])
