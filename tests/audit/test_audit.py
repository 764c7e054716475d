"""One traced step of a task, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Policy, Task
from halfstep.audit import audit_task
from halfstep.errors import ConfigurationError, TaskError
from halfstep.records import Audit
from halfstep.report import audit_document


class Net(nn.Module):
    """A linear layer, a softmax, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).softmax(-1))
        return out


def factory(*, factor: float = 1.0, make: Callable[[], nn.Module] = Net) -> Callable[[int], Task]:
    def task(seed: int) -> Task:
        model = make()
        return Task(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=lambda model, batch: F.mse_loss(model(batch), torch.ones(8, 2)) * factor,
            batches=[torch.randn(8, 4)],
        )

    return task


def kept(audit: Audit, *, phase: str = "forward") -> dict[str, str]:
    return {each.op: each.reason for each in audit.kept if each.phase == phase}


def test_what_runs_lowered_and_what_does_not() -> None:
    audit = audit_task(factory(factor=0.01), precision="fp16", target="cuda")
    assert (audit.target, audit.device, audit.scale, audit.initial_scale) == ("cuda", "cpu", 65536.0, 65536.0)
    assert kept(audit) == {
        "aten._softmax.default": "listed",
        "aten.mse_loss.default": "listed",
        "aten.mul.Tensor": "given_fp32",
    }
    assert audit.lowered + sum(each.count for each in audit.kept) == audit.operations
    assert audit.casts > 6
    assert audit.seconds is not None
    assert audit.lowered_seconds is not None
    assert 0 < audit.lowered_seconds < audit.seconds
    assert {part.module for part in audit.ranges} >= {"first", "second"}
    assert not audit.has_findings


def test_the_lists_are_those_of_the_target() -> None:
    """A CPU leaves softmax in half."""
    assert "aten._softmax.default" not in kept(audit_task(factory(), precision="fp16", target="cpu"))
    assert "aten._softmax.default" in kept(audit_task(factory(), precision="bf16", target="cuda"))


def test_an_island_is_told_from_what_autocast_keeps() -> None:
    audit = audit_task(factory(), precision=Policy.parse("fp16; second=fp32"), target="cuda")
    assert kept(audit)["aten.addmm.default"] == "not_autocast"
    assert next(each for each in audit.kept if each.op == "aten.addmm.default").modules == ("second",)


def test_a_sum_with_fp32_is_promoted() -> None:
    class Residual(Net):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(x + self.first(x))
            return out

    assert kept(audit_task(factory(make=Residual), precision="bf16", target="cuda"))["aten.add.Tensor"] == "promoted"


def test_gradients_that_overflow_lower_the_scale_and_are_told() -> None:
    audit = audit_task(factory(factor=100.0), precision="fp16", target="cuda")
    assert audit.initial_scale == 65536.0
    assert audit.scale < audit.initial_scale
    assert audit.origin is None
    assert not audit.has_findings
    assert audit.scaled_origin is not None
    assert audit.scaled_origin.phase == "backward"
    assert "with the initial scale of 65536 gradients overflow" in audit_document(audit).conclusion


def test_an_overflow_in_the_forward_pass_is_a_finding() -> None:
    class Large(Net):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x * 1e6) / 1e6)
            return out

    audit = audit_task(factory(make=Large), precision="fp16", target="cuda")
    assert audit.has_findings
    assert audit.origin is not None
    assert audit.origin.site.module == "first"
    assert audit.scale == 65536.0  # No scale would mend it.
    assert "Not finite: aten._to_copy.default in the forward pass of first" in audit_document(audit).conclusion
    fine = audit_task(factory(make=Large), precision="bf16", target="cuda")
    assert fine.origin is None
    assert fine.scale == 1.0


def test_underflow_has_its_place() -> None:
    class Small(Net):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x * 1e-7) * 1e6)
            return out

    audit = audit_task(factory(make=Small), precision="fp16", target="cuda")
    place = audit.underflow[0]
    assert place.flushed > 0
    assert place.site.module == "first"
    assert place.site.file.endswith("test_audit.py")


