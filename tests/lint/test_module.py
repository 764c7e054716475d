"""What a module tells the rules: names, values, constants, regions."""

from __future__ import annotations

import ast
import textwrap

import pytest

from halfstep.lint.module import Module, parse_module
from halfstep.lint.rules import RULES
from halfstep.lint.values import UNKNOWN, Autocast, Network, Optimizer, Routine, Scaler, Scheduler


def _module(text: str) -> Module:
    return parse_module(textwrap.dedent(text))


def _marked(text: str) -> tuple[Module, ast.expr]:
    """The module, and the argument of the call of MARK() in it."""
    module = _module(text)
    for call in module.nodes(ast.Call):
        if isinstance(call.func, ast.Name) and call.func.id == "MARK":
            return module, call.args[0]
    raise AssertionError("no MARK()")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import torch\nMARK(torch.cuda.amp.autocast)", ("torch.cuda.amp.autocast",)),
        ("import torch.cuda.amp as amp\nMARK(amp.GradScaler)", ("torch.cuda.amp.GradScaler",)),
        ("from torch.cuda import amp\nMARK(amp.GradScaler)", ("torch.cuda.amp.GradScaler",)),
        ("from torch.cuda.amp import GradScaler as GS\nMARK(GS)", ("torch.cuda.amp.GradScaler",)),
        ("import torch.nn.functional as F\nMARK(F.relu)", ("torch.nn.functional.relu",)),
        ("import torch\namp = torch.cuda.amp\nMARK(amp.autocast)", ("torch.cuda.amp.autocast",)),
        ("import torch\nnames = torch, 1\nMARK(names.autocast)", ()),
        ("from torch.cuda.amp import *\nMARK(GradScaler)", ("torch.cuda.amp.GradScaler",)),
        ("MARK(float)", ("builtins.float",)),
        ("from . import amp\nMARK(amp.autocast)", (".amp.autocast",)),
        ("from .here import amp\nMARK(amp.autocast)", (".here.amp.autocast",)),
        ("import torch\ndef f(torch):\n    MARK(torch.autocast)", ()),
        ("def f():\n    import torch\n    MARK(torch.autocast)", ("torch.autocast",)),
        ("def f():\n    import torch\nMARK(torch.autocast)", ()),
        ("import torch\nclass A:\n    torch = 1\n    def f(self):\n        MARK(torch.autocast)", ("torch.autocast",)),
        (
            "try:\n    from torch.amp import GradScaler\nexcept ImportError:\n    from torch.cuda.amp import GradScaler\nMARK(GradScaler)",
            ("torch.amp.GradScaler", "torch.cuda.amp.GradScaler"),
        ),
        (
            "import torch\nclass A:\n def __init__(self):\n  self.amp = torch.amp\n def f(self):\n  MARK(self.amp.autocast)",
            ("torch.amp.autocast",),
        ),
        ("a = b\nb = a\nMARK(a)", ()),
        ("x = x.y\nMARK(x)", ()),
    ],
)
def test_names(text: str, names: tuple[str, ...]) -> None:
    module, node = _marked(text)
    assert module.names(node) == names


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("MARK(1e-8)", 1e-8),
        ("MARK(-1e9)", -1e9),
        ("MARK(2.0**16)", 65536.0),
        ("MARK(float('-inf'))", float("-inf")),
        ("EPS = 1e-8\ndef f():\n    MARK(EPS)", 1e-8),
        ("class A:\n    eps = 1e-6\n    def f(self):\n        MARK(self.eps)", 1e-6),
        ("x = 1\nx = 2\nMARK(x)", UNKNOWN),
        ("x = 1\nx += 1\nMARK(x)", UNKNOWN),
        ("for x in (1, 2):\n    MARK(x)", UNKNOWN),
        ("MARK(10.0**1000)", UNKNOWN),
        ("MARK(2**100000000)", UNKNOWN),
        ("MARK(1 / 0)", UNKNOWN),
        ("MARK(f())", UNKNOWN),
        ("MARK(float('x'))", UNKNOWN),
        ("x = y\ny = x\nMARK(x)", UNKNOWN),
        ("def f(n):\n    return 1\nm = m - 1\nMARK(m)", UNKNOWN),
        ("x = 2\ny = x * 3\nMARK(y)", 6),
        ("MARK(None)", None),
    ],
)
def test_constants(text: str, value: object) -> None:
    module, node = _marked(text)
    found = module.constant(node)
    assert found is value if value is UNKNOWN or value is None else found == value


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("s = torch.amp.GradScaler()\nMARK(s)", (Scaler,)),
        ("s = None\nif amp:\n    s = torch.amp.GradScaler()\nMARK(s)", (Scaler,)),
        ("s = torch.amp.GradScaler() if amp else None\nMARK(s)", (Scaler,)),
        ("def make():\n    return torch.amp.GradScaler()\nMARK(make())", (Scaler,)),
        ("def make():\n    return 1, torch.amp.GradScaler()\na, b = make()\nMARK(b)", (Scaler,)),
        ("a, b = 1, torch.amp.GradScaler()\nMARK(b)", (Scaler,)),
        ("(a, (b, c)) = (1, (2, torch.amp.GradScaler()))\nMARK(c)", (Scaler,)),
        ("a, *b = 1, 2, torch.amp.GradScaler()\nMARK(b)", ()),
        ("def f(s):\n    MARK(s)\nf(torch.amp.GradScaler())", (Scaler,)),
        ("def f(*, s=None):\n    MARK(s)\nf(s=torch.amp.GradScaler())", (Scaler,)),
        (
            "class A:\n    def __init__(self, s):\n        self.s = s\n    def f(self):\n        MARK(self.s)\nA(torch.amp.GradScaler())",
            (Scaler,),
        ),
        (
            "class A:\n def __init__(self):\n  self.s = torch.amp.GradScaler()\nclass B(A):\n def f(self):\n  MARK(self.s)",
            (Scaler,),
        ),
        ("class S(torch.amp.GradScaler):\n    pass\nMARK(S())", (Scaler,)),
        ("def f(s: torch.amp.GradScaler | None):\n    MARK(s)", (Scaler,)),
        ("def f(s, o):\n    s.unscale_(o)\n    MARK(s)", (Scaler,)),
        ("def f(scaler, x):\n    scaler.fit(x)\n    MARK(scaler)", ()),
        ("with torch.autocast('cuda') as c:\n    MARK(c)", (Autocast,)),
        ("import functools\nac = functools.partial(torch.autocast, 'cuda')\nMARK(ac())", (Autocast,)),
        (
            "import contextlib\n@contextlib.contextmanager\ndef ac():\n    with torch.autocast('cuda'):\n        yield\nMARK(ac())",
            (Autocast,),
        ),
        ("n = torch.nn.Linear(1, 1).cuda().half()\nMARK(n)", (Network,)),
        ("class N(torch.nn.Module):\n    pass\nMARK(torch.compile(N().to('cuda')))", (Network,)),
        ("n = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))\nMARK(n)", (Network,)),
        ("MARK(torch.optim.AdamW(p, lr=1))", (Optimizer,)),
        ("MARK(torch.optim.lr_scheduler.OneCycleLR(o, 1))", (Scheduler,)),
        ("for o in (torch.optim.SGD(p, 1), torch.optim.Adam(p)):\n    MARK(o)", (Optimizer, Optimizer)),
        ("def f():\n    return f()\nMARK(f())", ()),
        ("def f(x):\n    MARK(x)\n    f(x)\nf(torch.amp.GradScaler())", (Scaler,)),
        ("MARK(lambda: 1)", (Routine,)),
    ],
)
def test_values(text: str, kinds: tuple[type, ...]) -> None:
    module, node = _marked("import torch\n" + text)
    assert tuple(type(value) for value in module.values(node)) == kinds


