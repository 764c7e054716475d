"""Small rules with every kind of behaviour, and records for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from halfstep.monitor import AbstractRule
from halfstep.records import Alert, Severity, StepRecord

__all__ = ["RULES", "AtEnd", "EachSkip", "ScaleFell", "SkipsInARow", "step"]


def step(number: int, **changes: Any) -> StepRecord:
    """A healthy step."""
    values: dict[str, Any] = {
        "step": number,
        "skipped": False,
        "scale": 65536.0,
        "loss": 0.5,
        "grad_norm": None,
        "lr": 0.1,
        "step_time_s": 0.01,
        "memory_bytes": None,
        "precision": "fp16",
    }
    return StepRecord(**(values | changes))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EachSkip(AbstractRule):
    """An alert for each skip, which names the optimizer."""

    name: ClassVar[str] = "each_skip"
    is_located: ClassVar[bool] = True

    def start(self) -> None:
        return None

    def judge(self, state: None, record: StepRecord) -> tuple[None, Alert | None]:
        message = f"{record.optimizer}: step {record.step} was skipped, loss {record.loss}, norm {record.grad_norm}, epoch {record.epoch}."
        return state, self.alert(record.step, message=message, advice="Wait.") if record.skipped else None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SkipsInARow(AbstractRule):
    """An alert once an episode."""

    name: ClassVar[str] = "skips_in_a_row"
    is_located: ClassVar[bool] = True
    severity: ClassVar[Severity] = "error"

    most: int = 2

    def start(self) -> int:
        return 0

    def judge(self, state: int, record: StepRecord) -> tuple[int, Alert | None]:
        row = state + 1 if record.skipped else 0
        return row, self.alert(record.step, message=f"{row} in a row.", advice="") if row == self.most else None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFell(AbstractRule):
    """An alert in the same words for every optimizer."""

    name: ClassVar[str] = "scale_fell"
    is_located: ClassVar[bool] = True

    def start(self) -> float:
        return 0.0

    def judge(self, state: float, record: StepRecord) -> tuple[float, Alert | None]:
        fell = record.scale < state
        return record.scale, self.alert(record.step, message=f"The scale fell to {record.scale}.", advice="") if fell else None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AtEnd(AbstractRule):
    """An alert at the end, and one in the middle."""

    name: ClassVar[str] = "at_end"
    is_located: ClassVar[bool] = True

    def start(self) -> int:
        return 0

    def judge(self, state: int, record: StepRecord) -> tuple[int, Alert | None]:
        return record.step, self.alert(record.step, message="Three.", advice="") if record.step == 3 else None

    def end(self, state: int) -> Alert | None:
        return self.alert(state, message=f"It ended with step {state}.", advice="") if state else None


RULES: tuple[AbstractRule, ...] = (EachSkip(), SkipsInARow(), ScaleFell(), AtEnd())
