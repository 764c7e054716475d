"""Edits of expressions, arguments and imports in awkward layouts."""

from __future__ import annotations

import pytest

from tests.lint.fixes import (
    Fix,
    argument,
    exchanged,
    imported,
    no_argument,
    not_imported,
    replaced,
    text_after,
    together,
)


@pytest.mark.parametrize(
    ("text", "fix", "expected"),
    [
        ("x = a * 2\n", exchanged("a", "b + c"), "x = (b + c) * 2\n"),
        ("x = a + 2\n", exchanged("a", "b + c"), "x = b + c + 2\n"),
        ("x = 2 - a\n", exchanged("a", "b + c"), "x = 2 - (b + c)\n"),
        ("x = (a)\n", exchanged("a", "b + c"), "x = (b + c)\n"),
        ("x = a.b\n", exchanged("a", "-1"), "x = (-1).b\n"),
        ("x = a.b\n", exchanged("a", "1"), "x = (1).b\n"),
        ("x = f(a)\n", exchanged("a", "b, c"), "x = f((b, c))\n"),
        ("x = f(a for a in b)\n", exchanged("b", "c if d else e"), "x = f(a for a in (c if d else e))\n"),
        ("x = f(a for a in b)\n", exchanged("(a for a in b)", "c"), "x = f(c)\n"),
        ("x = (a, b)\n", exchanged("(a, b)", "c"), "x = c\n"),
        ("x = ((a, b))\n", exchanged("(a, b)", "c"), "x = (c)\n"),
        ("return_ = a, b\n", exchanged("(a, b)", "c"), "return_ = c\n"),
        ("if(a)and'b': pass\n", exchanged("'b'", "c"), "if(a)and(c): pass\n"),
        ("if (y := a) and b: pass\n", exchanged("a", "c, d"), "if (y := (c, d)) and b: pass\n"),
        ("with a as b, (c): pass\n", exchanged("a", "d(1)"), "with d(1) as b, (c): pass\n"),
        ("with a as b, (c): pass\n", exchanged("c", "d(1)"), "with a as b, (d(1)): pass\n"),
        ("@a.b(1)\n# c\ndef f(): pass\n", exchanged("a.b", "c.d"), "@c.d(1)\n# c\ndef f(): pass\n"),
        ("x = f'{a!r:>{w}} {a}'\n", exchanged("a", "b", 1), "x = f'{a!r:>{w}} {b}'\n"),
        ('x = f"""\n{a}\n  {a} é {a}"""\n', exchanged("a", "b", 2), 'x = f"""\n{a}\n  {a} é {b}"""\n'),
        ("é = 'ü', a  # ö\n", exchanged("a", "b"), "é = 'ü', b  # ö\n"),
        ("x = a, a, f(a=a)\n", exchanged("a", "b", 2), "x = a, a, f(a=b)\n"),
        ("x = 'a' 'b'  # c\n", exchanged("'ab'", "d"), "x = d  # c\n"),
        ("x = a + \\\n  b\n", exchanged("b", "c"), "x = a + \\\n  c\n"),
        ("x = (a  # one\n  + b)  # two\n", exchanged("b", "c"), "x = (a  # one\n  + c)  # two\n"),
        ("async def f(): return await a\n", exchanged("a", "b or c"), "async def f(): return await (b or c)\n"),
        ("if a: pass\nelif a: pass\nelse: a\n", exchanged("a", "b", 1), "if a: pass\nelif b: pass\nelse: a\n"),
        ("class A(a, m=b): pass\n", exchanged("b", "c"), "class A(a, m=c): pass\n"),
        ("def f(a=a, *, b: a = a): pass\n", exchanged("a", "c", 2), "def f(a=a, *, b: a = c): pass\n"),
        ("x = a\n", exchanged("a", "(b +\n  c)"), "x = (b +\n  c)\n"),
        ("x = {**a, 'a': a}\n", exchanged("a", "b", 0), "x = {**b, 'a': a}\n"),
        ("match a:\n    case {'x': a.b} if a: pass\n", exchanged("a", "c", 2), "match a:\n    case {'x': a.b} if c: pass\n"),
    ],
)
def test_replaced_expression(text: str, fix: Fix, expected: str) -> None:
    assert text_after(text, fix) == expected


