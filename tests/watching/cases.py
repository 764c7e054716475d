"""All loops, wrong and correct."""

from __future__ import annotations

from tests.watching import (
    cases_backward,
    cases_clipping,
    cases_correct,
    cases_correct_accumulation,
    cases_correct_models,
    cases_correct_optimizers,
    cases_correct_runs,
    cases_frameworks,
    cases_gradients,
    cases_regions,
    cases_scalers,
    cases_states,
    cases_steps,
)
from tests.watching.case import Case

__all__ = ["CASES"]

_MODULES = (
    cases_clipping,
    cases_gradients,
    cases_backward,
    cases_steps,
    cases_scalers,
    cases_regions,
    cases_states,
    cases_correct,
    cases_correct_accumulation,
    cases_correct_optimizers,
    cases_correct_models,
    cases_correct_runs,
    cases_frameworks,
)

CASES: tuple[Case, ...] = tuple(value for module in _MODULES for value in vars(module).values() if isinstance(value, Case))