def test_the_same_variable_is_the_same_scaler() -> None:
    module = _module("""
        def f(scaler, loss, optimizer):
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            g(scaler)
        def g(scaler):
            scaler.update()
        def h(scaler, o):
            scaler.unscale_(o)
    """)
    found = {module.function(node): set[int]() for node in module.nodes(ast.Name)}
    for node in module.nodes(ast.Name):
        found[module.function(node)] |= {id(value) for value in module.values(node) if isinstance(value, Scaler)}
    f, g, h = (found[function] for function in module.nodes(ast.FunctionDef))
    assert len(f) == len(h) == 1
    assert f == g != h


@pytest.mark.parametrize(
    ("made", "dtypes", "shown", "device"),
    [
        ("torch.autocast('cuda')", {"fp16"}, {"fp16"}, "cuda"),
        ("torch.autocast('cpu')", {"bf16"}, {"bf16"}, "cpu"),
        ("torch.autocast('cuda', torch.bfloat16)", {"bf16"}, {"bf16"}, "cuda"),
        ("torch.autocast(device_type='cuda:0', dtype=None)", {"fp16"}, {"fp16"}, "cuda"),
        ("torch.cuda.amp.autocast(True, torch.half)", {"fp16"}, {"fp16"}, "cuda"),
        ("torch.cpu.amp.autocast()", {"bf16"}, {"bf16"}, "cpu"),
        ("torch.autocast(device.type)", set(), set(), None),
        ("torch.autocast('cuda', **options)", set(), set(), "cuda"),
        ("torch.autocast('cuda', dtype=torch.bfloat16 if new else torch.float16)", {"bf16", "fp16"}, {"bf16", "fp16"}, "cuda"),
        ("torch.autocast('cuda', dtype=args.dtype)", set(), set(), "cuda"),
        ("torch.autocast('cuda', dtype={'a': torch.float16, 'b': torch.bfloat16}[name])", {"bf16", "fp16"}, {"bf16", "fp16"}, "cuda"),
        ("torch.autocast('cuda', dtype=torch.float16 if x else args.dtype)", set(), {"fp16"}, "cuda"),
    ],
)
def test_regions(made: str, dtypes: set[str], shown: set[str], device: str | None) -> None:
    (region,) = _module(f"import torch\nx = {made}").regions
    assert (set(region.dtypes), set(region.shown), region.device) == (dtypes, shown, device)


