"""Steps that are replayed as they were: batches, counters and caches that a step changes; and what is told of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Task, diagnose, diagnose_skips
from halfstep.records import Diagnosis
from tests.diagnosis.case import training

pytestmark = pytest.mark.usefixtures("one_thread")


def linear() -> nn.Module:
    return nn.Linear(16, 10)


def labelled() -> list[Any]:
    return [(torch.randn(16, 16), torch.randint(7, (16,))) for _ in range(4)]


class TestHarmlessInfinities:
    """Gradients carry the loss scale: what is not finite in low precision alone must not be taken for wrong because of that."""

    @pytest.mark.parametrize("scale", [1024.0, 1.0])
    def test_scores_that_are_masked_away(self, scale: float) -> None:
        mask = torch.zeros(10, dtype=torch.bool)
        mask[7:] = True

        def loss(model: Any, batch: Any) -> Tensor:
            return F.cross_entropy(model(batch[0]).masked_fill(mask, float("-inf")), batch[1])

        assert diagnose(training(linear, loss, labelled), target="cuda", loss_scale=scale, max_steps=2).cause == "healthy"

    @pytest.mark.parametrize("value", [float("-inf"), -1e9, torch.finfo(torch.float16).min])
    @pytest.mark.parametrize("target", ["cuda", None])
    def test_masks_that_are_cast_to_the_dtype_of_queries(self, value: float, target: str | None) -> None:
        mask = torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), value)

        def loss(model: Any, batch: Any) -> Tensor:
            q = model(batch).unsqueeze(0)
            mixed: Tensor = F.scaled_dot_product_attention(q, q, q, attn_mask=mask.to(q.dtype))
            result: Tensor = mixed.float().square().mean()
            return result

        task = training(lambda: nn.Linear(8, 8), loss, lambda: [torch.randn(8, 8) for _ in range(3)])
        assert diagnose(task, target=target, loss_scale=1024.0, max_steps=2).cause == "healthy"

    def test_a_gradient_that_is_infinite_on_the_way(self) -> None:
        def loss(model: Any, batch: Any) -> Tensor:
            x: Tensor = model(batch[0])
            return (x + torch.logsumexp(x.masked_fill(x < 0, float("-inf")), -1, keepdim=True)).float().mean()

        assert diagnose(training(linear, loss, labelled), target="cuda", max_steps=2).cause in ("healthy", "scale")


class TestBatches:
    def test_labels_that_are_taken_out(self) -> None:
        def loss(model: Any, batch: Any) -> Tensor:
            labels = batch.pop("labels")
            return F.cross_entropy(model(batch["x"]), labels)

        def batches() -> list[Any]:
            return [{"x": x, "labels": y} for x, y in labelled()]

        assert diagnose(training(linear, loss, batches), target="cuda", loss_scale=64.0, max_steps=3).cause == "healthy"

    def test_inputs_that_are_normalized_in_place(self) -> None:
        seen: list[float] = []

        def loss(model: Any, batch: Any) -> Tensor:
            x: Tensor = batch[0].mul_(2.0)
            seen.append(float(x.detach().abs().max()))
            return F.cross_entropy(model(x), batch[1])

        assert diagnose(training(linear, loss, labelled), target="cuda", loss_scale=64.0, max_steps=1).cause == "healthy"
        assert len(seen) > 1
        assert len(set(seen)) == 1


class Counting(nn.Module):
    """It computes something else in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(16, 10), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        scores: Tensor = self.layer(x) * (1 + 0.3 * (self.count % 3))
        return scores


