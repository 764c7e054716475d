from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from halfstep.comparison.contender import StepOverdueError
from halfstep.errors import TaskError
from halfstep.records import Precision
from tests.comparison.tasks import Clock, Loss, current_precision, make, make_factory, noisy_task, square, vanishing_task


def bits() -> tuple[Any, ...]:
    """What the global generators would give next."""
    return random.getstate(), str(np.random.get_state(legacy=False)), torch.get_rng_state().numpy().tobytes()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_loss_runs_in_the_precision(precision: Precision) -> None:
    seen = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append((current_precision(), model.training, model(batch).dtype))
        return square(model, batch)

    contender = make(make_factory(loss), precision)
    contender.step()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert seen == [(precision, True, dtype)]
    assert current_precision() == "fp32"


class TestSeconds:
    def test_a_step_takes_what_the_clock_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Clock()
        clock.install(monkeypatch)
        timed = make(make_factory(clock.loss), "bf16").step()
        assert (timed.seconds, timed.samples) == (0.5, 8)

    def test_making_the_batch_is_not_timed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Clock()
        clock.install(monkeypatch)

        def slow_batches() -> Iterator[Tensor]:
            while True:
                clock.now += 100
                yield torch.randn(8, 4)

        contender = make(make_factory(clock.loss, batches=slow_batches))
        assert [contender.step().seconds for _ in range(2)] == [1.0, 1.0]


class TestRandomness:
    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
    def test_the_same_seed_gives_the_same_losses(self, precision: Precision) -> None:
        first, again = make(noisy_task, precision, 7), make(noisy_task, precision, 7)
        other = make(noisy_task, precision, 8)
        for _ in range(5):
            # In turns, across the end of an epoch, when the loader shuffles anew.
            for contender in (first, again, other):
                contender.step()
        assert first.losses == again.losses
        assert first.losses != other.losses

    def test_taking_turns_changes_nothing(self) -> None:
        alone = make(noisy_task, "fp32", 3)
        for _ in range(4):
            alone.step()
        in_turns, rival = make(noisy_task, "fp32", 3), make(noisy_task, "bf16", 3)
        in_turns.step()
        rival.profiled_step(limit_s=1e9)
        torch.manual_seed(99)
        random.random()
        in_turns.profiled_step(limit_s=1e9)
        rival.step()
        np.random.rand()
        in_turns.step()
        in_turns.step()
        assert in_turns.losses == alone.losses

    def test_the_global_generators_are_left_alone(self) -> None:
        before = bits()
        contender = make(noisy_task)
        assert bits() == before
        contender.step()
        contender.profiled_step()
        assert bits() == before

    def test_also_after_an_error(self) -> None:
        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            raise ValueError(f"drawn: {torch.rand(1)} {random.random()} {np.random.rand()}")

        before = bits()
        with pytest.raises(TaskError):
            make(make_factory(loss)).step()

        def factory(seed: int) -> Any:
            raise ValueError(f"drawn: {torch.rand(1)}")

        with pytest.raises(TaskError):
            make(factory)
        assert bits() == before