@pytest.mark.parametrize(
    ("arguments", "enabled"),
    [
        ("", True),
        ("enabled=True", True),
        ("enabled=False", False),
        ("enabled=amp", None),
        ("**options", None),
        ("'cuda', 1, 2, 3, 4, False", False),
    ],
)
def test_whether_a_scaler_is_on(arguments: str, enabled: bool | None) -> None:
    (scaler,) = _module(f"import torch\nx = torch.amp.GradScaler({arguments})").scalers
    assert scaler.enabled is enabled


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("with torch.autocast('cuda'):\n    MARK(x)", True),
        ("with open(f), torch.autocast('cuda'):\n    MARK(x)", True),
        ("with torch.autocast('cuda'), MARK(x):\n    pass", True),
        ("with MARK(x), torch.autocast('cuda'):\n    pass", False),
        ("with torch.autocast('cuda'):\n    pass\nMARK(x)", False),
        ("with torch.autocast('cuda'):\n    def f():\n        MARK(x)", False),
        ("with torch.autocast('cuda'):\n    f(lambda: MARK(x))", False),
        ("with torch.autocast('cuda'):\n    with torch.autocast('cuda', enabled=False):\n        MARK(x)", False),
        ("@torch.autocast('cuda')\ndef f():\n    MARK(x)", True),
        ("@torch.autocast('cuda')\ndef f(x=MARK(x)):\n    pass", False),
        ("c = torch.autocast('cuda') if amp else nothing\nwith c:\n    MARK(x)", True),
    ],
)
def test_in_autocast(text: str, inside: bool) -> None:
    module, node = _marked("import torch\n" + text)
    assert (module.in_autocast(node) is not None) is inside


@pytest.mark.parametrize("text", ["x = 'é' + f(1,\n  2)", "x = 'é' + f(1,\r\n  2)", "\f\nx = '\x0b\u2028é' + f(1,\n  2)"])
def test_source_is_what_is_written(text: str) -> None:
    module = parse_module(text)
    (call,) = module.nodes(ast.Call)
    newline = "\r\n" if "\r" in text else "\n"
    assert module.source(call) == f"f(1,{newline}  2)"


def test_loops_and_owners() -> None:
    module, node = _marked("""
        class A:
            def f(self, xs):
                for x in g(xs):
                    while h(x):
                        MARK(x)
                else:
                    k()
    """)
    assert [type(loop) for loop in module.loops(node)] == [ast.For, ast.While]
    calls = {call.func.id: call for call in module.nodes(ast.Call) if isinstance(call.func, ast.Name)}
    assert [len(module.loops(calls[name])) for name in ("g", "h", "k")] == [0, 2, 0]
    assert {owner.name for call in calls.values() if (owner := module.owner(call)) is not None} == {"A"}


def test_a_deep_file_is_no_crash() -> None:
    text = "x = " + "-" * 300 + "1\n" + "y = " + " + ".join("1" for _ in range(900)) + "\nz = a" + ".b()" * 300
    module = parse_module(text)
    assert len(module.scalers) == 0
    assert len(module.traces) == 0


@pytest.mark.parametrize("term", ["1 + ", "'a' + ", "a.b + ", "f(a) + "])
def test_long_chains_are_unknown_and_no_crash(term: str) -> None:
    text = f"import torch\nEPS = {term * 600}1\nwith torch.autocast('cuda'):\n    x = y / EPS\n    masked = x.masked_fill(m, EPS)\n"
    module = parse_module(text)
    assert module.constant(module.nodes(ast.BinOp)[0]) is UNKNOWN
    for rule in RULES:
        assert list(rule.check(module)) == []


def test_long_chains_of_attributes_are_no_crash() -> None:
    module = parse_module(
        "import torch\ntorch.autocast('cuda')\nx = a" + ".b" * 900 + "()\ny = x if x else " * 1 + "z if z else " * 90 + "1\n"
    )
    for rule in RULES:
        assert list(rule.check(module)) == []
