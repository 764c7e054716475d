"""Scalers next to bfloat16 regions."""

from __future__ import annotations

import pytest
import torch

from halfstep.lint.module import parse_module
from halfstep.lint.rules.scaler_with_bf16 import ScalerWithBf16
from tests.lint.marking import check_marked, fix_all

RULE = ScalerWithBf16()


@pytest.mark.parametrize(
    "code",
    [
        """
        import torch
        from torch.cuda.amp import GradScaler, autocast

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.scaler = GradScaler()  # <-

            def step(self, x, optimizer):
                with autocast(dtype=torch.bfloat16):
                    loss = self.model(x)
                self.scaler.scale(loss).backward()
                self.scaler.step(optimizer)
                self.scaler.update()
        """,
        """
        import torch

        def step(model, x, optimizer, scaler):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        def main(model, loader, optimizer):
            scaler = torch.amp.GradScaler("cuda", growth_interval=100)  # <-
            for x in loader:
                step(model, x, optimizer, scaler)
        """,
        """
        import torch

        scaler = torch.amp.GradScaler("cpu")  # <-

        def step(model, x, optimizer):
            with torch.autocast("cpu"):
                loss = model(x)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        # Each function with its own type.
        """
        import torch

        def one(model, x, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        def other(model, x, optimizer):
            scaler = torch.amp.GradScaler("cuda")  # <-
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        """
        import torch

        def train(model, x, optimizer, args):
            dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[args.dtype]
            scaler = torch.amp.GradScaler("cuda")
            with torch.autocast("cuda", dtype=dtype):
                loss = model(x)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        """
        import torch

        def train(model, x, optimizer, dtype=torch.bfloat16):
            scaler = torch.amp.GradScaler("cuda")
            with torch.autocast("cuda", dtype=dtype):
                loss = model(x)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        """
        import torch

        def train(model, x, optimizer, fp16):
            scaler = torch.amp.GradScaler("cuda", enabled=fp16)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        # What trains is not in sight.
        """
        import torch
        from mine import train

        scaler = torch.amp.GradScaler("cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            print(evaluate())
        train(scaler)
        """,
    ],
)
def test_programs(code: str) -> None:
    check_marked(code, RULE)


def test_a_file_that_asks_for_the_growth_factor_gets_an_unsafe_fix() -> None:
    code = """import torch

scaler = torch.amp.GradScaler("cuda")
with torch.autocast("cuda", dtype=torch.bfloat16):
    loss = model(x)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
"""
    safe, unsafe = ([finding.fix for finding in RULE.check(parse_module(text))] for text in (code, code + "scaler.get_growth_factor()\n"))
    assert [fix.safety for fix in safe if fix] == ["safe"]
    assert [fix.safety for fix in unsafe if fix] == ["unsafe"]


def test_the_fix_sees_only_variables_of_the_place() -> None:
    code = """
    import torch

    def make():
        return torch.amp.GradScaler("cuda", init_scale=8.0)

    def train(model, x, optimizer):
        dtype = torch.bfloat16
        scaler = make()
        with torch.autocast("cuda", dtype=dtype):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """
    assert 'torch.amp.GradScaler("cuda", init_scale=8.0, enabled=False)' in fix_all(code, RULE)


def test_torch_does_as_the_rule_says() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", growth_interval=1)
    steps = 0
    while scaler.get_scale() < 1.7e38 and steps < 120:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.zeros(1, 2)).float().sum() * 1e-30
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        steps += 1
    assert steps == 111
