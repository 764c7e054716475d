"""What half precision does to the operations of a model."""

from halfstep.numerics.casts import CastCounter
from halfstep.numerics.oplists import lowered_ops

__all__ = ["CastCounter", "lowered_ops"]
