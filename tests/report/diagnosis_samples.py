"""Diagnoses for the tests of reports and of the command line. Every function takes changes by keyword."""

from __future__ import annotations

import math
from typing import Any

from halfstep.records import (
    DIAGNOSIS_SCHEMA,
    Cause,
    Deviation,
    Diagnosis,
    Experiment,
    NonFiniteTensor,
    OpRecord,
    Remedy,
    SourceLine,
    StuckTensor,
    VanishedGradients,
)
from tests.audit import samples

# The values that belong to one cause alone, as a diagnosis would find them.
_FACTS: dict[Cause, dict[str, Any]] = {
    "healthy": {"step": 100, "steps": 100, "skips": 0},
    "data": {"tensors": (NonFiniteTensor(name="batch[0]", kind="input", nonfinite=3, elements=64, since=None),)},
    "parameters": {"tensors": (NonFiniteTensor(name="head.weight", kind="parameter", nonfinite=1200, elements=6400, since=4),)},
    "model": {"origin": samples.overflow(output_dtypes=("float32",), input_dtypes=("float32", "float32"), exact_absmax=None)},
    "forward": {"origin": samples.overflow()},
    "scale": {"loss": 2.3, "passing_scale": 1024.0},
    "backward": {"loss": 2.3, "origin": samples.overflow(phase="backward", node="AddmmBackward0")},
    "precision": {
        "loss": 2.3,
        "skips": 0,
        "origin": samples.op_record(),
        "deviation": Deviation(error=1.2, input_error=0.004, loss_error=0.1, gradient_error=0.8),
    },
    "underflow": {
        "loss": 2.3,
        "skips": 0,
        "scale": 1.0,
        "passing_scale": 4096.0,
        "vanished": (VanishedGradients(module="head", zeros=50, elements=100), VanishedGradients(module="", zeros=1, elements=1000)),
    },
    "update": {"loss": 2.3, "skips": 0, "stuck": (StuckTensor(name="head.weight", dtype="bfloat16", stuck=1800, elements=2000),)},
}


def diagnosis(cause: Cause = "forward", /, **changes: Any) -> Diagnosis:
    """A diagnosis with what belongs to its cause."""
    values: dict[str, Any] = {
        "schema": DIAGNOSIS_SCHEMA,
        "torch": "2.13.0",
        "task": "examples/digits.py:task",
        "precision": "fp16",
        "target": "cuda",
        "device": "cpu",
        "cause": cause,
        "step": 5,
        "steps": 5,
        "skips": 1,
        "loss": math.nan,
        "scale": 65536.0,
        "passing_scale": None,
        "origin": None,
        "first_nan": None,
        "explanation": "",
        "remedies": (),
        "evidence": (),
        "replays": 3,
        "is_reproduced": True,
        "tensors": (),
        "deviation": None,
        "vanished": (),
        "stuck": (),
        "excerpt": (),
        "interrupted": False,
    }
    return Diagnosis(**(values | _FACTS[cause] | changes))


def full_diagnosis(**changes: Any) -> Diagnosis:
    """An overflow of the forward pass, with everything that a diagnosis can say about one."""
    values: dict[str, Any] = {
        "first_nan": not_a_number(),
        "explanation": "The scores are sums of 4096 products, which are divided by the root of 4096 only after they overflow.",
        "remedies": (remedy(), remedy(text="Divide q before the product.", override=None, verified=False)),
        "evidence": (
            experiment(),
            experiment(question="Is it finite in fp32?", precision="fp32", scale=1.0, is_clean=True, answer="It is.", origin=None),
            experiment(question="Is the batch finite?", precision="", scale=None, is_clean=True, answer="It is.", origin=None),
        ),
        "excerpt": excerpt(),
    }
    return diagnosis("forward", **(values | changes))


def not_a_number(**changes: Any) -> OpRecord:
    """A softmax that makes NaN out of infinities."""
    values: dict[str, Any] = {
        "site": samples.site(line=14),
        "absmax": 0.0,
        "nonfinite": 8,
        "nans": 8,
        "has_nonfinite_input": True,
    }
    return samples.op_record("aten._softmax.default", **(values | changes))


def remedy(**changes: Any) -> Remedy:
    """A remedy that was tried and holds."""
    values: dict[str, Any] = {"text": "Run the module head in fp32.", "override": "head=fp32", "verified": True}
    return Remedy(**(values | changes))


def experiment(**changes: Any) -> Experiment:
    """The replay that shows the failure again."""
    values: dict[str, Any] = {
        "question": "Does the step fail again?",
        "precision": "fp16",
        "scale": 65536.0,
        "is_clean": False,
        "answer": "It does, in the forward pass.",
        "origin": samples.overflow(),
    }
    return Experiment(**(values | changes))


def excerpt() -> tuple[SourceLine, ...]:
    """Four lines, the third of which is meant."""
    texts = ("def attention(q, k, v):", "    # </script> is no end here", "    scores = q @ k.mT", "    return scores.softmax(-1) @ v")
    return tuple(SourceLine(number=number, text=text, is_marked=number == 12) for number, text in enumerate(texts, start=10))
