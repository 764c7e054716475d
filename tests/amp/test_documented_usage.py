"""Scripts as Apex's documentation and examples have them, with the import changed and nothing else, beside the same written by hand."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep import amp
from tests.amp.nets import (
    INF,
    Net,
    adam,
    assert_same,
    in_autocast,
    in_fp32,
    in_half,
    make_batches,
    make_net,
    sgd,
    tensors_of,
    with_masters,
)

REFERENCES: dict[str, Callable[..., list[Tensor]]] = {"O0": in_fp32, "O1": in_autocast, "O2": with_masters, "O3": in_half}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, factors: list[float]) -> list[Tensor]:
    """The loop of Apex's documentation."""
    losses = []
    for (x, y), factor in zip(make_batches(len(factors)), factors, strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) * factor
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("level", REFERENCES)
def test_one_model_and_optimizer(level: str, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    factors = [1.0, 1.0, INF, 1.0, 1.0] if level in ("O1", "O2") else [1.0] * 5
    model: nn.Module = make_net()
    model, optimizer = amp.initialize(model, make(model), opt_level=level)
    found = train(model, optimizer, factors)
    reference = make_net()
    expected = REFERENCES[level](reference, make, factors)
    assert_same(found, expected)
    assert_same(tensors_of(model), tensors_of(reference))
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == (2.0**15 if level in ("O1", "O2") else 1.0)


@pytest.mark.parametrize("loss_scale", [128.0, "128.0"])
@pytest.mark.parametrize("level", REFERENCES)
def test_a_static_scale(level: str, loss_scale: float | str) -> None:
    model: nn.Module = make_net()
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, loss_scale=loss_scale)
    (x, y), *_ = make_batches(1)
    loss = F.cross_entropy(model(x), y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss.item() == loss.item() * 128.0
        scaled_loss.backward()
    gradients = [parameter.grad.float() for parameter in model.parameters() if parameter.grad is not None]
    reference = make_net()
    F.cross_entropy(reference(x), y).backward()  # type: ignore[no-untyped-call]
    for gradient, parameter in zip(gradients, reference.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("level", REFERENCES)
def test_inference_with_the_model_alone(level: str) -> None:
    model = amp.initialize(make_net().eval(), opt_level=level)
    assert isinstance(model, Net)
    (x, _), *_ = make_batches(1)
    with torch.no_grad():
        found = model(x)
        expected = make_net().eval()(x)
    assert found.dtype is torch.float32
    assert torch.equal(found, expected) == (level == "O0")
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)


def gan() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    return discriminator, generator


SCALES = {"loss_scaler0": 1024.0, "loss_scaler1": 64.0, "loss_scaler2": 8.0}


def test_two_models_two_optimizers_and_three_losses_as_in_the_dcgan_example() -> None:
    models, criterion = gan(), nn.BCEWithLogitsLoss()
    [netD, netG], [optimizerD, optimizerG] = amp.initialize(list(models), [adam(each) for each in models], opt_level="O1", num_losses=3)
    amp.load_state_dict({name: {"loss_scale": scale, "unskipped": 0} for name, scale in SCALES.items()})
    for x, _ in make_batches(3):
        netD.zero_grad()
        output = netD(x)
        with amp.scale_loss(criterion(output, torch.ones_like(output)), optimizerD, loss_id=0) as errD_real_scaled:
            errD_real_scaled.backward()
        fake = netG(x[:, :4])
        output = netD(fake.detach())
        with amp.scale_loss(criterion(output, torch.zeros_like(output)), optimizerD, loss_id=1) as errD_fake_scaled:
            errD_fake_scaled.backward()
        optimizerD.step()
        netG.zero_grad()
        output = netD(fake)
        with amp.scale_loss(criterion(output, torch.ones_like(output)), optimizerG, loss_id=2) as errG_scaled:
            errG_scaled.backward()
        optimizerG.step()
    expected = gan_by_hand()
    assert_same([*tensors_of(netD), *tensors_of(netG)], expected)
    assert {name: entry["loss_scale"] for name, entry in amp.state_dict().items()} == SCALES


def gan_by_hand() -> list[Tensor]:
    netD, netG = gan()
    optimizerD, optimizerG = adam(netD), adam(netG)
    criterion = nn.BCEWithLogitsLoss()

    def half(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            output: Tensor = model(x)
        return output.float()

    def gradients(output: Tensor, target: float, model: nn.Module, scale: float) -> list[Tensor]:
        loss = criterion(output, torch.full_like(output, target))
        return [gradient / scale for gradient in torch.autograd.grad(loss * scale, list(model.parameters()))]

    for x, _ in make_batches(3):
        real = gradients(half(netD, x), 1.0, netD, SCALES["loss_scaler0"])
        fake = half(netG, x[:, :4])
        faked = gradients(half(netD, fake.detach()), 0.0, netD, SCALES["loss_scaler1"])
        for parameter, one, other in zip(netD.parameters(), real, faked, strict=True):
            parameter.grad = one + other
        optimizerD.step()
        for parameter, gradient in zip(netG.parameters(), gradients(half(netD, fake), 1.0, netG, SCALES["loss_scaler2"]), strict=True):
            parameter.grad = gradient
        optimizerG.step()
    return [*tensors_of(netD), *tensors_of(netG)]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_one_loss_for_two_models_with_an_optimizer_each(level: str) -> None:
    first, last = nn.Linear(6, 8), nn.Linear(8, 3)
    [first, last], [one, other] = amp.initialize([first, last], [sgd(first), sgd(last)], opt_level=level, num_losses=1)
    before = [*tensors_of(first), *tensors_of(last)]
    for (x, y), factor in zip(make_batches(2), [INF, 1.0], strict=True):
        loss = F.cross_entropy(last(first(x)), y) * factor
        with amp.scale_loss(loss, [one, other]) as scaled_loss:
            scaled_loss.backward()
        one.step()
        other.step()
        one.zero_grad()
        other.zero_grad()
        unchanged = [torch.equal(a, b) for a, b in zip([*tensors_of(first), *tensors_of(last)], before, strict=True)]
        assert unchanged == [factor == INF] * 4


def three_losses(outputs: Sequence[Tensor], y: Tensor) -> list[Tensor]:
    """One for each of two models, and one for both."""
    one, other = (output.float() for output in outputs)
    return [F.cross_entropy(one, y), F.cross_entropy(other, y), F.mse_loss(one, other)]


def test_three_losses_with_scales_of_their_own_and_two_optimizers() -> None:
    models: list[nn.Module] = [make_net(0), make_net(1)]
    models, [optim0, optim1] = amp.initialize(models, [adam(each) for each in models], opt_level="O1", num_losses=3)
    amp.load_state_dict({name: {"loss_scale": scale, "unskipped": 0} for name, scale in SCALES.items()})
    for x, y in make_batches(3):
        optim0.zero_grad()
        optim1.zero_grad()
        loss0, loss1, loss2 = three_losses([model(x) for model in models], y)
        with amp.scale_loss(loss0, optim0, loss_id=0) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
        with amp.scale_loss(loss1, optim1, loss_id=1) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
        with amp.scale_loss(loss2, [optim0, optim1], loss_id=2) as scaled_loss:
            scaled_loss.backward()
        optim0.step()
        optim1.step()
    assert_same([*tensors_of(models[0]), *tensors_of(models[1])], three_losses_by_hand())


def three_losses_by_hand() -> list[Tensor]:
    models: list[nn.Module] = [make_net(0), make_net(1)]
    optimizers = [adam(model) for model in models]
    for x, y in make_batches(3):
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = [model(x) for model in models]
        losses = three_losses(outputs, y)
        for model, own, scale in zip(models, losses[:2], (SCALES["loss_scaler0"], SCALES["loss_scaler1"]), strict=True):
            parameters = list(model.parameters())
            alone = torch.autograd.grad(own * scale, parameters, retain_graph=True)
            shared = torch.autograd.grad(losses[2] * SCALES["loss_scaler2"], parameters, retain_graph=True)
            for parameter, one, other in zip(parameters, alone, shared, strict=True):
                parameter.grad = one / scale + other / SCALES["loss_scaler2"]
        for optimizer in optimizers:
            optimizer.step()
    return [*tensors_of(models[0]), *tensors_of(models[1])]


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_accumulation(level: str, delay: bool) -> None:
    model: nn.Module = make_net()
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level)
    count = 3
    for number, (x, y) in enumerate(make_batches(2 * count), start=1):
        loss = F.cross_entropy(model(x), y) / count
        if number % count == 0:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with amp.scale_loss(loss, optimizer, delay_unscale=delay) as scaled_loss:
                scaled_loss.backward()
    assert_same(tensors_of(model), accumulated_by_hand(level, count))


def accumulated_by_hand(level: str, count: int) -> list[Tensor]:
    """Without a scale, which is a power of two and changes no bit of sums in fp32; so the gradients must not underflow in half."""
    model = make_net()
    optimizer, scale = sgd(model), 2.0**16
    sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for number, (x, y) in enumerate(make_batches(2 * count), start=1):
        if level == "O1":
            with torch.autocast("cpu", dtype=torch.float16):
                output = model(x)
        else:
            weights = [model.first.weight, model.first.bias, model.last.weight, model.last.bias]
            halves = [weight.half() for weight in weights]
            hidden = F.relu(model.norm(F.linear(x.half(), halves[0], halves[1]).float()).half())
            output = F.linear(hidden, halves[2], halves[3])
        loss = F.cross_entropy(output.float(), y) / count
        for total, gradient in zip(sums, torch.autograd.grad(loss * scale, list(model.parameters())), strict=True):
            total.add_(gradient / scale)
        if number % count == 0:
            for parameter, total in zip(model.parameters(), sums, strict=True):
                parameter.grad = total.clone()
                total.zero_()
            optimizer.step()
    return tensors_of(model)


@pytest.mark.parametrize("level", REFERENCES)
def test_clipping_through_the_master_parameters(level: str) -> None:
    model: nn.Module = make_net()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), opt_level=level)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    (x, y), *_ = make_batches(1)
    with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled_loss:
        scaled_loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.25)
    reference = make_net()
    F.cross_entropy(reference(x), y).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(norm.float(), torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.25), rtol=0.01, atol=0)
    assert norm > 0.25
    optimizer.step()
    moved = [(one.detach() - other).float() for one, other in zip(model.parameters(), before, strict=True)]
    assert torch.stack([each.norm() for each in moved]).norm().item() == pytest.approx(0.25, rel=0.01)