class TestTimeLimit:
    @staticmethod
    def many_operations(clock: Clock, model: list[nn.Module]) -> Loss:
        def loss(made: nn.Module, batch: Tensor) -> Tensor:
            model.append(made)
            out = square(made, batch)
            for _ in range(100):
                clock.now += 1
                out = out * 1.0
            return out

        return loss

    @pytest.mark.parametrize("method", ["step", "profiled_step"])
    def test_an_overdue_step_is_stopped_and_leaves_nothing_behind(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        clock, model = Clock(), list[nn.Module]()
        clock.install(monkeypatch)
        contender = make(make_factory(self.many_operations(clock, model)), "bf16")
        before = bits()
        with pytest.raises(StepOverdueError, match=r"^was stopped after 11\.0 s in one step$"):
            getattr(contender, method)(limit_s=10.5)
        assert clock.now == 11.0, "it stopped at once"
        assert current_precision() == "fp32", "autocast is off"
        assert bits() == before
        assert all(parameter.grad is None for parameter in model[0].parameters())
        clock.now += 1000
        torch.ones(2).add(1)  # would be stopped if the watch were still on
        assert contender.losses == []

    def test_a_step_can_be_stopped_in_its_backward(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock, model = Clock(), list[nn.Module]()
        clock.install(monkeypatch)

        def loss(made: nn.Module, batch: Tensor) -> Tensor:
            model.append(made)
            out = made(batch)
            out.register_hook(lambda grad: setattr(clock, "now", clock.now + 100))
            result: Tensor = out.square().mean()
            return result

        contender = make(make_factory(loss), "fp16")
        with pytest.raises(StepOverdueError, match=r"after 100\.0 s"):
            contender.step(limit_s=10)
        assert all(parameter.grad is None for parameter in model[0].parameters())
        contender.step()
        assert len(contender.losses) == 1

    def test_a_step_within_its_limit_gives_the_same_loss(self) -> None:
        free, watched = make(noisy_task, "fp16"), make(noisy_task, "fp16")
        free.step()
        watched.step(limit_s=1e9)
        assert free.losses == watched.losses

    def test_without_a_limit_nothing_is_stopped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock, model = Clock(), list[nn.Module]()
        clock.install(monkeypatch)
        assert make(make_factory(self.many_operations(clock, model))).step().seconds == 100.0


class TestLossScaling:
    def test_fp16_is_scaled(self) -> None:
        contender = make(vanishing_task, "fp16")
        contender.step()
        assert contender.final_scale is not None
        assert contender.final_scale >= 1024

    def test_fp16_without_it_loses_its_gradients_without_a_warning(self) -> None:
        contender = make(vanishing_task, "fp16", loss_scaling=False)
        for _ in range(6):
            contender.step()
        assert contender.final_scale is None
        assert contender.losses[4] == contender.losses[0], "the same batch again, and nothing was learned"

    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_the_others_are_not(self, precision: Precision) -> None:
        assert make(vanishing_task, precision).final_scale is None

    def test_skipped_steps_are_noted(self) -> None:
        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            # 65536, the first scale, times 4 is beyond fp16 in the gradient of the layer's output.
            out: Tensor = (model(batch) * 4).sum()
            return out

        contender = make(make_factory(loss, lr=0.0), "fp16")
        for _ in range(4):
            contender.step()
        assert contender.skipped_at == list(range(1, len(contender.skipped_at) + 1))
        assert contender.skipped_at
        assert contender.final_scale == 65536.0 / 2 ** len(contender.skipped_at)


class TestChannelsLast:
    @pytest.mark.parametrize("channels_last", [True, False])
    def test_the_model_and_the_batch_are_laid_out(self, channels_last: bool) -> None:
        seen = []

        def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            weight = next(model.parameters())
            seen.append([tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (weight, batch["image"])])
            assert batch["target"].is_contiguous()
            out: Tensor = model(batch["image"]).square().mean()
            return out

        factory = make_factory(
            loss,
            model=lambda: nn.Conv2d(3, 4, 3),
            batches=lambda: [{"image": torch.randn(2, 3, 5, 5), "target": torch.zeros(2, 3, dtype=torch.long)}],
        )
        contender = make(factory, channels_last=channels_last)
        contender.step()
        contender.step()
        assert seen == [[channels_last, channels_last]] * 2, "it stays so after the optimizer's step"

    def test_a_model_with_5d_weights_is_left_as_it_is(self) -> None:
        factory = make_factory(model=lambda: nn.Conv3d(1, 2, 3), batches=lambda: [torch.randn(2, 1, 4, 4, 4)])
        make(factory, channels_last=True).step()


class Peculiar(nn.Module):
    """Buffers of other kinds, a frozen part and a layer whose behaviour depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)
        self.register_buffer("phase", torch.ones(3, dtype=torch.complex64))
        self.register_buffer("table", torch.arange(4))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.frozen(x)))
        return out


class TestModels:
    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
    @pytest.mark.parametrize("channels_last", [True, False])
    def test_a_peculiar_model_in_eval_mode_trains(self, precision: Precision, channels_last: bool) -> None:
        kept: list[Peculiar] = []

        def model() -> Peculiar:
            kept.append(Peculiar())
            return kept[-1]

        contender = make(make_factory(model=model), precision, channels_last=channels_last)
        frozen = kept[0].frozen.weight.clone()
        for _ in range(3):
            contender.step()
        taken = 3 - len(contender.skipped_at)  # A skipped step puts the statistics back.
        assert kept[0].norm.num_batches_tracked == taken > 0, "it was in training mode"
        assert torch.equal(kept[0].frozen.weight, frozen)
        assert kept[0].phase.dtype is torch.complex64
        assert contender.losses[-1] < contender.losses[0]

    @pytest.mark.parametrize("wrap", [lambda x: {"x": x, "name": "a"}, lambda x: [x, 3], lambda x: (None, x)])
    def test_batches_are_nests(self, wrap: Callable[[Tensor], Any]) -> None:
        def loss(model: nn.Module, batch: Any) -> Tensor:
            return square(model, batch["x"] if isinstance(batch, dict) else next(part for part in batch if isinstance(part, Tensor)))

        contender = make(make_factory(loss, batches=lambda: [wrap(torch.randn(8, 4))]))
        assert contender.step().samples == 8


class TestProfile:
    def test_the_memory_of_a_step_is_its_own(self) -> None:
        factory = make_factory(model=lambda: nn.Linear(4, 2, bias=False))
        wide = make_factory(model=lambda: nn.Linear(4, 1 << 16, bias=False))
        alone = make(factory)
        alone.step()
        _, expected = alone.profiled_step()
        crowd = [make(wide) for _ in range(3)]
        for other in crowd:
            other.step()
        beside = make(factory)
        beside.step()
        _, seen = beside.profiled_step()
        assert seen.memory == expected.memory
        assert seen.profile.peak_bytes == expected.profile.peak_bytes
        assert seen.memory.parameters == 4 * 2 * 4
        assert seen.memory.batch == 8 * 4 * 4
        _, seen_wide = crowd[0].profiled_step()
        assert seen_wide.profile.peak_bytes > 4 * (1 << 16) * 4, "the gradient of the weight, at least"

    def test_a_profiled_step_trains(self) -> None:
        plain, profiled = make(noisy_task), make(noisy_task)
        plain.step()
        profiled.profiled_step()
        assert plain.losses == profiled.losses
