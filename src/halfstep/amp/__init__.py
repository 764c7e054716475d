"""The functions of Apex's `amp`, for scripts that come from there: `from apex import amp` becomes `from halfstep import amp`."""

from halfstep.amp.functions import (
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from halfstep.amp.initialization import initialize
from halfstep.amp.scaling import master_params, scale_loss
from halfstep.amp.session import load_state_dict, state_dict

__all__ = [
    "disable_casts",
    "float_function",
    "half_function",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]
