"""The rules, each in a file of its own, in the order of their codes."""

from __future__ import annotations

from halfstep.lint.rules.apex_amp import ApexAmp
from halfstep.lint.rules.autocast_reused import AutocastReused
from halfstep.lint.rules.autocast_without_device import AutocastWithoutDevice
from halfstep.lint.rules.average_moved_on_skip import AverageMovedOnSkip
from halfstep.lint.rules.backward_in_autocast import BackwardInAutocast
from halfstep.lint.rules.bce_under_autocast import BceUnderAutocast
from halfstep.lint.rules.cleaning_after_unscale import CleaningAfterUnscale
from halfstep.lint.rules.clip_before_unscale import ClipBeforeUnscale
from halfstep.lint.rules.closure_with_scaler import ClosureWithScaler
from halfstep.lint.rules.dataparallel_forward_without_autocast import DataparallelForwardWithoutAutocast
from halfstep.lint.rules.deprecated_namespace import DeprecatedNamespace
from halfstep.lint.rules.emulated_bf16_counted import EmulatedBf16Counted
from halfstep.lint.rules.epsilon_vanishes_in_half import EpsilonVanishesInHalf
from halfstep.lint.rules.fp16_without_scaler import Fp16WithoutScaler
from halfstep.lint.rules.gradients_kept_across_update import GradientsKeptAcrossUpdate
from halfstep.lint.rules.half_adam_epsilon import HalfAdamEpsilon
from halfstep.lint.rules.half_model_with_scaler import HalfModelWithScaler
from halfstep.lint.rules.loop_inside_autocast import LoopInsideAutocast
from halfstep.lint.rules.mask_overflows_half import MaskOverflowsHalf
from halfstep.lint.rules.missing_update import MissingUpdate
from halfstep.lint.rules.missing_zero_grad import MissingZeroGrad
from halfstep.lint.rules.norm_in_half import NormInHalf
from halfstep.lint.rules.optimizer_step_bypasses_scaler import OptimizerStepBypassesScaler
from halfstep.lint.rules.repeated_unscale import RepeatedUnscale
from halfstep.lint.rules.repeated_update import RepeatedUpdate
from halfstep.lint.rules.rule import AbstractRule, Bad, Finding, Fix, Safety, Severity
from halfstep.lint.rules.scaled_norm_logged import ScaledNormLogged
from halfstep.lint.rules.scaler_created_in_loop import ScalerCreatedInLoop
from halfstep.lint.rules.scaler_not_restored import ScalerNotRestored
from halfstep.lint.rules.scaler_not_saved import ScalerNotSaved
from halfstep.lint.rules.scaler_with_bf16 import ScalerWithBf16
from halfstep.lint.rules.scaler_without_autocast import ScalerWithoutAutocast
from halfstep.lint.rules.sharded_scaler_positional import ShardedScalerPositional
from halfstep.lint.rules.sync_every_step import SyncEveryStep
from halfstep.lint.rules.unconditional_scheduler_step import UnconditionalSchedulerStep
from halfstep.lint.rules.unknown_autocast_argument import UnknownAutocastArgument
from halfstep.lint.rules.unknown_scaler_attribute import UnknownScalerAttribute
from halfstep.lint.rules.unscaled_backward import UnscaledBackward
from halfstep.lint.rules.zero_grad_per_microbatch import ZeroGradPerMicrobatch

__all__ = ["RULES", "AbstractRule", "Bad", "Finding", "Fix", "Safety", "Severity"]

RULES: tuple[AbstractRule, ...] = (
    DeprecatedNamespace(),
    ClipBeforeUnscale(),
    BackwardInAutocast(),
    UnscaledBackward(),
    MissingUpdate(),
    OptimizerStepBypassesScaler(),
    RepeatedUpdate(),
    RepeatedUnscale(),
    ScalerCreatedInLoop(),
    ScalerNotSaved(),
    ScalerNotRestored(),
    Fp16WithoutScaler(),
    ScalerWithBf16(),
    HalfModelWithScaler(),
    UnconditionalSchedulerStep(),
    ClosureWithScaler(),
    BceUnderAutocast(),
    SyncEveryStep(),
    UnknownScalerAttribute(),
    UnknownAutocastArgument(),
    EmulatedBf16Counted(),
    ApexAmp(),
    MaskOverflowsHalf(),
    EpsilonVanishesInHalf(),
    NormInHalf(),
    ShardedScalerPositional(),
    AutocastReused(),
    LoopInsideAutocast(),
    MissingZeroGrad(),
    HalfAdamEpsilon(),
    DataparallelForwardWithoutAutocast(),
    ScalerWithoutAutocast(),
    AverageMovedOnSkip(),
    ScaledNormLogged(),
    AutocastWithoutDevice(),
    GradientsKeptAcrossUpdate(),
    ZeroGradPerMicrobatch(),
    CleaningAfterUnscale(),
)
