from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.engine import MixedPrecision
from halfstep.engine.buffers import BufferGuard
from halfstep.scaler import LossScaler
from tests.engine.loops import same_state

INF = float("inf")
PRECISIONS = ["fp32", "bf16", "fp16"]


class Counting(nn.Module):
    """A layer that writes to buffers of its own in each forward pass."""

    def __init__(self, update: Any, **buffers: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.update: Any = update
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        self.update(self, x.detach().float())
        return x * self.weight


def batch_norms(**settings: Any) -> nn.Module:
    torch.manual_seed(3)
    convolution = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3, **settings), nn.ReLU(), nn.Flatten())
    return nn.Sequential(convolution, nn.Linear(12, 4), nn.BatchNorm1d(4, **settings))


def images(factor: float = 1.0) -> Tensor:
    return torch.randn(6, 2, 2, 2, generator=torch.Generator().manual_seed(5)) * factor


def engine(model: nn.Module, precision: str = "fp32", *, fused: bool = False, **settings: Any) -> MixedPrecision:
    return MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused), precision, **settings)


def step(amp: MixedPrecision, x: Tensor) -> bool:
    return amp.train_step(lambda x: amp.model(x).float().square().mean(), x).skipped


def state_of(model: nn.Module) -> Any:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_skipped_step_puts_the_statistics_of_batch_normalization_back(precision: str, fused: bool, momentum: float | None) -> None:
    amp = engine(batch_norms(momentum=momentum), precision, fused=fused)
    for _ in range(2):
        before = state_of(amp.model)
        assert not step(amp, images(0.1))
        assert not same_state(state_of(amp.model), before)
        assert int(amp.model.state_dict()["2.num_batches_tracked"]) == int(before["2.num_batches_tracked"]) + 1
        before = state_of(amp.model)
        assert step(amp, images(INF))
        assert same_state(state_of(amp.model), before)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_evaluation_after_a_skipped_step_is_what_it_was_before(precision: str, fused: bool) -> None:
    amp = engine(batch_norms(), precision, fused=fused)
    outputs = []
    for factor in (1.0, INF):
        step(amp, images(factor))
        amp.model.eval()
        with torch.no_grad(), amp.autocast():
            outputs.append(amp.model(images()))
        amp.model.train()
    assert bool(outputs[1].isfinite().all())
    assert torch.equal(outputs[0], outputs[1])


def test_a_run_with_skips_equals_one_without_those_batches_to_the_bit() -> None:
    with_skips, without = (engine(batch_norms(), "fp16", fused=True, scaler=LossScaler(init_scale=64.0, static=True)) for _ in range(2))
    for factor in (1.0, INF, 0.5, INF, INF, 2.0):
        step(with_skips, images(factor))
        if factor != INF:
            step(without, images(factor))
    assert same_state(state_of(with_skips.model), state_of(without.model))


def test_they_stay_as_the_forward_pass_left_them_when_that_is_asked_for() -> None:
    amp = engine(batch_norms(), restore_buffers=False)
    assert step(amp, images(INF))
    assert not bool(amp.model.state_dict()["0.1.running_mean"].isfinite().all())
    assert int(amp.model.state_dict()["0.1.num_batches_tracked"]) == 1


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("by_hand", [True, False])
def test_all_micro_batches_of_a_skipped_step_are_undone(by_hand: bool, bad: int, fused: bool) -> None:
    amp = engine(batch_norms(), "fp16", fused=fused, accumulate=3)
    step(amp, images())
    before = state_of(amp.model)
    x = images().repeat(3, 1, 1, 1)
    x[6 * bad] = INF
    if by_hand:
        for part in x.chunk(3):
            with amp.autocast():
                loss = amp.model(part).float().square().mean()
            amp.backward(loss)
            record = amp.step()
        assert record is not None
        assert record.skipped
    else:
        assert step(amp, x)
    assert same_state(state_of(amp.model), before)


def _add_int(module: Any, x: Tensor) -> None:
    module.count += len(x)
    module.seen[0] = True


def _write_large(module: Any, x: Tensor) -> None:
    module.large[:4] += x.sum()
    module.small.copy_(x.mean(0))


def _write_through_a_view(module: Any, x: Tensor) -> None:
    module.large.view(-1)[3:5].fill_(float(x.sum()))


