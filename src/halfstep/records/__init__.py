"""Frozen facts that cross a layer, and the format in which they lie on disk. Nothing here loads torch."""

from halfstep.records.base import AbstractRecord
from halfstep.records.comparison import (
    SCHEMA,
    Comparison,
    Device,
    Interval,
    LossParity,
    MemoryParts,
    MemorySource,
    Outcome,
    PrecisionRun,
    Settings,
    Verdict,
)
from halfstep.records.policy import EffectivePrecision, ModulePrecision, OverrideEffect, OverrideStatus, PolicyEffect
from halfstep.records.scaler import ScalerStats
from halfstep.records.step import Precision, StepRecord

__all__ = [
    "SCHEMA",
    "AbstractRecord",
    "Comparison",
    "Device",
    "EffectivePrecision",
    "Interval",
    "LossParity",
    "MemoryParts",
    "MemorySource",
    "ModulePrecision",
    "Outcome",
    "OverrideEffect",
    "OverrideStatus",
    "PolicyEffect",
    "Precision",
    "PrecisionRun",
    "ScalerStats",
    "Settings",
    "StepRecord",
    "Verdict",
]