@pytest.mark.parametrize("level", REFERENCES)
def test_a_checkpoint_goes_on_bit_for_bit(level: str) -> None:
    factors = [1.0, INF, 1.0, 1.0, 1.0] if level in ("O1", "O2") else [1.0] * 5
    model, optimizer = start(level)
    train(model, optimizer, factors[:3])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, file)
    expected = train(model, optimizer, factors[3:])
    file.seek(0)
    checkpoint = torch.load(file, weights_only=True)
    resumed, resumed_optimizer = start(level)
    resumed.load_state_dict(checkpoint["model"])
    resumed_optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
    state = checkpoint["amp"]["loss_scaler0"]
    assert state == ({"loss_scale": 2.0**15, "unskipped": 1} if level in ("O1", "O2") else {"loss_scale": 1.0, "unskipped": 0})
    assert_same(train(resumed, resumed_optimizer, factors[3:]), expected)
    assert_same(tensors_of(resumed), tensors_of(model))


def start(level: str) -> Any:
    model = make_net()
    return amp.initialize(model, adam(model), opt_level=level)


@pytest.mark.parametrize("level", REFERENCES)
def test_disabled_it_is_the_script_without_it(level: str) -> None:
    model: nn.Module = make_net()
    passed = sgd(model)
    model, optimizer = amp.initialize(model, passed, opt_level=level, enabled=False)
    assert optimizer is passed
    assert type(model) is Net
    found = train(model, optimizer, [1.0] * 3)
    reference = make_net()
    assert_same(found, in_fp32(reference, sgd, [1.0] * 3))
    assert_same(tensors_of(model), tensors_of(reference))
    assert amp.state_dict() == {}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 0}})


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_batch_of_a_class_of_the_users_own(level: str) -> None:
    class Batch:
        def __init__(self, x: Tensor) -> None:
            self.x = x

        def to(self, dtype: torch.dtype) -> Batch:
            return Batch(self.x.to(dtype))

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 6))
            self.seen: list[torch.dtype] = []

        def forward(self, batch: Batch, *, other: Batch) -> Tensor:
            self.seen += [batch.x.dtype, other.x.dtype]
            return F.linear(batch.x, self.weight)

    model = amp.initialize(Reader(), opt_level=level)
    batch = Batch(torch.ones(1, 6))
    assert torch.equal(model(batch, other=batch), torch.full((1, 2), 6.0))
    assert model.seen == [torch.float16, torch.float16]
