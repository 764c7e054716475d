"""What a single trace of a step says, where the step cannot be replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.numerics import trace
from halfstep.policy import Policy
from halfstep.records import Experiment
from halfstep.replay.findings import Finding
from halfstep.replay.witnesses import finding_of_trace

pytestmark = pytest.mark.usefixtures("one_thread")

FP16 = Policy.parse("fp16")


class Net(nn.Module):
    def __init__(self, size: float = 1.0) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4, bias=False)
        nn.init.constant_(self.head.weight, size)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(x)
        return result


def witnessed(
    loss: Callable[[Tensor], Tensor],
    *,
    model: Net | None = None,
    x: Sequence[float] = (1.0, 1.0, 1.0, 1.0),
    scale: float = 1.0,
    floor: float = 1.0,
    known: float = nan,
    told: float | None = None,
) -> tuple[Finding, Experiment]:
    model = model or Net()
    batch = torch.tensor([[*x]])
    with trace(model, samples=1) as seen:
        with torch.autocast("cpu", dtype=torch.float16):
            value = loss(model(batch))
        (value * scale).backward()  # type: ignore[no-untyped-call]
    finding, evidence = finding_of_trace(seen, model=model, policy=FP16, scale=told or scale, floor=floor, loss=known)
    (experiment,) = evidence
    assert (experiment.precision, experiment.scale) == ("fp16", told or scale)
    assert not any(each.verified or each.override for each in finding.remedies), "nothing was tried"
    return finding, experiment


def mean(out: Tensor) -> Tensor:
    return out.float().mean()


def test_a_clean_step_is_not_reproduced() -> None:
    finding, evidence = witnessed(mean, known=3.0)
    assert (finding.cause, finding.is_reproduced, finding.loss, finding.origin) == ("healthy", False, 3.0, None)
    assert (evidence.is_clean, evidence.answer) == (True, "No: nothing in it is infinite or NaN.")


class TestForward:
    def test_an_overflow(self) -> None:
        finding, evidence = witnessed(mean, model=Net(3e4))
        assert finding.cause == "forward"
        assert finding.origin is not None
        assert (finding.origin.phase, finding.origin.site.module) == ("forward", "head")
        assert evidence.origin is finding.origin
        assert not evidence.is_clean
        assert evidence.answer.startswith("Yes: aten.mm.default in head is not finite.")
        assert finding.remedies[0].text.startswith("Run head in fp32, if it is finite there. `halfstep diagnose` tries that")
        assert finding.explanation.startswith("aten.mm.default in head makes 4 of 4 values infinite out of finite values.")

    def test_the_first_nan_comes_after(self) -> None:
        finding, _ = witnessed(lambda out: (out - out).float().sum(), model=Net(3e4))
        assert finding.first_nan is not None
        assert finding.first_nan.op == "aten.sub.Tensor"

    def test_an_origin_of_nan_has_none_after_it(self) -> None:
        finding, _ = witnessed(lambda out: (out - 5).log().float().sum())
        assert finding.origin is not None
        assert (finding.origin.op, finding.first_nan) == ("aten.log.default", None)

    def test_advice_comes_with_it(self) -> None:
        finding, _ = witnessed(lambda out: (out * 3e4).exp().sum())
        assert any("exponentials by hand" in each.text or "Square and multiply" in each.text for each in finding.remedies[1:])

    def test_the_model_as_a_whole(self) -> None:
        class Whole(Net):
            def forward(self, x: Tensor) -> Tensor:
                result: Tensor = self.head(x) * 3e4
                return result

        finding, _ = witnessed(mean, model=Whole())
        assert finding.remedies[0].text.startswith("Run the model in fp32")


class TestBackward:
    @pytest.mark.parametrize(
        ("scale", "floor", "cause"),
        [(2.0**17, 1.0, "scale"), (2.0**17, 2.0**17, "backward"), (2.0**17, 2.0**18, "backward")],
    )
    def test_it_is_put_down_to_the_scale_unless_that_is_at_its_floor(self, scale: float, floor: float, cause: str) -> None:
        finding, _ = witnessed(lambda out: out.float().sum(), scale=scale, floor=floor)
        assert finding.cause == cause
        assert finding.origin is not None
        assert finding.origin.phase == "backward"

    def test_an_infinite_scale_does_not_come_down(self) -> None:
        finding, _ = witnessed(lambda out: out.float().sum(), scale=2.0**17, told=inf)
        assert finding.cause == "backward"


class TestOutside:
    @pytest.mark.parametrize("value", [nan, inf])
    def test_a_batch(self, value: float) -> None:
        finding, evidence = witnessed(mean, x=(1.0, value, 1.0, 1.0))
        assert (finding.cause, finding.tensors, finding.origin) == ("data", (), None)
        assert not evidence.is_clean
        assert finding.remedies[0].text.startswith("Leave such samples out, or go back to a checkpoint")
        assert "is the first operation that takes" in finding.explanation

    def test_parameters(self) -> None:
        finding, evidence = witnessed(lambda out: out.float().square().mean(), model=Net(nan))
        assert finding.cause == "parameters"
        assert [(each.name, each.nonfinite) for each in finding.tensors] == [("head.weight", 16)]
        assert "head.weight (16 of 16 values)" in finding.explanation
        assert not evidence.is_clean

    def test_what_breaks_before_comes_first(self) -> None:
        """Something infinite from outside that is used after an overflow is not what the step broke at."""
        late: Any = torch.tensor(nan)
        finding, _ = witnessed(lambda out: (out * late).float().sum(), model=Net(3e4))
        assert finding.cause == "forward"
