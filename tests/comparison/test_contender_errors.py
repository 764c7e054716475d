from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from halfstep.errors import ConfigurationError, InvalidTypeError, TaskError
from tests.comparison.tasks import Loss, current_precision, make, make_factory, square


def fails_with(error: BaseException) -> Loss:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        raise error

    return loss


class TestErrors:
    def test_an_exception_in_the_loss_names_the_step_and_the_line(self) -> None:
        with pytest.raises(TaskError, match=r"^bf16 failed in step 1: KeyError: 'x' \(.*_errors\.py:\d+, in loss\)$") as caught:
            make(make_factory(fails_with(KeyError("x"))), "bf16").step()
        assert isinstance(caught.value.__cause__, KeyError)

    def test_the_step_is_counted(self) -> None:
        calls = []

        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            calls.append(1)
            return square(model, batch if len(calls) < 3 else batch[:, :3])

        contender = make(make_factory(loss))
        contender.step()
        contender.step()
        with pytest.raises(TaskError, match="fp32 failed in step 3: RuntimeError: mat1 and mat2 shapes"):
            contender.step()
        assert len(contender.losses) == 2

    def test_a_loss_that_leaves_the_program_has_failed(self) -> None:
        with pytest.raises(TaskError, match="failed in step 1: SystemExit: 3"):
            make(make_factory(fails_with(SystemExit(3)))).step()

    def test_ctrl_c_is_no_error_of_the_task(self) -> None:
        with pytest.raises(KeyboardInterrupt):
            make(make_factory(fails_with(KeyboardInterrupt()))).step()
        assert current_precision() == "fp32"

    @pytest.mark.parametrize(
        ("loss", "kind", "message"),
        [
            (lambda model, batch: 1.5, InvalidTypeError, "must be a scalar tensor, not a float"),
            (lambda model, batch: None, InvalidTypeError, "must be a scalar tensor, not a NoneType"),
            (lambda model, batch: model(batch), ConfigurationError, r"must be a scalar tensor, not one of shape \(8, 2\)"),
            (lambda model, batch: model(batch).mean().detach(), ConfigurationError, "needs no gradient"),
        ],
    )
    def test_a_loss_that_is_none(self, loss: Loss, kind: type[Exception], message: str) -> None:
        with pytest.raises(kind, match=message):
            make(make_factory(loss)).step()

    def test_an_empty_batch_stream(self) -> None:
        with pytest.raises(TaskError, match=r"has no batches: Task\(batches=\.\.\.\) is empty"):
            make(make_factory(batches=list)).step()

    def test_a_stream_that_ends(self) -> None:
        contender = make(make_factory(batches=lambda: iter([torch.randn(8, 4)])))
        contender.step()
        with pytest.raises(TaskError, match="ended after 1 and cannot be started again"):
            contender.step()

    def test_a_batch_that_cannot_be_moved(self) -> None:
        class Stuck:
            def to(self, device: torch.device) -> Stuck:
                raise RuntimeError("no room")

        with pytest.raises(TaskError, match=r"fp32 failed in step 1: RuntimeError: no room \(.*in to\)"):
            make(make_factory(batches=lambda: [Stuck()])).step()

    def test_a_model_that_cannot_be_set_up(self) -> None:
        class Stuck(nn.Linear):
            def train(self, mode: bool = True) -> Stuck:
                raise RuntimeError("never again")

        with pytest.raises(TaskError, match="fp16 could not be set up with seed 5: RuntimeError: never again"):
            make(make_factory(model=lambda: Stuck(4, 2)), "fp16", 5)

    def test_a_factory_that_leaves_the_program(self) -> None:
        def factory(seed: int) -> Any:
            raise SystemExit("not today")

        with pytest.raises(TaskError, match="fp32 could not be set up with seed 0: SystemExit: not today"):
            make(factory)

    def test_a_factory_that_returns_something_else(self) -> None:
        with pytest.raises(TaskError, match=r"returned None; it must return a halfstep\.Task"):
            make(lambda seed: None)  # type: ignore[arg-type, return-value]

    def test_an_optimizer_that_needs_a_closure(self) -> None:
        def factory(seed: int) -> Any:
            task = make_factory()(seed)
            return type(task)(model=task.model, optimizer=torch.optim.LBFGS(task.model.parameters()), loss=task.loss, batches=task.batches)

        contender = make(factory)
        losses = [contender.step().record.loss for _ in range(3)]
        assert losses[-1] < losses[0]

    def test_a_loss_that_is_not_finite_is_a_result(self) -> None:
        contender = make(make_factory(lambda model, batch: square(model, batch) * float("nan")))
        contender.step()
        assert len(contender.losses) == 1
        assert np.isnan(contender.losses[0])
