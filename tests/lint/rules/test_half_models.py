"""Models that are trained in float16: with a scaler, and with Adam."""

from __future__ import annotations

import pytest
import torch

from halfstep.lint.rules.half_adam_epsilon import HalfAdamEpsilon
from halfstep.lint.rules.half_model_with_scaler import HalfModelWithScaler
from tests.lint.marking import check_marked, fix_all

SCALED = HalfModelWithScaler()
ADAM = HalfAdamEpsilon()

LOOP = """
import copy

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8)
        {part}

    def forward(self, x):
        return self.base(x)


def main(loader, args, device):
    model = Net()
    {convert}
    optimizer = {optimizer}
    {after}
    scaler = torch.amp.GradScaler("cuda", enabled={enabled})
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", enabled={enabled}):
            loss = model(x).mean()
        {step}
    {end}
"""
BY_SCALER = "scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()"
PLAIN = "loss.backward(); optimizer.step()"


def program(
    convert: str = "pass",
    *,
    optimizer: str = "torch.optim.SGD(model.parameters(), lr=0.1)",
    after: str = "pass",
    part: str = "pass",
    enabled: str = "True",
    step: str = BY_SCALER,
    end: str = "pass",
) -> str:
    """A training script."""
    return LOOP.format(convert=convert, optimizer=optimizer, after=after, part=part, enabled=enabled, step=step, end=end)


@pytest.mark.parametrize(
    "code",
    [
        program("model.half()  # <-"),
        program("model = model.half().cuda()  # <-"),
        program("model = model.cuda().to(torch.float16)  # <-"),
        program("model = model.to(device=device, dtype=torch.half)  # <-"),
        program("model.train().half()  # <-"),
        program(after="model.half()  # <-"),
        program("model.half()  # <-", optimizer="torch.optim.SGD([{'params': model.parameters()}], lr=0.1)"),
        program("model.half()  # <-", optimizer="torch.optim.SGD([p for n, p in model.named_parameters()], lr=0.1)"),
        program("model.half()  # <-", enabled="args.amp"),
        program("if args.amp: model.half()  # <-", enabled="args.amp"),
        program(optimizer="torch.optim.SGD(model.half().parameters(), lr=0.1)  # <-"),
        program(part="self.adapter = nn.Linear(8, 8).half()  # <-"),
    ],
)
def test_half_models_with_a_scaler(code: str) -> None:
    check_marked(code, SCALED)


@pytest.mark.parametrize(
    "code",
    [
        program("model.half().float()"),
        program("model.half(); model.float()"),
        program("model = model.half().to(torch.float32)"),
        program("model.bfloat16()"),
        program("copy.deepcopy(model).half()"),
        program("half = copy.deepcopy(model).half()"),
        program("state = {k: v.half() for k, v in model.state_dict().items()}"),
        program("if args.pure: model.half()", enabled="not args.pure"),
        program("if args.pure: model.half()", enabled="args.amp"),
        program("model.half()", enabled="False"),
        program("model.half()", step=PLAIN),
        program("model.base.half().requires_grad_(False)"),
        program("model.half()", after="for p in model.parameters(): p.data = p.data.float()"),
        program(end="model.half()"),
        program(end="torch.save(model.half().state_dict(), 'x.pt')"),
        program("x = torch.ones(1).half()"),
        program("model.half(); model = Net()"),
    ],
)
def test_what_a_scaler_can_step(code: str) -> None:
    check_marked(code, SCALED)


@pytest.mark.parametrize(
    "place", ["model.half()", "model = model.cuda().half()", "model.to(device, torch.float16)", "model.to(dtype=torch.half)"]
)
def test_the_fix_takes_the_conversion_out(place: str) -> None:
    changed = fix_all(program(place), SCALED)
    assert "half" not in changed
    assert "float16" not in changed


def test_torch_refuses_half_gradients() -> None:
    model = torch.nn.Linear(2, 2).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2, dtype=torch.float16)).float().sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.step(optimizer)


