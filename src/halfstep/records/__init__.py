"""Frozen facts that cross a layer, and the format in which they lie on disk. Nothing here loads torch."""

from halfstep.records.audit import AUDIT_SCHEMA, Audit, KeptOperation, KeptReason, UnderflowSite
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
from halfstep.records.trace import (
    TRACE_SCHEMA,
    UNKNOWN,
    ModuleRange,
    OperationLists,
    OperationTreatment,
    OpRecord,
    Phase,
    Site,
    TraceRecord,
    Treatment,
)

__all__ = [
    "AUDIT_SCHEMA",
    "SCHEMA",
    "TRACE_SCHEMA",
    "UNKNOWN",
    "AbstractRecord",
    "Audit",
    "Comparison",
    "Device",
    "EffectivePrecision",
    "Interval",
    "KeptOperation",
    "KeptReason",
    "LossParity",
    "MemoryParts",
    "MemorySource",
    "ModulePrecision",
    "ModuleRange",
    "OpRecord",
    "OperationLists",
    "OperationTreatment",
    "Outcome",
    "OverrideEffect",
    "OverrideStatus",
    "Phase",
    "PolicyEffect",
    "Precision",
    "PrecisionRun",
    "ScalerStats",
    "Settings",
    "Site",
    "StepRecord",
    "TraceRecord",
    "Treatment",
    "UnderflowSite",
    "Verdict",
]
