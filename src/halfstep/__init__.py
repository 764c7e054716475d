"""halfstep: mixed-precision training in PyTorch that you can trust.

The names below load on first use, so that `import halfstep` and `halfstep --help` do not pay for `import torch`.

Example:
    >>> import halfstep
    >>> sorted(set(dir(halfstep)) & {"MixedPrecision", "Task", "compare"})
    ['MixedPrecision', 'Task', 'compare']
"""

import random
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfstep.checkpoint import Checkpointer, CheckpointInfo, import_scaler_state, load_checkpoint, save_checkpoint
    from halfstep.comparison import compare
    from halfstep.diagnosis import diagnose, diagnose_skips
    from halfstep.engine import MixedPrecision
    from halfstep.errors import (
        CheckpointError,
        DamagedCheckpointError,
        HalfstepError,
        HalfstepWarning,
        PersistentSkipsError,
        RanksDisagreeError,
        UnscaledBackwardError,
    )
    from halfstep.monitor import Monitor
    from halfstep.numerics import rehearse, trace
    from halfstep.policy import Policy
    from halfstep.records import Action, Alert, Comparison, Diagnosis, ScalerStats, StepRecord
    from halfstep.scaler import LossScaler
    from halfstep.task import Task, load_task
    from halfstep.watching import watch

__version__ = "0.1.0"

__all__ = [
    "Action",
    "Alert",
    "CheckpointError",
    "CheckpointInfo",
    "Checkpointer",
    "Comparison",
    "DamagedCheckpointError",
    "Diagnosis",
    "HalfstepError",
    "HalfstepWarning",
    "LossScaler",
    "MixedPrecision",
    "Monitor",
    "PersistentSkipsError",
    "Policy",
    "RanksDisagreeError",
    "ScalerStats",
    "StepRecord",
    "Task",
    "UnscaledBackwardError",
    "__version__",
    "compare",
    "diagnose",
    "diagnose_skips",
    "import_scaler_state",
    "load_checkpoint",
    "load_task",
    "rehearse",
    "save_checkpoint",
    "trace",
    "watch",
]

# Where each public name is defined. Modules are nouns, so that no function has the name of a module of this package.
_HOMES = {
    "Action": "halfstep.records",
    "Alert": "halfstep.records",
    "CheckpointError": "halfstep.errors",
    "CheckpointInfo": "halfstep.checkpoint",
    "Checkpointer": "halfstep.checkpoint",
    "Comparison": "halfstep.records",
    "DamagedCheckpointError": "halfstep.errors",
    "Diagnosis": "halfstep.records",
    "HalfstepError": "halfstep.errors",
    "HalfstepWarning": "halfstep.errors",
    "LossScaler": "halfstep.scaler",
    "MixedPrecision": "halfstep.engine",
    "Monitor": "halfstep.monitor",
    "PersistentSkipsError": "halfstep.errors",
    "Policy": "halfstep.policy",
    "RanksDisagreeError": "halfstep.errors",
    "ScalerStats": "halfstep.records",
    "StepRecord": "halfstep.records",
    "Task": "halfstep.task",
    "UnscaledBackwardError": "halfstep.errors",
    "compare": "halfstep.comparison",
    "diagnose": "halfstep.diagnosis",
    "diagnose_skips": "halfstep.diagnosis",
    "import_scaler_state": "halfstep.checkpoint",
    "load_checkpoint": "halfstep.checkpoint",
    "load_task": "halfstep.task",
    "rehearse": "halfstep.numerics",
    "save_checkpoint": "halfstep.checkpoint",
    "trace": "halfstep.numerics",
    "watch": "halfstep.watching",
}


def __getattr__(name: str) -> Any:
    if name == "amp":  # Scripts that come from Apex write `halfstep.amp.initialize`.
        return import_module("halfstep.amp")
    if name not in _HOMES:
        raise AttributeError(f"module 'halfstep' has no attribute {name!r}")
    state = random.getstate()
    value = getattr(import_module(_HOMES[name]), name)
    random.setstate(state)  # What is imported may draw, and a script that has set a seed must not see that.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
