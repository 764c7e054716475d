"""Loops that make scalers, for one optimizer and for many."""

from __future__ import annotations

from textwrap import dedent, indent

import pytest

from halfstep.lint.rules.scaler_created_in_loop import ScalerCreatedInLoop
from tests.lint.judging import findings, fixed

RULES = [ScalerCreatedInLoop()]
MAKE = "scaler = torch.amp.GradScaler('cuda')"
STEP = "scaler.scale(model(x)).backward()\nscaler.step(optimizer)\nscaler.update()"


def lines(code: str) -> list[int]:
    return [line for line, _ in findings(code, RULES)]


def nested(*headers: str, inner: str, head: str = "import torch\n\n") -> str:
    code = inner.rstrip("\n")
    for header in reversed(headers):
        code = f"{header}\n{indent(code, '    ')}"
    return f"{head}{code}\n"


@pytest.mark.parametrize("loop", ["for x in loader:", "for i, x in enumerate(loader):", "while True:", "for _ in range(epochs):"])
def test_a_scaler_for_each_iteration_moves_out(loop: str) -> None:
    code = nested(loop, inner=f"{MAKE}\n{STEP}")
    assert lines(code) == [4]
    assert fixed(code, RULES) == nested(inner=f"{MAKE}\n{loop}\n{indent(STEP, '    ')}")


def test_it_moves_out_of_all_loops_that_keep_the_optimizer() -> None:
    inner = nested("for epoch in range(9):", "for x in fold:", inner=f"{MAKE}\n{STEP}", head="")
    after = nested("for epoch in range(9):", "for x in fold:", inner=STEP, head="")
    code = nested("for fold in folds:", inner=f"optimizer = make()\n{inner}")
    assert fixed(code, RULES) == nested("for fold in folds:", inner=f"optimizer = make()\n{MAKE}\n{after}")


def test_its_comment_and_its_further_lines_go_along() -> None:
    make = "scaler = torch.amp.GradScaler(\n    'cuda',\n    init_scale=1024.0,\n)  # low"
    code = nested("for x in loader:", inner=f"{make}\n{STEP}")
    assert fixed(code, RULES) == nested(inner=f"{make}\nfor x in loader:\n{indent(STEP, '    ')}")


def test_one_behind_a_flag_is_told_and_left_to_a_person() -> None:
    code = nested("for x in loader:", "if args.amp:", inner=f"{MAKE}\n{STEP}")
    assert lines(code) == [5]
    assert fixed(code, RULES) == code


def test_an_attribute_and_an_old_class_count() -> None:
    code = """
        from torch.cuda.amp import GradScaler

        class Trainer:
            def train(self):
                for epoch in range(self.epochs):
                    self.scaler = GradScaler()
                    for x in self.loader:
                        self.scaler.scale(self.model(x)).backward()
                        self.scaler.step(self.optimizer)
                        self.scaler.update()
    """
    assert lines(dedent(code).lstrip()) == [6]


@pytest.mark.parametrize(
    "code",
    [
        f"for seed in seeds:\n    model, optimizer = build(seed)\n    {MAKE}\n    for x in loader:\n{indent(STEP, ' ' * 8)}",
        f"for model in models:\n    optimizer = make(model)\n    {MAKE}\n    for x in loader:\n{indent(STEP, ' ' * 8)}",
        f"for model in models:\n    net = Net()\n    {MAKE}\n    for x in loader:\n{indent(STEP, ' ' * 8)}",
        f"for optimizer in optimizers:\n    {MAKE}\n{indent(STEP, ' ' * 4)}",
        f"for x in loader:\n    if scaler is None:\n        {MAKE}\n{indent(STEP, ' ' * 4)}",
        f"for x in loader:\n    if step == 100:\n        {MAKE}\n{indent(STEP, ' ' * 4)}",
        f"for x in loader:\n    try:\n        pass\n    except RuntimeError:\n        {MAKE}\n{indent(STEP, ' ' * 4)}",
        f"for scale in scales:\n    scaler = torch.amp.GradScaler('cuda', init_scale=scale)\n    for x in loader:\n{indent(STEP, ' ' * 8)}",
        f"for k in range(3):\n    {MAKE}\n    scalers.append(scaler)",
        f"for k in range(3):\n    def run():\n        {MAKE}\n{indent(STEP, ' ' * 8)}",
        "for k in range(3):\n    scalers[k] = torch.amp.GradScaler('cuda')",
        f"for k in range(3):\n    {MAKE}\n    run(model, scaler)",
        f"{MAKE}\nfor x in loader:\n{indent(STEP, ' ' * 4)}",
        "for k in range(3):\n    scaler = StandardScaler()\n    scaler.step(optimizer)",
    ],
)
def test_other_loops_are_left_alone(code: str) -> None:
    assert lines(f"import torch\n\n{code}\n") == []