@pytest.mark.parametrize(
    ("text", "fix", "expected"),
    [
        ("x = f()\n", argument("f()", '"cuda"', "first"), 'x = f("cuda")\n'),
        ("x = f(a)\n", argument("f(a)", '"cuda"', "first"), 'x = f("cuda", a)\n'),
        ("x = f( a , )\n", argument("f(a)", "k=1"), "x = f( a , k=1, )\n"),
        ("x = f(a, **b)\n", argument("f(a, **b)", "k=1"), "x = f(a, k=1, **b)\n"),
        ("x = f(a, b=1)\n", argument("f(a, b=1)", "c"), "x = f(a, c, b=1)\n"),
        ("x = f(a for a in b)\n", argument("f(a for a in b)", "k=1"), "x = f((a for a in b), k=1)\n"),
        ("x = f(\n    a,\n    b,\n)\n", argument("f(a, b)", "c", "first"), "x = f(\n    c,\n    a,\n    b,\n)\n"),
        ("x = f(\n    a,  # one\n    b,  # two\n)\n", argument("f(a, b)", "c"), "x = f(\n    a,  # one\n    b,  # two\n    c,\n)\n"),
        ("x = f(\n    a  # one\n)\n", argument("f(a)", "c"), "x = f(\n    a,  # one\n    c\n)\n"),
        ("x = f(\n    a,  # one\n)\n", argument("f(a)", "c"), "x = f(\n    a,  # one\n    c,\n)\n"),
        ("x = f(a,\n      **b)\n", argument("f(a, **b)", "c"), "x = f(a,\n      c,\n      **b)\n"),
        ("with f() as a, f(1): pass\n", argument("f(1)", "k=2"), "with f() as a, f(1, k=2): pass\n"),
        ("@f()\ndef g(): pass\n", argument("f()", '"cuda"'), '@f("cuda")\ndef g(): pass\n'),
        ("x = f(f(), f())\n", argument("f()", "1"), "x = f(f(1), f())\n"),
        ("x = f(a)(b)\n", argument("f(a)(b)", "1"), "x = f(a)(b, 1)\n"),
    ],
)
def test_added_argument(text: str, fix: Fix, expected: str) -> None:
    assert text_after(text, fix) == expected


@pytest.mark.parametrize(
    ("text", "fix", "expected"),
    [
        ("x = f(a)\n", no_argument("f(a)", 0), "x = f()\n"),
        ("x = f(\n    a,\n)\n", no_argument("f(a)", 0), "x = f()\n"),
        ("x = f(a, b=1)\n", no_argument("f(a, b=1)", 1), "x = f(a)\n"),
        ("x = f(a, b, c)\n", no_argument("f(a, b, c)", 0, 2), "x = f(b)\n"),
        ("x = f(a, b, c,)\n", no_argument("f(a, b, c)", 2), "x = f(a, b,)\n"),
        ("x = f(b=1, *a)\n", no_argument("f(*a, b=1)", 1), "x = f(*a)\n"),
        ("x = f(\n    a,  # one\n    b,  # two\n)\n", no_argument("f(a, b)", 1), "x = f(\n    a,  # one\n)\n"),
        ("x = f(\n    a,  # one\n    b  # two\n)\n", no_argument("f(a, b)", 0), "x = f(\n    b  # two\n)\n"),
        ("x = f(\n    a,  # one\n    b  # two\n)\n", no_argument("f(a, b)", 1), "x = f(\n    a  # one\n)\n"),
    ],
)
def test_removed_argument(text: str, fix: Fix, expected: str) -> None:
    assert text_after(text, fix) == expected


