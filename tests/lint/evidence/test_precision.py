"""Which values are shown to be half precision."""

from __future__ import annotations

import ast

import pytest

from halfstep.lint.evidence.precision import Evidence, gather
from halfstep.lint.module import Module, parse_module

PROGRAM = """
import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn


class Net(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.gain = nn.Parameter(torch.ones(dim))
        self.scale = dim ** -0.5
        self.body = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.normed = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.other = Other()

    def forward(self, x, y):
        h = self.fc(x)
        n, d = h.shape
        probe = {}
        return probe


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x).relu()


def double(x):
    return 2 * x


def main(x, y):
    net = Net(4)
    with torch.autocast("{}", dtype=torch.float16):
        return net(x, y)
"""


def kind(expression: str, device: str = "cuda") -> str:
    """What an expression is shown to be in a forward pass that runs in a float16 region."""
    module = parse_module(PROGRAM.replace("probe = {}", f"probe = {expression}").replace('"{}"', f'"{device}"'))
    (statement,) = [node for node in module.nodes(ast.Assign) if module.source(node).startswith("probe = ")]
    evidence = Evidence(module)
    kinds = [evidence.precision(statement.value, frame).kind for frame in evidence.ways(statement.value)]
    _standalone, called = kinds
    return called


@pytest.mark.parametrize(
    "expression",
    [
        "h",
        "h * 2",
        "h / math.sqrt(d)",
        "h * self.scale",
        "h * h.mean()",
        "-h",
        "h[0, 1:]",
        "h.view(n, d).transpose(0, 1).contiguous()",
        "h.relu().tanh()",
        "F.gelu(h)",
        "torch.sigmoid(h)",
        "h @ y",
        "x @ y",
        "x.float() @ y.float()",
        "torch.matmul(x, y)",
        "torch.einsum('ij,jk->ik', x, y)",
        "F.linear(x, y)",
        "F.scaled_dot_product_attention(x, x, x)",
        "torch.cat([h, h])",
        "torch.where(y > 0, h, 0.0)",
        "x.to(h.dtype)",
        "x.type_as(h) if 0 else x.half()",
        "y.half()",
        "y.to(torch.float16)",
        "y.to(dtype=torch.half)",
        "torch.zeros(2, dtype=torch.float16)",
        "torch.zeros_like(h)",
        "h.new_ones(3)",
        "h.max(-1)[0]",
        "h.to('cuda')",
        "h.cuda()",
        "double(h)",
        "self.body(x)",
        "self.other(x)",
        "(lambda v: v * 2)(h)",
        "rearrange(h, 'a b -> b a')",
        "(z := h)",
        "h if n else h * 2",
        "h * (y > 0)",
        "torch.clamp(h, 0)",
        "h.masked_fill(y > 0, 0.0)",
        "torch.softmax(h, -1).half()",
    ],
)
def test_half(expression: str) -> None:
    expected = "unknown" if "type_as" in expression else "half"
    assert kind(expression) == expected


@pytest.mark.parametrize(
    "expression",
    [
        "h.float()",
        "h.to(torch.float32)",
        "h.bfloat16()",
        "h.softmax(-1)",
        "torch.softmax(h, dim=-1)",
        "h.sum()",
        "h.pow(2)",
        "h ** 2",
        "1 / h",
        "h.exp()",
        "self.norm(h)",
        "self.normed(x)",
        "h * self.gain",
        "h + torch.zeros(2)",
        "torch.softmax(h, -1, dtype=torch.float32)",
        "F.layer_norm(h, (4,))",
        "F.mse_loss(h, h)",
        "F.cross_entropy(h, y)",
        "F.normalize(h)",
    ],
)
def test_wide(expression: str) -> None:
    assert kind(expression) == "wide"


@pytest.mark.parametrize(
    "expression", ["h.softmax(-1)", "h.sum()", "h ** 2", "1 / h", "h.exp()", "self.norm(h)", "self.normed(x)", "F.normalize(h)"]
)
def test_what_the_cpu_leaves_in_half(expression: str) -> None:
    assert kind(expression, "cpu") == "half"