MODEL = "(model.parameters(), lr=1e-3{})"


@pytest.mark.parametrize(
    "code",
    [
        program("model.half()", optimizer="torch.optim.Adam(model.parameters())  # <-", step=PLAIN),
        program("model.half()", optimizer="torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-8)  # <-", step=PLAIN),
        program("model.half()", optimizer="torch.optim.NAdam(model.parameters(), 1e-3, (0.9, 0.99), 1e-8)  # <-", step=PLAIN),
        program("model = model.to(torch.float16)", optimizer="torch.optim.RAdam(params=model.parameters())  # <-", step=PLAIN),
        program("model.half()", optimizer="torch.optim.Adam(model.parameters(), foreach=False)  # <-", enabled="False"),
        program(optimizer="torch.optim.Adam(model.cuda().half().parameters())  # <-", step=PLAIN),
        program("w = torch.ones(2).half().requires_grad_()", optimizer="torch.optim.Adam([w])  # <-", step=PLAIN),
        program("w = nn.Parameter(torch.zeros(2, dtype=torch.float16))", optimizer="torch.optim.Adam([w])  # <-", step=PLAIN),
    ],
)
def test_adam_on_half_parameters(code: str) -> None:
    check_marked(code, ADAM)


@pytest.mark.parametrize(
    "code",
    [
        program(optimizer="torch.optim.Adam(model.parameters())", step=PLAIN),
        program("model.half()", optimizer="torch.optim.Adam(model.parameters(), eps=1e-4)", step=PLAIN),
        program("model.half()", optimizer="torch.optim.Adam(model.parameters(), eps=args.eps)", step=PLAIN),
        program("model.half()", optimizer="torch.optim.Adam(model.parameters(), fused=True)", step=PLAIN),
        program("model.half()", optimizer="torch.optim.Adam(model.parameters(), **args.adam)", step=PLAIN),
        program("model.half()", optimizer="torch.optim.SGD(model.parameters(), lr=0.1)", step=PLAIN),
        program("model.half()", optimizer="torch.optim.Adam(model.parameters())"),  # the scaler refuses before
        program("model.half().float()", optimizer="torch.optim.Adam(model.parameters())", step=PLAIN),
        program("model.half()", optimizer="FP16_Optimizer(torch.optim.Adam(model.parameters()))", step=PLAIN),
        program("w = nn.Parameter(torch.zeros(2))", optimizer="torch.optim.Adam([w])", step=PLAIN),
        program(optimizer="torch.optim.Adam(model.parameters())", step=PLAIN, end="model.half()"),
    ],
)
def test_adam_that_is_safe(code: str) -> None:
    check_marked(code, ADAM)


def test_the_loop_that_shows_it() -> None:
    check_marked(
        """
        import torch

        for dtype in (torch.float16, torch.bfloat16):
            for eps in (1e-8, 1e-4):
                p = torch.nn.Parameter(torch.ones(3, dtype=dtype))
                o = torch.optim.Adam([p], lr=1e-3, eps=eps)  # <-
        for dtype, eps in ((torch.float16, 1e-4), (torch.float32, 1e-8)):
            p = torch.nn.Parameter(torch.ones(3, dtype=dtype))
            o = torch.optim.Adam([p], lr=1e-3, eps=eps)
        """,
        ADAM,
    )


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam", "Adamax"])
def test_torch_divides_zero_by_zero(name: str) -> None:
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = getattr(torch.optim, name)([weight], lr=1e-3)
    for _ in range(7):
        weight.grad = torch.tensor([0.0, 1e-4, 1e-2], dtype=torch.float16)
        optimizer.step()
    assert weight[0].isnan()


def test_the_fix_keeps_the_layout_of_a_model() -> None:
    layers = "nn.Sequential(\n        nn.Linear(2, 2),  # first\n        nn.ReLU(),\n    )"
    changed = fix_all(program(f"model = {layers}.half()"), SCALED)
    assert f"    model = {layers}\n" in changed