@pytest.mark.parametrize(
    ("text", "fix", "expected"),
    [
        ("", imported("torch"), "import torch\n"),
        ("# c", imported("torch"), "# c\nimport torch\n"),
        ("x = 1\n", imported("torch"), "import torch\n\nx = 1\n"),
        ("#!/bin/python\n# coding: utf-8\nx = 1\n", imported("torch"), "#!/bin/python\n# coding: utf-8\nimport torch\n\nx = 1\n"),
        ("# License\n\n# x is 1\n@x\ndef f(): pass\n", imported("torch"), "# License\n\nimport torch\n\n# x is 1\n@x\ndef f(): pass\n"),
        ('"""Doc."""\nx = 1\n', imported("torch"), '"""Doc."""\n\nimport torch\n\nx = 1\n'),
        ('"""Doc."""', imported("torch"), '"""Doc."""\n\nimport torch\n'),
        ("from __future__ import a\n\nx = 1\r\n", imported("torch"), "from __future__ import a\n\nimport torch\n\nx = 1\r\n"),
        ("import os\nimport sys\n\nx = 1\n", imported("torch"), "import os\nimport sys\nimport torch\n\nx = 1\n"),
        ("import os; import sys\nfrom . import a\n", imported("torch"), "import os; import sys\nimport torch\nfrom . import a\n"),
        (
            "from __future__ import a\n# b\nfrom . import b\n",
            imported("torch"),
            "from __future__ import a\n# b\nimport torch\nfrom . import b\n",
        ),
        ("import torch.nn\nx = 1\nimport os\n", imported("torch.amp", "A"), "import torch.nn\nfrom torch.amp import A\nx = 1\nimport os\n"),
        ("import os\nfrom torch.nn import x\n", imported("torch.amp", "A"), "import os\nfrom torch.amp import A\nfrom torch.nn import x\n"),
        (
            "try:\n  import torch\nexcept E: pass\n",
            imported("torch.amp", "A"),
            "try:\n  import torch\n  from torch.amp import A\nexcept E: pass\n",
        ),
        # What is there already under its own name is not imported again.
        ("import torch\n", imported("torch"), "import torch\n"),
        ("import torch.nn as nn\n", imported("torch"), "import torch\nimport torch.nn as nn\n"),
        ("import torch.amp\n", imported("torch"), "import torch.amp\n"),
        ("import torch\n", imported("torch.amp"), "import torch\nimport torch.amp\n"),
        ("from torch.amp import (A, B)\n", imported("torch.amp", "B"), "from torch.amp import (A, B)\n"),
        ("from torch.amp import A as B\n", imported("torch.amp", "A"), "from torch.amp import A as B\nfrom torch.amp import A\n"),
        ("def f():\n    import torch\n", imported("torch"), "import torch\n\ndef f():\n    import torch\n"),
    ],
)
def test_added_import(text: str, fix: Fix, expected: str) -> None:
    assert text_after(text, fix) == expected


@pytest.mark.parametrize(
    ("text", "fix", "expected"),
    [
        ("import a, b  # own\n", not_imported("b"), "import a  # own\n"),
        ("from x import (a, b)  # own\n", not_imported("a"), "from x import (b)  # own\n"),
        ("from x import (\n    a,  # one\n    b,  # two\n)\n", not_imported("b"), "from x import (\n    a,  # one\n)\n"),
        ("from x import (\n    a,  # one\n    b  # two\n)\n", not_imported("b"), "from x import (\n    a  # one\n)\n"),
        ("from x import a, b, c\n", not_imported("a", "c"), "from x import b\n"),
        ("# above\nfrom x import a as b  # own\ny\n", not_imported("a"), "# above\ny\n"),
        ("from x import *\n", not_imported("*"), ""),
        ("try:\n    import a\nexcept E:\n    import b\n", not_imported("b"), "try:\n    import a\nexcept E:\n    pass\n"),
        ("import a; x()  # own\n", not_imported("a"), "x()  # own\n"),
    ],
)
def test_removed_import(text: str, fix: Fix, expected: str) -> None:
    assert text_after(text, fix) == expected


def test_a_new_import_takes_the_place_of_the_one_that_goes() -> None:
    text = "import os\n# amp\nfrom torch.cuda.amp import GradScaler\nimport sys\n"
    fix = together(not_imported("GradScaler"), imported("torch.amp", "GradScaler"))
    assert text_after(text, fix) == "import os\n# amp\nfrom torch.amp import GradScaler\nimport sys\n"


def test_an_import_that_a_replaced_statement_brings_is_not_added() -> None:
    text = "from torch.cuda.amp import A\nx = 1\n"
    fixes = replaced("from torch.cuda.amp import A", "from torch.amp import A"), imported("torch.amp", "A")
    assert text_after(text, *fixes) == "from torch.amp import A\nx = 1\n"


def test_two_fixes_may_add_the_same_import() -> None:
    text = '"""Doc."""\n\na(); b()\n'
    fixes = (
        together(exchanged("a", "c"), imported("torch.amp", "A")),
        together(exchanged("b", "d"), imported("torch.amp", "A"), imported("torch")),
    )
    assert text_after(text, *fixes) == '"""Doc."""\n\nimport torch\nfrom torch.amp import A\n\nc(); d()\n'
