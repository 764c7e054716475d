"""All cases of training that goes wrong, and some of training that only looks so."""

from __future__ import annotations

from tests.diagnosis.case import Case
from tests.diagnosis.cases_broken import DATA, MODEL, PARAMETERS
from tests.diagnosis.cases_clean import CLEAN
from tests.diagnosis.cases_constants import CONSTANTS
from tests.diagnosis.cases_forward import FORWARD
from tests.diagnosis.cases_gradients import BACKWARD, SCALE
from tests.diagnosis.cases_norms import HIDDEN
from tests.diagnosis.cases_outside import OUTSIDE
from tests.diagnosis.cases_precision import PRECISION
from tests.diagnosis.cases_silent import UNDERFLOW, UPDATE

__all__ = ["CASES"]

CASES: tuple[Case, ...] = (
    *FORWARD,
    *OUTSIDE,
    *HIDDEN,
    *CONSTANTS,
    *SCALE,
    *BACKWARD,
    *DATA,
    *PARAMETERS,
    *MODEL,
    *PRECISION,
    *UNDERFLOW,
    *UPDATE,
    *CLEAN,
)
