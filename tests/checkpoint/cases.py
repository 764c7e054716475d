"""Runs of every kind, each by a name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from halfstep import LossScaler, MixedPrecision
from tests.checkpoint.runs import STEPS, Build, Facts, Run, batch, facts

__all__ = ["FEW", "WHOLE", "build", "engine", "loop", "mlp", "scaler"]

LARGE: Final = (4, 5, 13, 22, 23, 24, 33, 38)  # so that there are skips before, at and after every place to stop at
INFINITE: Final = (3, 11, 12, 25, 37)


def scaler(**settings: Any) -> LossScaler:
    """One whose first scales are too high, and that grows soon."""
    return LossScaler(**{"init_scale": 2.0**18, "growth_interval": 3, **settings})


def mlp() -> nn.Sequential:
    """With random numbers in its forward pass, and buffers."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1))


def engine(model: nn.Module, optimizer: Any, precision: str, **settings: Any) -> MixedPrecision:
    if "fp16" in precision:
        settings.setdefault("scaler", scaler())
    settings.setdefault("max_grad_norm", 1.0)
    return MixedPrecision(model, optimizer, precision, **settings)


def loop(amp: MixedPrecision, *, large: Sequence[int] = LARGE, infinite: Sequence[int] = INFINITE) -> Run:
    """A loop of the user's own."""
    bad = {"large": large} if amp.scaler is not None else {"infinite": infinite}

    def step(number: int) -> Facts:
        x, y = batch(number, **bad)
        with amp.autocast():
            loss = F.mse_loss(amp.model(x), y)
        amp.backward(loss)
        return facts(loss, amp.step())

    return Run(engines=amp, step=step)


def fp32_cosine() -> Run:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return loop(engine(model, optimizer, "fp32", scheduler=lr_scheduler.CosineAnnealingLR(optimizer, 30)))


def bf16_one_cycle() -> Run:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    return loop(engine(model, optimizer, "bf16", scheduler=lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS)))


def fp16_fused() -> Run:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return loop(engine(model, optimizer, "fp16", scheduler=lr_scheduler.CosineAnnealingLR(optimizer, 30)))


def fp16_fused_device_verdict() -> Run:
    """No schedule, no clipping: the host never waits for the verdict on a step."""
    model = mlp()
    return loop(engine(model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), "fp16", max_grad_norm=None))


def fp16_accumulated() -> Run:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    schedule = lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.ExponentialLR(optimizer, 0.9)], milestones=[4])
    return loop(engine(model, optimizer, "fp16", scheduler=schedule, accumulate=3))


def fp16_accumulated_momentum() -> Run:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, fused=True)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.95**epoch)
    return loop(engine(model, optimizer, "fp16", scheduler=schedule, accumulate=3, scaler=scaler(hysteresis=2)))


def two_optimizers() -> Run:
    model = mlp()
    optimizers = [torch.optim.AdamW(model[0].parameters(), lr=0.01), torch.optim.SGD(model[1:].parameters(), lr=0.05, momentum=0.9)]
    schedulers = [lr_scheduler.MultiStepLR(each, [5, 9, 9, 20]) for each in optimizers]
    return loop(engine(model, optimizers, "fp16", scheduler=schedulers, accumulate=2))


def gan() -> Run:
    """Two engines that share a scaler, and train in turns."""
    generator, discriminator = mlp(), nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
    shared = scaler(init_scale=2.0**20)
    amp_g = engine(generator, torch.optim.Adam(generator.parameters(), lr=0.01, fused=True), "fp16", scaler=shared)
    amp_d = engine(discriminator, torch.optim.RMSprop(discriminator.parameters(), lr=0.01), "fp16", scaler=shared)

    def step(number: int) -> Facts:
        x, y = batch(number, large=LARGE)
        with amp_d.autocast():
            real, fake = discriminator(y), discriminator(generator(x).detach())
            loss_d = F.softplus(fake).mean() + F.softplus(-real).mean()
        amp_d.backward(loss_d)
        first = facts(loss_d, amp_d.step())
        with amp_g.autocast():
            loss_g = F.softplus(-discriminator(generator(x))).mean()
        amp_g.backward(loss_g)
        return (*first, *facts(loss_g, amp_g.step()))

    return Run(engines={"generator": amp_g, "discriminator": amp_d}, step=step)


def known_end() -> Run:
    """A loop over `micro_batches`, which is begun anew where it was left: the last group is cut short."""
    model = mlp()
    amp = engine(model, torch.optim.AdamW(model.parameters(), lr=0.01), "fp16", accumulate=3)
    begun: list[Iterator[tuple[Tensor, Tensor]]] = []

    def step(number: int) -> Facts:
        if not begun:
            begun.append(amp.micro_batches(_plain_batch(each) for each in range(number, STEPS)))
        x, y = next(begun[0])
        with amp.autocast():
            loss = F.mse_loss(model(x), y)
        amp.backward(loss)
        return facts(loss, amp.step())

    return Run(engines=amp, step=step)


def _plain_batch(number: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(number)
    factor = 1e4 if number in LARGE else 1.0
    return factor * torch.randn(8, 6, generator=numbers), torch.randn(8, 1, generator=numbers)


def whole_steps() -> Run:
    """`train_step`, which splits its batch, and tries a skipped step again."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    amp = engine(model, optimizer, "fp16", accumulate=2, retries=1)

    def step(number: int) -> Facts:
        x, y = batch(number, large=LARGE)
        return facts(0.0, amp.train_step(lambda x, y: F.mse_loss(model(x), y), x, y))

    return Run(engines=amp, step=step)


def lbfgs() -> Run:
    model = mlp()
    amp = engine(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=3), "fp32", max_grad_norm=None)

    def step(number: int) -> Facts:
        x, y = batch(number, infinite=INFINITE)
        return facts(0.0, amp.train_step(lambda x, y: F.mse_loss(model(x), y), x, y))

    return Run(engines=amp, step=step)


def own_region() -> Run:
    """An autocast region that is not the engine's, so that it does not see when a step begins."""
    model = mlp()
    amp = engine(model, torch.optim.AdamW(model.parameters(), lr=0.01), "fp16", accumulate=3)

    def step(number: int) -> Facts:
        x, y = batch(number, large=LARGE)
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(x), y)
        amp.backward(loss)
        return facts(loss, amp.step())

    return Run(engines=amp, step=step)


