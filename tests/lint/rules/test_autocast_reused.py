"""Entries of one autocast object, inside itself and one after the other."""

from __future__ import annotations

from textwrap import dedent

import pytest
import torch

from halfstep.lint.rules.autocast_reused import AutocastReused
from tests.lint.judging import findings, fixed

RULES = [AutocastReused()]
REGION = "import torch\n\nhalf = torch.autocast('cuda')\n"


def lines(code: str) -> list[int]:
    return [line for line, _ in findings(dedent(code).lstrip(), RULES)]


def test_the_installed_torch_leaves_autocast_on() -> None:
    region = torch.autocast("cpu", dtype=torch.bfloat16)
    with region, region:
        pass
    try:
        assert torch.is_autocast_enabled("cpu")
    finally:
        torch.set_autocast_enabled("cpu", False)


def test_an_inner_entry_becomes_an_object_of_its_own() -> None:
    code = REGION + "with half:\n    with torch.no_grad(), half:\n        pass\n"
    assert fixed(code, RULES) == REGION + "with half:\n    with torch.no_grad(), torch.autocast('cuda'):\n        pass\n"
    code = REGION + "with half, half:\n    pass\n"
    assert fixed(code, RULES) == REGION + "with half, torch.autocast('cuda'):\n    pass\n"


def test_an_object_that_is_made_of_variables_is_not_copied() -> None:
    code = "import torch\n\ndef f(device):\n    half = torch.autocast(device)\n    with half:\n        with half:\n            pass\n"
    assert lines(code) == [6]
    assert fixed(code, RULES) == code


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("with half:\n    f()\n", 10),
        ("with half:\n    x = g(1)\n", 10),
        ("with half:\n    if flag:\n        x = [f() for _ in range(3)]\n", 11),
        ("with torch.no_grad():\n    with half:\n        f()\n", 11),
    ],
)
def test_calls_that_come_to_enter_the_object(code: str, line: int) -> None:
    assert lines(f"{REGION}def f():\n    with half:\n        pass\ndef g(x):\n    return f()\n{code}") == [line]


def test_an_object_that_may_be_a_null_context_counts() -> None:
    code = """
        from contextlib import nullcontext
        import torch

        ctx = nullcontext() if device == "cpu" else torch.autocast(device_type=device, dtype=dtype)

        def evaluate():
            with ctx:
                model(x)

        for step in range(10):
            with ctx:
                model(x)
                evaluate()
    """
    assert lines(code) == [13]


@pytest.mark.parametrize(
    "body",
    [
        "    return f(n - 1)\n",
        "    return [f(k) for k in range(n)]\n",
        "    return g(n)\n\ndef g(n):\n    return f(n)\n",
    ],
)
def test_decorated_functions_that_come_to_call_themselves(body: str) -> None:
    assert len(lines(f"import torch\n\n@torch.cuda.amp.autocast()\ndef f(n):\n{body}")) == 1


def test_a_decorated_method_that_calls_itself() -> None:
    code = """
        import torch

        class Tree(torch.nn.Module):
            @torch.autocast("cuda")
            def forward(self, x, depth):
                return self.forward(x, depth - 1) if depth else x
    """
    assert lines(code) == [6]


@pytest.mark.parametrize(
    "code",
    [
        "with half:\n    pass\nwith half:\n    pass\n",
        "for _ in range(3):\n    with half:\n        pass\n",
        "def f():\n    with half:\n        pass\nf()\nwith half:\n    pass\nf()\n",
        "with half:\n    def f():\n        with half:\n            pass\nf()\n",
        "other = torch.autocast('cuda')\nwith half:\n    with other:\n        pass\n",
        "off = torch.autocast('cuda', enabled=False)\nwith off:\n    with off:\n        pass\n",
        "with torch.autocast('cuda'):\n    with torch.autocast('cuda'):\n        pass\n",
        "with half:\n    half = torch.autocast('cuda')\n    with half:\n        pass\n",
        "def region():\n    return torch.autocast('cuda')\nwith region():\n    with region():\n        pass\n",
        "@half\ndef f(x):\n    return g(x)\ndef g(x):\n    return x\n",
        "class A(torch.nn.Module):\n    @torch.autocast('cuda')\n    def forward(self, x):\n        return super().forward(x)\n",
        "class A(torch.nn.Module):\n    @torch.autocast('cuda')\n    def forward(self, x):\n        return self.inner.forward(x)\n",
        "lock = Lock()\nwith lock:\n    with lock:\n        pass\n",
    ],
)
def test_objects_that_are_not_active_already(code: str) -> None:
    assert lines(REGION + code) == []