def test_the_model_is_left_as_it_is_and_random_numbers_too() -> None:
    made: list[Task] = []

    def task(seed: int) -> Task:
        made.append(factory()(seed))
        return made[-1]

    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    audit_task(task, precision="fp16", target="cuda")
    assert torch.equal(torch.rand(1), expected)
    assert all(weight.grad is None for weight in made[0].model.parameters())


def test_it_is_written_and_read_back() -> None:
    audit = audit_task(factory(), precision="fp16", target="cuda")
    assert Audit.from_json(audit.to_json()) == audit


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "fp32"}, "'fp32' lowers nothing: there is nothing to audit"),
        ({"precision": "fp61"}, "fp61"),
        ({"target": "tpu"}, "not for 'tpu'"),
        ({"target": "cuda", "device": "cuda:0"}, "device='cuda:0' does not go with it"),
    ],
)
def test_what_is_not_allowed(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        audit_task(factory(), **{"precision": "fp16", **arguments})


def test_a_step_that_fails_says_where() -> None:
    class Banned(Net):
        def forward(self, x: Tensor) -> Tensor:
            chance = super().forward(x).sigmoid()
            return chance * F.binary_cross_entropy(chance, torch.ones_like(chance))

    with pytest.raises(TaskError, match=r"The step in fp16 failed: RuntimeError: .*unsafe to autocast.*test_audit\.py"):
        audit_task(factory(make=Banned), precision="fp16", target="cuda")


def test_the_document_says_what_was_not_measured() -> None:
    audit = audit_task(factory(), precision="bf16", target="cuda")
    text = str(audit_document(audit))
    assert "cuda, rehearsed on a CPU" in text
    assert "not how fast the target is" in text
    native = str(audit_document(audit_task(factory(), precision="bf16", device="cpu")))
    assert "rehearsed" not in native.replace("Without a rehearsal", "")


def test_a_backward_pass_knows_no_lists() -> None:
    """The sum of a bias's gradients is in fp32 because they are: autocast, which has sums on its list, is off."""
    audit = audit_task(factory(), precision=Policy.parse("fp16; second=fp32"), target="cuda")
    assert kept(audit, phase="backward")["aten.sum.dim_IntList"] == "given_fp32"
    assert kept(audit, phase="backward")["aten._softmax_backward_data.default"] == "listed"
    assert kept(audit, phase="backward")["aten.mm.default"] == "not_autocast"


def test_what_autocast_widens_is_promoted_and_what_was_wide_before_is_not() -> None:
    class Product(Net):
        def forward(self, x: Tensor) -> Tensor:
            half, wide = self.first(x), x.square()
            out: Tensor = self.second(torch.addcmul(wide, half, half) + torch.atan2(x, wide))
            return out

    found = kept(audit_task(factory(make=Product), precision="bf16", target="cuda"))
    assert found["aten.addcmul.default"] == "promoted"
    assert found["aten.atan2.default"] == "given_fp32"


def test_a_pure_policy_has_no_autocast() -> None:
    found = kept(audit_task(factory(), precision="pure fp16", target="cuda"))
    assert found
    assert set(found.values()) == {"given_fp32"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_batch_that_is_not_finite_is_a_finding_with_words_of_its_own(value: float) -> None:
    def task(seed: int) -> Task:
        made = factory()(seed)
        return Task(model=made.model, optimizer=made.optimizer, loss=made.loss, batches=[torch.full((8, 4), value)])

    audit = audit_task(task, precision="bf16", target="cuda")
    conclusion = audit_document(audit).conclusion
    assert audit.has_findings
    assert "out of finite ones" not in conclusion
    assert "nothing overflows" not in conclusion


def test_gradients_that_overflow_at_any_scale_are_a_finding() -> None:
    class Steep(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).float() * 1e9

    audit = audit_task(factory(make=Steep), precision="fp16", target="cuda")
    assert audit.has_findings
    assert (audit.scale, audit.scaled_origin) == (1.0, None)
    assert "Not finite, even without a loss scale: " in audit_document(audit).conclusion