def in_policy(policy: str) -> Build:
    def made() -> Run:
        model = mlp()
        return loop(engine(model, torch.optim.AdamW(model.parameters(), lr=0.01), policy, accumulate=2))

    return made


def with_scaler(make: Callable[[], Any]) -> Build:
    def made() -> Run:
        model = mlp()
        return loop(engine(model, torch.optim.AdamW(model.parameters(), lr=0.01), "fp16", accumulate=2, scaler=make()))

    return made


def with_model(make: Callable[[], nn.Module], *, precision: str = "fp16", sparse: bool = False, **settings: Any) -> Build:
    def made() -> Run:
        model = make()
        optimizer: Any = (
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) if sparse else torch.optim.AdamW(model.parameters(), lr=0.01)
        )
        return loop(engine(model, optimizer, precision, **{"accumulate": 3, **settings}))

    return made


class Tied(nn.Module):
    """One weight under two names, and one module under two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.norm = nn.LayerNorm(6)
        self.again = self.norm

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.second(self.norm(self.first(x)))).mean(1, keepdim=True)  # type: ignore[no-any-return]


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 2, groups=1))
        self.body.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        image = torch.cat([x, x, x, x, x, x], 1)[:, :32].reshape(8, 2, 4, 4).to(memory_format=torch.channels_last)
        return self.body(image).mean((1, 2, 3)).unsqueeze(1)  # type: ignore[no-any-return]


class SparseWords(nn.Module):
    """Gradients that are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 5, sparse=True)
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        numbers = (x.float().abs() * 7).nan_to_num(0, 0, 0).long() % 20
        return self.head(self.words(numbers).sum(1))  # type: ignore[no-any-return]


class Complex(nn.Module):
    """A complex parameter and a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.register_buffer("shift", torch.randn(4, dtype=torch.complex64).conj())
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.shift, Tensor)
        filtered = torch.fft.irfft(torch.fft.rfft(x.float(), dim=1) * (self.spectrum + self.shift), n=6, dim=1)
        return self.head(filtered)  # type: ignore[no-any-return]


class Normed(nn.Module):
    """Parametrizations, one of which writes into buffers, and what is there twice in torch: the older ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
        self.second = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.third = nn.utils.spectral_norm(nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(2, 4, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.reshape(8, 3, 2))[0][:, -1])  # type: ignore[no-any-return]


class Hidden(nn.Module):
    """Values of its own that `state_dict()` does not show, or shows as something else than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 1)
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        assert isinstance(self.table, Tensor)
        return self.body(x + self.table / (1 + self.seen))  # type: ignore[no-any-return]


class Moving(nn.Module):
    """A buffer that is not in `state_dict()`, and changes in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 1)
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.mean, Tensor)
        self.mean.mul_(0.9).add_(0.1 * x.detach().float().mean(0).nan_to_num(0, 0, 0))
        return self.body(x - self.mean)  # type: ignore[no-any-return]


def compiled() -> nn.Module:
    model: Any = torch.compile(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), backend="eager")
    return model  # type: ignore[no-any-return]


def tensor_lr(fused: bool) -> Build:
    def made() -> Run:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=fused, foreach=False)
        return loop(engine(model, optimizer, "fp16", scheduler=lr_scheduler.CosineAnnealingLR(optimizer, 30)))

    return made


# Those that are interrupted after every number of steps, and those that are after a few.
WHOLE: Final[dict[str, Build]] = {
    "fp32, cosine": fp32_cosine,
    "bf16, one cycle": bf16_one_cycle,
    "fp16, fused": fp16_fused,
    "fp16, fused, verdict on the device": fp16_fused_device_verdict,
    "fp16, accumulated": fp16_accumulated,
    "fp16, accumulated with momentum": fp16_accumulated_momentum,
    "two optimizers": two_optimizers,
    "GAN": gan,
    "known end": known_end,
}
FEW: Final[dict[str, Build]] = {
    "whole steps": whole_steps,
    "LBFGS": lbfgs,
    "a region of the user's own": own_region,
    "bf16 island": in_policy("bf16; 0=fp32"),
    "fp16 island": in_policy("fp32; 0=fp16"),
    "pure": in_policy("O3"),
    "fixed scale": with_scaler(lambda: scaler(init_scale=1024.0, static=True)),
    "torch's scaler": with_scaler(lambda: torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=3)),
    "tied": with_model(Tied),
    "channels last": with_model(ChannelsLast),
    "sparse": with_model(SparseWords, sparse=True, precision="bf16", max_grad_norm=None),
    "complex": with_model(Complex, precision="fp32"),
    "normed": with_model(Normed),
    "recurrent": with_model(Recurrent, precision="bf16"),
    "extra state": with_model(Hidden),
    "moving buffer": with_model(Moving),
    "compiled": with_model(compiled),
    "rate as a tensor": tensor_lr(False),
    "rate as a tensor, fused": tensor_lr(True),
}


def build(name: str) -> Build:
    """What makes the run of a name."""
    return {**WHOLE, **FEW}[name]
