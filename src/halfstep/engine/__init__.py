"""The engine: one object that owns the order of a mixed-precision training step."""

from halfstep.engine.mixed_precision import MixedPrecision

__all__ = ["MixedPrecision"]
