"""Training in float16 with and without something that scales the loss."""

from __future__ import annotations

import pytest

from halfstep.lint.rules.fp16_without_scaler import Fp16WithoutScaler
from tests.lint.marking import check_marked, fix_all

RULE = Fp16WithoutScaler()

LOOP = """
import torch
{imports}

def train(model, loader, optimizer, criterion, args, device{parameters}):
    for x, y in loader:
        optimizer.zero_grad()
        with {region}:
            loss = criterion(model(x), y)
        {backward}
        optimizer.step()
"""


def loop(region: str, backward: str = "loss.backward()", imports: str = "", parameters: str = "", *, fires: bool = True) -> str:
    """A loop, marked at its region."""
    code = LOOP.format(region=region, backward=backward, imports=imports, parameters=parameters)
    return code.replace(f"with {region}:", f"with {region}:  # <-") if fires else code


@pytest.mark.parametrize(
    "region",
    [
        'torch.autocast("cuda")',
        "torch.cuda.amp.autocast()",
        'torch.amp.autocast("cuda", torch.float16)',
        "torch.autocast(device_type=device, dtype=torch.float16)",
        'torch.autocast("cuda", enabled=args.amp)',
        'torch.autocast("cpu", dtype=torch.half)',
        'torch.autocast("cuda", dtype=torch.bfloat16 if args.bf16 else torch.float16)',
    ],
)
def test_regions_that_are_float16(region: str) -> None:
    check_marked(loop(region), RULE)


@pytest.mark.parametrize(
    "region",
    [
        'torch.autocast("cpu")',
        'torch.autocast("cuda", dtype=torch.bfloat16)',
        'torch.autocast("cuda", dtype=args.dtype)',
        "torch.autocast(device)",
        "torch.autocast(device_type=device, dtype=args.dtype)",
        'torch.autocast("cuda", enabled=False)',
        'torch.autocast("cuda", dtype=torch.float32)',
        "torch.autocast(**args.autocast)",
    ],
)
def test_regions_that_are_not(region: str) -> None:
    check_marked(loop(region, fires=False), RULE)


@pytest.mark.parametrize(
    ("backward", "fires"),
    [
        ("(loss / args.accumulation).backward()", True),
        ("loss = loss * 0.5; loss.backward(retain_graph=True)", True),
        ("total = loss + args.decay; total.backward()", True),
        ("(loss * args.scale).backward()", False),
        ("loss = loss * 1024.0; loss.backward()", False),
        ("args.scaler.scale(loss).backward()", False),
        ("args.accelerator.backward(loss)", False),
        ("args.engine.backward(loss)", False),
        ("y.backward()", False),
    ],
)
def test_backward_passes(backward: str, *, fires: bool) -> None:
    check_marked(loop('torch.autocast("cuda")', backward, fires=fires), RULE)


@pytest.mark.parametrize(
    ("imports", "parameters"),
    [
        ("from accelerate import Accelerator", ""),
        ("import lightning as L", ""),
        ("from apex import amp", ""),
        ("", ", fabric=None"),
        ("", ", loss_scaler=None"),
        ("from mine import scaler", ""),
    ],
)
def test_what_may_scale_the_loss(imports: str, parameters: str) -> None:
    check_marked(loop('torch.autocast("cuda")', imports=imports, parameters=parameters, fires=False), RULE)


