"""Loss scaling: a scale that stays in bounds, gradients checked without a wait, and exact knowledge of which steps were skipped."""

from halfstep.scaler.counts import SkipCounts, Verdict
from halfstep.scaler.gradients import check_finite_
from halfstep.scaler.loss_scaler import LossScaler
from halfstep.scaler.scaling import Scaling
from halfstep.scaler.settings import ScalerSettings

__all__ = ["LossScaler", "ScalerSettings", "Scaling", "SkipCounts", "Verdict", "check_finite_"]
