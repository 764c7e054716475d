"""Small models and batches, and what the tests of scripts compare with: the same training written by hand, without halfstep."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.randomness import seed_everything

INF = float("inf")


class Net(nn.Module):
    """Layers of the kinds that the levels treat differently: linear ones, and a norm with parameters and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(F.relu(self.norm(self.first(x))))
        return result


def make_net(seed: int = 0) -> Net:
    seed_everything(seed)
    return Net()


def make_batches(count: int, *, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)) for _ in range(count)]


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Copies of them as they are stored, which is not as the state dict shows them at every level."""
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)  # The default eps is 0 in fp16.


def in_fp32(model: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer], factors: Sequence[float]) -> list[Tensor]:
    optimizer, losses = make(model), []
    for (x, y), factor in zip(make_batches(len(factors)), factors, strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) * factor
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    return losses


def in_autocast(model: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer], factors: Sequence[float]) -> list[Tensor]:
    """With torch's own autocast round the model, and torch's own scaler."""
    optimizer, scaler, losses = make(model), torch.amp.GradScaler("cpu", init_scale=2.0**16), []
    for (x, y), factor in zip(make_batches(len(factors)), factors, strict=True):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(x)
        loss = F.cross_entropy(output.float(), y) * factor
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return losses


def with_masters(model: Net, make: Callable[[nn.Module], torch.optim.Optimizer], factors: Sequence[float]) -> list[Tensor]:
    """As Apex did it: half parameters in the model beside fp32 ones that are stepped and copied into them; the norm stays fp32."""
    masters = model
    half = Net()
    half.load_state_dict(masters.state_dict())
    half.first.half()
    half.last.half()
    optimizer, scale, losses = make(masters), 2.0**16, []
    for (x, y), factor in zip(make_batches(len(factors)), factors, strict=True):
        hidden = half.norm(half.first(x.half()).float()).half()
        loss = F.cross_entropy(half.last(F.relu(hidden)).float(), y) * factor
        half.zero_grad()
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        gradients = [each.grad.float() / scale for each in half.parameters() if each.grad is not None]
        if all(gradient.isfinite().all() for gradient in gradients):
            for master, gradient in zip(masters.parameters(), gradients, strict=True):
                master.grad = gradient
            optimizer.step()
        else:
            scale /= 2
        with torch.no_grad():
            for master, copy in zip(masters.parameters(), half.parameters(), strict=True):
                copy.copy_(master)
            for kept, buffer in zip(masters.buffers(), half.buffers(), strict=True):
                kept.copy_(buffer)
        losses.append(loss.detach())
    return losses


def in_half(model: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer], factors: Sequence[float]) -> list[Tensor]:
    model.half()
    optimizer, losses = make(model), []
    for (x, y), factor in zip(make_batches(len(factors)), factors, strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.half()).float(), y) * factor
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    return losses