@pytest.mark.parametrize(
    "expression", ["x", "y", "h * y", "x.relu()", "self.unknown(h)", "y(h)", "torch.unknown(h)", "h if n else y", "x.to(y)"]
)
def test_unknown(expression: str) -> None:
    assert kind(expression) == "unknown"


@pytest.mark.parametrize("expression", ["1.0", "n", "h.size(0)", "h.shape[1]", "math.pi", "h.argmax()", "h > 0", "len(h)", "self.scale"])
def test_numbers(expression: str) -> None:
    assert kind(expression) == "number"


def test_a_region_counts_only_where_the_function_is_called() -> None:
    module = parse_module(PROGRAM.replace("probe = {}", "probe = h").replace('"{}"', '"cuda"').replace("return net(x, y)", "return net"))
    (statement,) = [node for node in module.nodes(ast.Assign) if module.source(node) == "probe = h"]
    assert gather(module).half(statement.value) == ""


def last(text: str) -> tuple[Module, ast.expr]:
    """The value of the last expression statement of a text."""
    module = parse_module(text)
    return module, module.nodes(ast.Expr)[-1].value


@pytest.mark.parametrize(
    ("body", "half"),
    [
        ("y = a.half()\ny", True),
        ("y = a.half()\nif c:\n    y = y.float()\ny", False),
        ("y = a.half()\nif c:\n    y = y * 2\ny", True),
        ("if c:\n    y = a.half()\nelse:\n    y = a\ny", False),
        ("if c:\n    y = a.half()\nelse:\n    y = a.to(torch.float16)\ny", True),
        ("y = a\nif c:\n    y = a.half()\n    y", True),
        ("y = a.half()\ny = y.float()\ny", False),
        ("y = a.float()\ny = y.half()\ny", True),
        ("y = a.half()\ny += b\ny", True),
        ("y = a.half()\nfor i in b:\n    y = y + 1\ny", True),
        ("q, k = a.half(), b.half()\nq", True),
        ("q, k = a.half().chunk(2)\nk", True),
        ("q, k = map(lambda t: t.view(2), a.half().chunk(2))\nk", True),
        ("v, i = a.half().max(-1)\nv", True),
        ("v, i = a.half().max(-1)\ni", False),
        ("for t in (a.half(), b.half()):\n    t", True),
        ("for t in (a, b):\n    t", False),
        ("with torch.autocast('cuda', enabled=False):\n    y = a.half() * 2\ny", True),
        ("with torch.autocast('cpu', dtype=torch.float16):\n    y = a @ b\ny + 1", True),
        ("y = (a @ b) if c else (b @ a)\ny", False),
        ("dtype = torch.float16\ny = a.to(dtype)\ny", True),
        ("try:\n    y = a.half()\nexcept ValueError:\n    y = a\ny", False),
    ],
)
def test_the_last_assignment_counts(body: str, *, half: bool) -> None:
    module, node = last("import torch\n\ndef f(a, b, c):\n" + "".join(f"    {line}\n" for line in body.splitlines()))
    assert bool(gather(module).half(node)) == half


def test_recursion_ends() -> None:
    module, node = last(
        """
import torch

def f(x, n):
    return f(g(x), n - 1) if n else x.half()

def g(x):
    return f(x, 0)

f(torch.ones(2), 3)
"""
    )
    assert gather(module).half(node) == ""


def test_a_long_chain_ends() -> None:
    text = "import torch\nx0 = torch.ones(1).half()\n" + "".join(f"x{i + 1} = x{i} * 2\n" for i in range(500)) + "x500\n"
    module, node = last(text)
    assert gather(module).half(node) == ""


def test_a_half_model_is_half_in_its_parts() -> None:
    module, node = last(
        """
import torch
from torch import nn

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x):
        y = self.fc(x)
        y

class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([Inner()])

    def forward(self, x):
        for each in self.inner:
            x = each(x)
        return x

model = Outer().cuda().half()
"""
    )
    inner = [statement for statement in module.nodes(ast.Expr) if isinstance(statement.value, ast.Name)]
    assert "float16 weights (line 24)" in gather(module).half(inner[0].value)
    assert node is not inner[0].value