class Caching(nn.Module):
    """It computes a table of positions in the first call, in bf16, which is too coarse."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 10)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.table is None:
            self.table = (torch.arange(3000, 3000 + len(x)).to(y.dtype) / 3).sin()
        scores: Tensor = y * self.table[:, None]
        return scores


def entropy(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class TestModules:
    def test_counters_are_put_back(self) -> None:
        assert diagnose(training(Counting, entropy, labelled), precision="bf16", target="cuda", max_steps=4).cause == "healthy"

    def test_caches_are_put_back(self) -> None:
        diagnosis = diagnose(training(Caching, entropy, labelled), precision="bf16", target="cuda", max_steps=2)
        assert diagnosis.cause == "precision"

    def test_counters_of_somebody_else_are_told(self) -> None:
        state = {"count": 0}

        def loss(model: Any, batch: Any) -> Tensor:
            state["count"] += 1
            return entropy(model, (batch[0] + state["count"], batch[1]))

        diagnosis = diagnose(training(linear, loss, labelled), precision="bf16", target="cuda", max_steps=2)
        assert diagnosis.cause == "healthy"
        assert not diagnosis.is_reproduced
        assert "something besides the model" in diagnosis.explanation


class TestWeightsInHalf:
    def adam(self, dtype: torch.dtype) -> Diagnosis:
        def loss(model: Any, batch: Any) -> Tensor:
            return entropy(model, batch).float() * 1e-4

        def model() -> nn.Module:
            return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)).to(dtype)

        return diagnose(training(model, loss, labelled, optimizer=torch.optim.Adam), target="cuda", loss_scale=64.0, max_steps=4)

    def test_an_update_that_breaks_them(self) -> None:
        diagnosis = self.adam(torch.float16)
        assert (diagnosis.cause, diagnosis.step, diagnosis.verified) == ("parameters", 1, True)
        assert {each.since for each in diagnosis.tensors} == {1}
        assert "optimizer's update made these parameters infinite or NaN" in diagnosis.explanation

    def test_weights_in_fp32_are_well(self) -> None:
        assert self.adam(torch.float32).cause == "healthy"

    def test_overrides_hold_in_training_too(self) -> None:
        class Squares(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(16, 10)

            def forward(self, x: Tensor) -> Tensor:
                y = self.layer(x) * 300
                scores: Tensor = (y * y).float() * 1e-6
                return scores

        task = training(lambda: Squares().half(), entropy, labelled, optimizer=torch.optim.SGD)
        first = diagnose(task, target="cuda", max_steps=3)
        assert (first.cause, first.verified) == ("forward", True)
        override = next(remedy.override for remedy in first.remedies if remedy.verified)
        second = diagnose(task, precision=f"fp16; {override}", target="cuda", max_steps=3)
        assert second.cause != "forward"
        assert second.is_reproduced


def test_a_loss_in_half_is_blamed_on_its_own_line() -> None:
    """The scale is multiplied by halfstep: the line is that which computes the loss."""
    task = training(linear, lambda model, batch: model(batch[0]).mean(), labelled)
    origin = diagnose(task, target="cuda", max_steps=1).origin
    assert origin is not None
    assert Path(origin.site.file).name == Path(__file__).name


def test_bad_data_in_front_of_batch_norm_is_no_matter_of_its_statistics() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    told: list[Diagnosis] = []
    bad = torch.full((8, 4), torch.nan)
    with diagnose_skips(scaler, model=model, after=2, on_diagnosis=told.append):
        for _ in range(4):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(bad).float().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert [each.cause for each in told] == ["data"]
    assert "fp32" not in told[0].explanation


def test_batches_that_end() -> None:
    def task(seed: int) -> Task:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = (torch.randn(4, 4) for _ in range(2))
        return Task(model=model, optimizer=optimizer, loss=lambda model, batch: model(batch).square().mean(), batches=batches)

    diagnosis = diagnose(task, target="cuda", loss_scale=64.0)
    assert (diagnosis.cause, diagnosis.steps) == ("healthy", 2)


class Masked(nn.Module):
    """A buffer of it holds a mask of -inf, which is meant so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mask", torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf")))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = (self.layer(x) + self.mask).softmax(-1)
        return scores


def test_a_mask_in_a_buffer_is_not_blamed_for_bad_data() -> None:
    model, bad = Masked(), torch.full((4, 4), torch.nan)
    diagnosis = diagnose(lambda: model(bad).float().square().mean(), model=model, target="cuda")
    assert diagnosis.cause == "data"
    assert diagnosis.tensors == ()
    good = torch.ones(4, 4)
    assert diagnose(lambda: model(good).float().square().mean(), model=model, target="cuda", loss_scale=64.0).cause == "healthy"
