"""What is read off the records of a run's steps: one rule a file, all of them in `DEFAULT_RULES`."""

from __future__ import annotations

from typing import Final

from halfstep.monitor.rules.base import AbstractRule
from halfstep.monitor.rules.loss_spike import LossSpike
from halfstep.monitor.rules.memory_growth import MemoryGrowth
from halfstep.monitor.rules.nonfinite_loss import NonfiniteLoss
from halfstep.monitor.rules.persistent_skips import PersistentSkips
from halfstep.monitor.rules.scale_at_floor import ScaleAtFloor
from halfstep.monitor.rules.scale_collapse import ScaleCollapse
from halfstep.monitor.rules.scale_out_of_range import ScaleOutOfRange
from halfstep.monitor.rules.scaled_norm_logged import ScaledNormLogged
from halfstep.monitor.rules.scaler_unused import ScalerUnused
from halfstep.monitor.rules.scaler_with_bf16 import ScalerWithBf16
from halfstep.monitor.rules.skip_rate import SkipRate
from halfstep.monitor.rules.step_time_regression import StepTimeRegression
from halfstep.monitor.rules.vanishing_gradients import VanishingGradients

__all__ = [
    "DEFAULT_RULES",
    "AbstractRule",
    "LossSpike",
    "MemoryGrowth",
    "NonfiniteLoss",
    "PersistentSkips",
    "ScaleAtFloor",
    "ScaleCollapse",
    "ScaleOutOfRange",
    "ScaledNormLogged",
    "ScalerUnused",
    "ScalerWithBf16",
    "SkipRate",
    "StepTimeRegression",
    "VanishingGradients",
]

# Every rule, with its default thresholds, in the order in which alerts of one step come.
DEFAULT_RULES: Final[tuple[AbstractRule, ...]] = (
    PersistentSkips(),
    NonfiniteLoss(),
    SkipRate(),
    ScaleAtFloor(),
    ScaleCollapse(),
    ScaleOutOfRange(),
    ScalerUnused(),
    ScalerWithBf16(),
    ScaledNormLogged(),
    LossSpike(),
    VanishingGradients(),
    StepTimeRegression(),
    MemoryGrowth(),
)