@pytest.mark.parametrize(
    "code",
    [
        # A scaler of another function is not meant; one of the caller may be.
        """
        import torch

        def right(model, x, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            with torch.autocast("cuda"):
                loss = model(x).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        def wrong(model, x, optimizer):
            with torch.autocast("cuda"):  # <-
                loss = model(x).mean()
            loss.backward()
            optimizer.step()
        """,
        """
        import torch

        class Trainer:
            def __init__(self):
                self.scaler = torch.amp.GradScaler("cuda")

            def step(self, model, x, optimizer):
                with torch.autocast("cuda"):
                    loss = model(x).mean()
                self.run(loss)
                loss.backward()
                optimizer.step()
        """,
        """
        import torch

        def step(model, x, optimizer):
            with torch.autocast("cuda"):
                loss = model(x).mean()
            loss.backward()
            optimizer.step()

        def train(model, loader, optimizer, scaler):
            for x in loader:
                step(model, x, optimizer)
        """,
        # Whether all fits into memory is not training.
        """
        import torch

        def find_batch_size(model, sizes):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for size in sizes:
                try:
                    with torch.autocast("cuda"):
                        loss = model(torch.zeros(size, 3)).mean()
                    loss.backward()
                except RuntimeError:
                    return size // 2
        """,
        """
        import torch

        def profile(model, x, optimizer):
            with torch.autocast("cuda"):
                out = model(x)
            out.sum().backward()
        """,
        # An attack needs the gradient of its input.
        """
        import torch

        def attack(model, x, y, criterion):
            x.requires_grad_()
            with torch.autocast("cuda"):
                loss = criterion(model(x), y)
            loss.backward()
            return x + 0.1 * x.grad.sign()
        """,
        """
        import torch

        def train(model, teacher, loader, optimizer, criterion):
            for x in loader:
                with torch.inference_mode():
                    with torch.autocast("cuda"):
                        target = teacher(x)
                loss = criterion(model(x), target)
                loss.backward()
                optimizer.step()
        """,
        """
        import torch
        from lightning import LightningModule

        class Model(LightningModule):
            def training_step(self, batch):
                optimizer = self.optimizers()
                with torch.autocast("cuda"):
                    loss = self.net(batch).mean()
                loss.backward()
                optimizer.step()
        """,
        # The type and the scale of one run belong together.
        """
        import torch

        def zeros(model, x, dtype, scale):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):  # <-
                loss = model(x).mean()
            (loss * scale).backward()
            return [(p.grad == 0).sum() for p in model.parameters()]

        for dtype, scale in ((None, 1.0), (torch.float16, 1.0), (torch.float16, 2.0**16)):
            print(zeros(torch.nn.Linear(2, 2), torch.ones(2), dtype, scale))
        """,
        """
        import torch

        def zeros(model, x, dtype, scale):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = model(x).mean()
            (loss * scale).backward()
            return [(p.grad == 0).sum() for p in model.parameters()]

        for dtype, scale in ((None, 1.0), (torch.bfloat16, 1.0), (torch.float16, 2.0**16)):
            print(zeros(torch.nn.Linear(2, 2), torch.ones(2), dtype, scale))
        """,
        # nanoGPT: the type is chosen from a table, and the scaler by it.
        """
        import torch
        from contextlib import nullcontext

        dtype = "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
        ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
        ctx = nullcontext() if device_type == "cpu" else torch.amp.autocast(device_type=device_type, dtype=ptdtype)
        scaler = torch.amp.GradScaler("cuda", enabled=(dtype == "float16"))
        while True:
            with ctx:
                logits, loss = model(x, y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
    ],
)
def test_programs(code: str) -> None:
    check_marked(code, RULE)


def test_the_fix_makes_a_scaler_before_the_loops() -> None:
    code = """
    import torch

    def main(model, loader, criterion):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(3):
            for i, (x, y) in enumerate(loader):
                with torch.autocast("cuda"):
                    loss = criterion(model(x), y) / 4
                loss.backward()  # accumulates
                if i % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
    """
    changed = fix_all(code, RULE)
    assert '    scaler = torch.amp.GradScaler("cuda")\n    for epoch in range(3):\n' in changed
    assert "scaler.scale(loss).backward()  # accumulates\n" in changed
    assert "            scaler.step(optimizer)\n                scaler.update()\n                optimizer.zero_grad()" in changed


NAMESAKE = """
import torch
from sklearn.preprocessing import StandardScaler

scaler = StandardScaler()

def train(model, loader, features, optimizer):
    features = scaler.fit_transform(features)
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):  # <-
            loss = model(x)
        loss.backward()
        optimizer.step()
"""


def test_what_scales_features_scales_no_loss() -> None:
    check_marked(NAMESAKE, RULE)
    assert fix_all(NAMESAKE, RULE).split() == NAMESAKE.split()


@pytest.mark.parametrize(
    "more",
    [
        "def log(scaler):\n    return scaler",
        "scaler = make()",
        "from apex import amp",
        "state = model.scaler",
        "class Loss:\n    def __init__(self):\n        self.scaler = make()",
    ],
)
def test_a_word_that_may_mean_two_things_is_left_alone(more: str) -> None:
    check_marked(f"{NAMESAKE.replace('  # <-', '')}\n{more}\n", RULE)


IDLE = """
import torch
from torch.amp import GradScaler

def train(model, loader, optimizer):
    {made}
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):{mark}
            loss = model(x)
        loss.backward()
        optimizer.step()
    {after}
"""


@pytest.mark.parametrize(
    ("made", "after", "fires"),
    [
        ("scaler = GradScaler('cuda')", "", True),
        ("scaler = torch.amp.GradScaler('cuda')", "", True),
        ("loss_scaler = GradScaler('cuda')", "", True),
        ("scaler = GradScaler('cuda')", "return scaler", False),
        ("scaler = GradScaler('cuda')", "optimizer.attach(scaler)", False),
        ("model.scaler = GradScaler('cuda')", "", False),
        ("optimizer = wrap(optimizer, GradScaler('cuda'))", "", False),
        ("scaler = GradScaler('cuda')", "optimizer = wrap(optimizer, GradScaler('cuda'))", False),
    ],
)
def test_a_scaler_that_nobody_uses_scales_nothing(made: str, after: str, *, fires: bool) -> None:
    code = IDLE.format(made=made, after=after, mark="  # <-" if fires else "")
    check_marked(code, RULE)
    assert fix_all(code, RULE).split() == code.split()
