"""Records of traces and audits for tests. Every function takes changes by keyword; the same call always gives the same values."""

from __future__ import annotations

import math
from typing import Any

from halfstep.records import AUDIT_SCHEMA, Audit, KeptOperation, ModuleRange, OpRecord, Site, UnderflowSite


def site(module: str = "head", /, **changes: Any) -> Site:
    """A line of a model's code."""
    values: dict[str, Any] = {"module": module, "file": "train.py", "line": 12}
    return Site(**(values | changes))


def op_record(op: str = "aten.mm.default", /, **changes: Any) -> OpRecord:
    """A matrix product in fp16, all of whose values are finite."""
    values: dict[str, Any] = {
        "op": op,
        "phase": "forward",
        "site": site(),
        "input_dtypes": ("float16", "float16"),
        "output_dtypes": ("float16",),
        "elements": 8,
        "absmax": 3.0,
        "nonfinite": 0,
        "nans": 0,
        "flushed": 0,
        "exact_absmax": None,
        "has_nonfinite_input": False,
        "has_nan_input": False,
        "node": "",
        "seconds": 0.001,
    }
    return OpRecord(**(values | changes))


def overflow(**changes: Any) -> OpRecord:
    """A matrix product that overflows in the forward pass."""
    values: dict[str, Any] = {"absmax": math.inf, "nonfinite": 2, "exact_absmax": 102400.0}
    return op_record(**(values | changes))


def module_range(module: str = "head", /, **changes: Any) -> ModuleRange:
    """A module with three powers of two left."""
    values: dict[str, Any] = {
        "module": module,
        "dtype": "float16",
        "ops": 2,
        "absmax": 8188.0,
        "nonfinite": 0,
        "flushed": 0,
        "headroom": 3.0,
    }
    return ModuleRange(**(values | changes))


def kept_operation(op: str = "aten._softmax.default", /, **changes: Any) -> KeptOperation:
    """The softmax of an attention."""
    values: dict[str, Any] = {"op": op, "phase": "forward", "reason": "listed", "count": 2, "seconds": 0.005, "modules": ("attn",)}
    return KeptOperation(**(values | changes))


def audit(**changes: Any) -> Audit:
    """A step in fp16, rehearsed, with nothing wrong."""
    values: dict[str, Any] = {
        "schema": AUDIT_SCHEMA,
        "torch": "2.13.0",
        "task": "examples/digits.py:task",
        "precision": "fp16",
        "target": "cuda",
        "device": "cpu",
        "scale": 65536.0,
        "initial_scale": 65536.0,
        "loss": 2.3,
        "operations": 10,
        "lowered": 8,
        "seconds": 0.02,
        "lowered_seconds": 0.015,
        "cast_seconds": 0.001,
        "casts": 30,
        "cast_elements": 100,
        "elements": 1000,
        "kept": (kept_operation(),),
        "underflow": (UnderflowSite(op="aten.mm.default", phase="backward", site=site(), flushed=1234, elements=12340),),
        "ranges": (module_range(),),
        "origin": None,
        "scaled_origin": None,
    }
    return Audit(**(values | changes))
