"""What half precision does to the operations of a model."""

from halfstep.numerics.casts import CastCounter
from halfstep.numerics.details import OUTSIDE, OperationDetail
from halfstep.numerics.draws import Draws
from halfstep.numerics.kernels import decide_operation
from halfstep.numerics.oplists import TARGETS, check_target, find_treatments, list_treatments, lowered_ops, treatment_of
from halfstep.numerics.passing import kind_of_pass
from halfstep.numerics.rehearsal import Rehearsal, rehearse
from halfstep.numerics.rounding import rehearsed_target
from halfstep.numerics.sites import is_foreign, users_level
from halfstep.numerics.tracing import Trace, trace
from halfstep.numerics.widening import Widening

__all__ = [
    "OUTSIDE",
    "TARGETS",
    "CastCounter",
    "Draws",
    "OperationDetail",
    "Rehearsal",
    "Trace",
    "Widening",
    "check_target",
    "decide_operation",
    "find_treatments",
    "is_foreign",
    "kind_of_pass",
    "list_treatments",
    "lowered_ops",
    "rehearse",
    "rehearsed_target",
    "trace",
    "treatment_of",
    "users_level",
]
