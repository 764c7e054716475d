"""What half precision does to the operations of a model."""

from halfstep.numerics.oplists import lowered_ops

__all__ = ["lowered_ops"]
