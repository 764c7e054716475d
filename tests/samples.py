"""Realistic records for tests. Every function takes changes by keyword; the same call always gives the same values."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from halfstep.records import (
    SCHEMA,
    Comparison,
    Device,
    Interval,
    MemoryParts,
    ModulePrecision,
    OverrideEffect,
    PolicyEffect,
    PrecisionRun,
    Settings,
    Verdict,
)

_STEPS, _WARMUP, _SEEDS = 60, 5, (0, 1, 2)

# Typical step time in ms, the memory of the step itself in MiB, and for each seed the steps that overflowed.
_TYPICAL: dict[str, tuple[float, float, tuple[tuple[int, ...], ...]]] = {
    "fp32": (41.7, 612.0, ((), (), ())),
    "bf16": (23.1, 341.5, ((), (), ())),
    "fp16": (22.4, 338.0, ((1, 2, 31), (1, 2), (1, 2))),
}


def device(**changes: Any) -> Device:
    """A GPU that computes all three precisions."""
    values: dict[str, Any] = {
        "type": "cuda",
        "name": "NVIDIA H200",
        "native": ("fp32", "bf16", "fp16"),
        "threads": 16,
        "torch": "2.13.0+cu130",
        "python": "3.11.7",
    }
    return Device(**(values | changes))


def settings(**changes: Any) -> Settings:
    """Three seeds of 60 steps."""
    values: dict[str, Any] = {
        "steps": _STEPS,
        "warmup": _WARMUP,
        "seeds": _SEEDS,
        "batch_size": 64,
        "channels_last": True,
        "compile": False,
        "loss_scale": "dynamic",
    }
    return Settings(**(values | changes))


def interval(values: list[float]) -> Interval:
    """The median of some values, with an interval that is about right."""
    ordered = sorted(values)
    reach = round(0.98 * math.sqrt(len(ordered)))
    middle = len(ordered) // 2
    return Interval(median=median(ordered), low=ordered[max(0, middle - reach)], high=ordered[min(len(ordered) - 1, middle + reach)])


def run(precision: str = "bf16", /, **changes: Any) -> PrecisionRun:
    """What one precision did on the sample task: it learns, and fp16 skips a few steps."""
    source = random.Random(f"run of {precision}")
    time, step_memory, skipped = _TYPICAL[precision]
    times = [time * source.lognormvariate(0, 0.03) * (1.6 if source.random() < 0.02 else 1) for _ in range(_STEPS * len(_SEEDS))]
    losses = [_curve(seed, source) for seed in _SEEDS]
    parts = MemoryParts(parameters=98.2, optimizer=196.4, batch=37.0, step=step_memory)
    values: dict[str, Any] = {
        "precision": precision,
        "step_time_ms": interval(times),
        "samples_per_s": 64000 / median(times),
        "peak_memory_mib": 98.2 + 196.4 + 37.0 + step_memory,
        "memory_source": "cuda_allocator",
        "first_loss": fmean(one[0] for one in losses),
        "final_loss": fmean(fmean(one[-_STEPS // 5 :]) for one in losses),
        "skipped_steps": sum(map(len, skipped)),
        "final_scale": 16384.0 if precision == "fp16" else None,
        "steps": len(times),
        "memory": parts,
        "step_times_ms": tuple(times),
        "losses": tuple(losses),
        "skipped_at": skipped,
        "note": "",
    }
    return PrecisionRun(**(values | changes))


def _curve(seed: int, source: random.Random) -> tuple[float, ...]:
    # The seed sets the course, the same one in every precision; the precision adds a little of its own.
    course = random.Random(f"course of {seed}")
    speed = course.uniform(16, 22)
    return tuple(0.34 + 1.96 * math.exp(-step / speed) + course.gauss(0, 0.05) + source.gauss(0, 0.006) for step in range(_STEPS + _WARMUP))


def stopped_run(precision: str = "fp16", /, **changes: Any) -> PrecisionRun:
    """A precision that was given up before any step was measured, because the device only emulates it."""
    values: dict[str, Any] = {
        "step_time_ms": None,
        "samples_per_s": None,
        "peak_memory_mib": None,
        "memory_source": "tracked_tensors",
        "first_loss": None,
        "final_loss": None,
        "skipped_steps": 0,
        "final_scale": None,
        "steps": 0,
        "memory": None,
        "step_times_ms": (),
        "losses": (),
        "skipped_at": (),
        "note": f"{precision} was stopped: this processor only emulates it, and one step took 48 times as long as in fp32.",
    }
    return run(precision, **(values | changes))


def verdict(precision: str = "bf16", /, **changes: Any) -> Verdict:
    """How one precision of the sample stands against fp32."""
    baseline, judged = run("fp32"), run(precision)
    pairs = zip(baseline.step_times_ms, judged.step_times_ms, strict=True)
    speedup = interval([slow / fast for slow, fast in pairs])
    reasons = {
        "fp32": "The same as the baseline, as it should be: what differs is noise.",
        "bf16": "Use it: 1.8 times as fast, and the loss differs from fp32's by less than the seeds of fp32 differ from each other.",
        "fp16": "It works, but 7 steps were skipped while the loss scale settled, and it is hardly faster than bf16.",
    }
    assert baseline.peak_memory_mib
    assert judged.peak_memory_mib
    values: dict[str, Any] = {
        "precision": precision,
        "baseline": "fp32",
        "speedup": speedup,
        "memory_ratio": judged.peak_memory_mib / baseline.peak_memory_mib,
        "loss_parity": "same",
        "reason": reasons[precision],
    }
    return Verdict(**(values | changes))


def comparison(**changes: Any) -> Comparison:
    """fp32, bf16 and fp16 on one GPU: bf16 wins."""
    values: dict[str, Any] = {
        "schema": SCHEMA,
        "task": "examples/digits.py:task",
        "device": device(),
        "settings": settings(),
        "runs": (run("fp32"), run("bf16"), run("fp16")),
        "verdicts": (verdict("bf16"), verdict("fp16")),
        "conclusion": "Train in bf16: it is 1.8 times as fast as fp32 in 71 % of the memory, with the same loss.",
        "interrupted": False,
    }
    return Comparison(**(values | changes))


def emulated_comparison(**changes: Any) -> Comparison:
    """fp32 and bf16 on a processor, where fp16 was given up; the fields that were not measured are `None`."""
    runs = tuple(replace(run(precision), memory_source="tracked_tensors") for precision in ("fp32", "bf16"))
    given_up = verdict(
        "fp16", speedup=None, memory_ratio=None, loss_parity="inconclusive", reason="Not measured: this processor only emulates fp16."
    )
    values: dict[str, Any] = {
        "device": device(type="cpu", name="Intel(R) Xeon(R) Platinum 8481C", native=("fp32", "bf16"), torch="2.13.0+cpu"),
        "runs": (*runs, stopped_run("fp16")),
        "verdicts": (verdict("bf16"), given_up),
    }
    return comparison(**(values | changes))


def rehearsed_run(precision: str = "bf16", /, **changes: Any) -> PrecisionRun:
    """What one precision did on the sample task with the numerics of another device: nothing about time and memory is known."""
    values: dict[str, Any] = {
        "step_time_ms": None,
        "samples_per_s": None,
        "peak_memory_mib": None,
        "memory_source": "tracked_tensors",
        "steps": 0,
        "memory": None,
        "step_times_ms": (),
    }
    return run(precision, **(values | changes))


def rehearsed_comparison(**changes: Any) -> Comparison:
    """fp32, bf16 and fp16 with the numerics of a GPU, on a processor that computes no fp16."""
    reasons = {
        "bf16": "bf16 trains as fp32 does on cuda (rehearsed on this CPU); the loss is the same; time and memory were not measured.",
        "fp16": "fp16 trains as fp32 does on cuda (rehearsed on this CPU); the loss is the same; 7 of 195 steps were skipped; time and "
        "memory were not measured.",
    }
    values: dict[str, Any] = {
        "device": device(type="cpu", name="Intel(R) Xeon(R) Platinum 8481C", native=("fp32", "bf16"), torch="2.13.0+cpu"),
        "runs": tuple(rehearsed_run(precision) for precision in ("fp32", "bf16", "fp16")),
        "verdicts": tuple(verdict(name, speedup=None, memory_ratio=None, reason=reason) for name, reason in reasons.items()),
        "conclusion": "bf16 and fp16 train as fp32 does on cuda (rehearsed on this CPU); time and memory were not measured.",
        "target": "cuda",
    }
    return comparison(**(values | changes))


def module_precision(path: str = "head", /, **changes: Any) -> ModulePrecision:
    """A linear layer that an override keeps in fp32."""
    values: dict[str, Any] = {
        "path": path,
        "kind": "Linear",
        "precision": "fp32",
        "reason": "head=fp32",
        "direct": True,
        "parameters": 650,
        "calls": 1,
    }
    return ModulePrecision(**(values | changes))


def override_effect(override: str = "head=fp32", /, **changes: Any) -> OverrideEffect:
    """An override about one module, which was called."""
    values: dict[str, Any] = {
        "override": override,
        "modules": 1,
        "parameters": 650,
        "ran": 1,
        "casts": -2,
        "status": "effective",
        "note": "",
    }
    return OverrideEffect(**(values | changes))


def policy_effect(**changes: Any) -> PolicyEffect:
    """bf16 with the head in fp32, on a model of a body and a head."""
    root = module_precision("", kind="Net", precision="bf16", reason="default", direct=False, parameters=0)
    body = module_precision("body", precision="bf16", reason="default", direct=False, parameters=1350)
    values: dict[str, Any] = {
        "schema": SCHEMA,
        "name": "islands",
        "policy": "bf16; head=fp32; op:softmax=fp32",
        "default": "bf16",
        "pure": False,
        "task": "examples/digits.py:task",
        "overrides": (override_effect(), override_effect("op:softmax=fp32", modules=0, parameters=0, ran=4, casts=16)),
        "modules": (root, body, module_precision()),
        "casts": 54,
        "cast_elements": 123456,
        "casts_without": 40,
    }
    return PolicyEffect(**(values | changes))