def test_a_method_that_makes_a_new_optimizer_counts() -> None:
    code = f"""
import torch

class Trainer:
    def setup(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1)

    def cross_validate(self):
        for fold in self.folds:
            self.setup()
            {MAKE}
            for x in fold:
                scaler.scale(self.model(x)).backward()
                scaler.step(self.optimizer)
                scaler.update()
"""
    assert lines(code) == []


RUNNER = """
import torch

class Runner:
    def __init__(self, model):
        self.model, self.optimizer = model, make(model)

    def renew(self):
        {renew}

    def begin(self):
        self.renew()

    def _train_epoch(self, loader, optimizer=None):
        scaler = torch.amp.GradScaler("cuda")
        for x in loader:
            with torch.autocast("cuda"):
                loss = self.model(x)
            scaler.scale(loss).backward()
            scaler.step({optimizer})
            scaler.update()

    def fit(self, loader, optimizer):
        for epoch in range(10):
            {call}
"""


@pytest.mark.parametrize(
    ("optimizer", "call", "renew", "fires"),
    [
        ("self.optimizer", "self._train_epoch(loader)", "pass", True),
        ("self.optimizer", "loss = self._train_epoch(loader)", "pass", True),
        ("optimizer", "self._train_epoch(loader, optimizer)", "pass", True),
        ("self.optimizer", "self.begin(); self._train_epoch(loader)", "pass", True),
        ("self.optimizer", "self.begin(); self._train_epoch(loader)", "self.optimizer = make(self.model)", False),
        ("self.optimizer", "self.optimizer = make(epoch); self._train_epoch(loader)", "pass", False),
        ("self.optimizer", "Runner(epoch)._train_epoch(loader)", "pass", False),
        ("self.optimizer", "runner = Runner(epoch); runner._train_epoch(loader)", "pass", False),
        ("self.optimizer", "self.reset(); self._train_epoch(loader)", "pass", False),
        ("self.optimizer", "self.log(); self._train_epoch(loader)", "pass", True),
        ("optimizer", "optimizer = make(epoch); self._train_epoch(loader, optimizer)", "pass", False),
        ("optimizer", "runner = Runner(epoch); runner._train_epoch(loader, optimizer)", "pass", False),
        ("self.other.optimizer", "self._train_epoch(loader)", "self.other = make(1)", True),
    ],
)
def test_a_method_that_is_called_for_each_epoch(optimizer: str, call: str, renew: str, *, fires: bool) -> None:
    assert lines(RUNNER.format(optimizer=optimizer, call=call, renew=renew)) == ([15] if fires else [])


@pytest.mark.parametrize(
    ("code", "fires"),
    [
        ("for e in range(3):\n    held.s = torch.amp.GradScaler('cuda')\n    epoch(model, optimizer, held)", True),
        ("for e in range(3):\n    held.s = torch.amp.GradScaler('cuda')\n    epoch(model, held)", False),
        (
            "for e in range(3):\n    held = make()\n    held.s = torch.amp.GradScaler('cuda')\n    epoch(optimizer, held)",
            False,
        ),
        ("for optimizer in every:\n    held.s = torch.amp.GradScaler('cuda')\n    epoch(model, optimizer, held)", False),
    ],
)
def test_a_scaler_that_is_put_into_an_object(code: str, *, fires: bool) -> None:
    assert lines(f"import torch\n\n{code}\n") == ([4] if fires else [])


@pytest.mark.parametrize(("epochs", "found"), [("", [5]), ("for epoch in range(9):", [])])
def test_a_function_with_epochs_of_its_own_is_a_run(epochs: str, found: list[int]) -> None:
    inner = nested(*([epochs] if epochs else []), "for x in loader:", inner=STEP, head="")
    call = nested("for stage in range(3):", inner="run(model, optimizer, loader)", head="")
    assert lines(f"import torch\n\n\ndef run(model, optimizer, loader):\n{indent(MAKE + chr(10) + inner, '    ')}\n{call}") == found