def _exchange(module: Any, x: Tensor) -> None:
    module.mean = 0.9 * module.mean + 0.1 * x.mean(0)


def _exchange_large(module: Any, x: Tensor) -> None:
    module.large = module.large + x.sum()


def _exchange_for_expanded(module: Any, x: Tensor) -> None:
    module.mean = x.mean().expand(4)


def _exchange_dtype(module: Any, x: Tensor) -> None:
    module.mean = (module.mean.float() + x.mean(0)).bfloat16()


def _grow(module: Any, x: Tensor) -> None:
    module.cache = torch.cat([module.cache, x.mean(0, keepdim=True)])


def _fill_the_empty(module: Any, x: Tensor) -> None:
    if module.first is None:
        module.first = x.mean(0)
    module.first += 1.0


def _write_overlapping(module: Any, x: Tensor) -> None:
    module.windows[0, 0] += x.sum()


KINDS: dict[str, tuple[Callable[[Any, Tensor], None], dict[str, Callable[[], Tensor | None]]]] = {
    "integers and booleans": (_add_int, {"count": lambda: torch.zeros((), dtype=torch.int64), "seen": lambda: torch.zeros(2).bool()}),
    "large, written to": (_write_large, {"large": lambda: torch.zeros(65537), "small": lambda: torch.zeros(4)}),
    "large, written to through a view": (_write_through_a_view, {"large": lambda: torch.zeros(2, 40000)}),
    "at the limit": (_write_through_a_view, {"large": lambda: torch.zeros(65536)}),
    "exchanged": (_exchange, {"mean": lambda: torch.zeros(4)}),
    "large, exchanged": (_exchange_large, {"large": lambda: torch.zeros(65537)}),
    "exchanged for an expanded one": (_exchange_for_expanded, {"mean": lambda: torch.zeros(4)}),
    "exchanged for another dtype": (_exchange_dtype, {"mean": lambda: torch.zeros(4)}),
    "exchanged for another shape": (_grow, {"cache": lambda: torch.zeros(1, 4)}),
    "none at first": (_fill_the_empty, {"first": lambda: None, "other": lambda: torch.zeros(1)}),
    "overlapping": (_write_overlapping, {"windows": lambda: torch.zeros(6).as_strided((4, 3), (1, 1))}),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_buffers_of_every_kind_are_put_back(kind: str, fused: bool) -> None:
    update, make = KINDS[kind]
    amp = engine(Counting(update, **{name: value() for name, value in make.items()}), "fp16", fused=fused)
    x = torch.ones(3, 4)
    for factor in (INF, 1.0, INF, INF, 0.5):  # The first step of a fused optimizer, which makes its state, is told its verdict.
        before = {name: None if value is None else value.clone() for name, value in amp.model._buffers.items()}
        assert step(amp, x * factor) == (factor == INF)
        assert same_state({**amp.model._buffers}, before) == (factor == INF), (kind, factor)


@pytest.mark.parametrize("fused", [True, False])
def test_a_large_buffer_that_nobody_writes_to_is_not_copied(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    amp = engine(Counting(lambda *_: None, table=torch.zeros(70000), small=torch.zeros(3)), "fp16", fused=fused)
    step(amp, torch.ones(3, 4))
    copied: list[int] = []
    copy_ = Tensor.copy_

    def watched(tensor: Tensor, source: Tensor, *args: Any) -> Tensor:
        copied.append(source.numel())
        return copy_(tensor, source, *args)

    monkeypatch.setattr(Tensor, "copy_", watched)
    step(amp, torch.ones(3, 4))
    step(amp, torch.full((3, 4), INF))
    assert 70000 not in copied
    assert 3 in copied


@pytest.mark.parametrize("fused", [True, False])
def test_expanded_buffers_are_left_alone(fused: bool) -> None:
    """As the position ids of Hugging Face's models: no kernel can write to them in place."""
    positions = torch.arange(512).expand((1, -1)).expand((2, -1))

    def count(module: Any, x: Tensor) -> None:
        module.count += len(x)

    amp = engine(Counting(count, positions=positions, count=torch.zeros(())), "fp16", fused=fused)
    for factor in (1.0, INF):
        step(amp, torch.full((3, 4), factor))
        assert amp.model.positions is positions
        assert torch.equal(positions, torch.arange(512).repeat(2, 1))
        assert amp.model.count == 3


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("exchange", [True, False])
def test_a_buffer_in_two_places_is_put_back_in_both(exchange: bool, fused: bool) -> None:
    shared = torch.zeros(4)
    reader = Counting(lambda *_: None, mean=shared)
    writer = Counting(_exchange if exchange else lambda module, x: module.mean.add_(x.mean(0)), mean=shared)
    amp = engine(nn.Sequential(reader, writer), "fp16", fused=fused)
    step(amp, torch.ones(3, 4))
    before = state_of(amp.model)
    assert step(amp, torch.full((3, 4), INF))
    assert same_state(state_of(amp.model), before)
    assert (reader.mean is writer.mean) != exchange


def test_a_buffer_in_two_places_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = torch.zeros(70000)
    guard = BufferGuard(nn.ModuleList(Counting(None, table=shared) for _ in range(3)))
    copied: list[Tensor] = []
    clone = Tensor.clone

    def watched(tensor: Tensor) -> Tensor:
        copied.append(tensor)
        return clone(tensor)

    monkeypatch.setattr(Tensor, "clone", watched)
    guard.remember()
    assert len(copied) == 1


@pytest.mark.parametrize("fused", [True, False])
def test_buffers_that_come_and_go_between_steps(fused: bool) -> None:
    amp = engine(Counting(_exchange, mean=torch.zeros(4), spare=torch.zeros(2)), "fp16", fused=fused)
    step(amp, torch.ones(3, 4))
    late = torch.zeros(4)
    amp.model.register_buffer("late", late)
    vars(amp.model)["update"] = lambda _, x: late.add_(x.mean(0))
    assert step(amp, torch.full((3, 4), INF))
    assert torch.equal(late, torch.zeros(4))
    del amp.model.spare
    assert step(amp, torch.full((3, 4), INF))
    assert sorted(amp.model._buffers) == ["late", "mean"]
    amp.model.mean = torch.full((4,), 7.0)
    assert step(amp, torch.full((3, 4), INF))
    assert torch.equal(amp.model.mean, torch.full((4,), 7.0))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_loaded_between_steps_stays(precision: str, fused: bool) -> None:
    amp = engine(batch_norms(), precision, fused=fused)
    step(amp, images())
    loaded = {name: value + 1 for name, value in state_of(amp.model).items()}
    amp.model.load_state_dict(loaded)
    assert step(amp, images(INF))
    assert same_state(state_of(amp.model), loaded)


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize("fused", [True, False])
def test_an_exception_puts_them_back(where: str, fused: bool) -> None:
    amp = engine(batch_norms(), "fp16", fused=fused)
    step(amp, images())
    before = state_of(amp.model)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError(where)

    last: Any = amp.model[1]  # type: ignore[index]
    made: dict[str, Callable[[], Any]] = {
        "forward": lambda: last.register_forward_hook(fail),
        "backward": lambda: last.weight.register_hook(fail),
        "optimizer": lambda: amp.optimizer.register_step_pre_hook(fail),
    }
    handle = made[where]()
    with pytest.raises(torch.OutOfMemoryError, match=where):
        step(amp, images())
    handle.remove()
    assert same_state(state_of(amp.model), before)


def test_a_forward_pass_outside_of_the_engines_region_is_left_as_it_is() -> None:
    """The engine cannot know what they were before it; above all it does not bring back older values."""
    amp = engine(batch_norms())
    step(amp, images())
    amp.model.load_state_dict({name: value + 1 for name, value in state_of(amp.model).items()})
    loss = amp.model(images()).square().mean()
    after_forward = state_of(amp.model)
    amp.backward(loss * INF)
    record = amp.step()
    assert record is not None
    assert record.skipped
    assert same_state(state_of(amp.model), after_forward)


def test_a_model_without_buffers_needs_no_guard() -> None:
    assert BufferGuard.of(nn.Linear(1, 1)) is None
    assert BufferGuard.of(nn.BatchNorm1d(1)) is not None


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_a_guard_goes_by_a_verdict_that_it_does_not_read(found: float) -> None:
    norm = nn.BatchNorm1d(2)
    guard = BufferGuard(norm)
    guard.remember()
    norm(torch.full((4, 2), 3.0))
    guard.put_back_if(torch.tensor(found))
    assert norm.num_batches_tracked is not None
    assert (norm.num_batches_tracked.item() == 0) == bool(found)
