"""Cells without their magics."""

from __future__ import annotations

import ast
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.lint.magics import mask_cell, named, prefixed, unmasked

M0, M1 = "__halfstep_magic_0__", "__halfstep_magic_1__"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("", ""),
        ("x = 1\n", "x = 1\n"),
        ("%matplotlib inline\nx = 1", f"{M0}\nx = 1"),
        ("!pip install -q torch\nx = 1\n", f"{M0}\nx = 1\n"),
        ("if x:\n    %time f()\n    !ls {x}\ny", f"if x:\n    {M0}\n    {M1}\ny"),
        ("x = !ls\ny = %sql select 1", f"x = {M0}\ny = {M1}"),
        ("a, b = %sx ls\n", f"a, b = {M0}\n"),
        ("torch.amp?\n?torch.amp\n", f"{M0}\n{M1}\n"),
        ("torch.amp??", M0),
        ("%%time\nx = 1\n", f"{M0}\nx = 1\n"),
        ("\n%%capture out\nx = 1", f"\n{M0}\nx = 1"),
        ("%%bash\nls -l | grep x\n", "\n\n"),
        ("%%writefile a.py\nx = 1", "\n"),
        ("%%python\nx = 1", "\n"),
        ("!pip install \\\n    torch \\\n  numpy\nx = 1", f"{M0}\n# {M1}\n# __halfstep_magic_2__\nx = 1"),
        ("pip install torch\nx = 1", f"{M0}\nx = 1"),
        ("cd ..\nx = 1", f"{M0}\nx = 1"),
        ('x = """\n%d\n!\n""" % 3\n!ls', f'x = """\n%d\n!\n""" % 3\n{M0}'),
        ("x = (1\n%\n3)\n!ls", f"x = (1\n%\n3)\n{M0}"),
        ("x = 7 \\\n% 2\n!ls", f"x = 7 \\\n% 2\n{M0}"),
        ("x = 'a\\'(' # (\n!ls", f"x = 'a\\'(' # (\n{M0}"),
        ('x = r"\\" + "("\n!ls', None),
        ("x = '''a'''\n!ls", f"x = '''a'''\n{M0}"),
        ("x = 'a\\\n% b'\n!ls", f"x = 'a\\\n% b'\n{M0}"),
        ("a %= 2\na != 3\n!ls", f"a %= 2\na != 3\n{M0}"),
        ("await f()\n!ls", f"await f()\n{M0}"),
        (",f a b\n;f a\n/f 1,2\nx", f"{M0}\n{M1}\n__halfstep_magic_2__\nx"),
        ("x = (1\n, 2\n/ 3)\n!ls", f"x = (1\n, 2\n/ 3)\n{M0}"),
        ("f(torch.amp?\nx", f"{M0}\nx"),
        ("x = 1  # why?\n!ls", f"x = 1  # why?\n{M0}"),
        ("x = '''why?\n'''\n!ls", f"x = '''why?\n'''\n{M0}"),
        ("x: list = !ls\n", f"x: list = {M0}\n"),
        ("d[f(x)] = %sx ls\na.b(1).c = !ls -a", f"d[f(x)] = {M0}\na.b(1).c = {M1}"),
        ("a, (b, *c) = !ls\nd[f(k=1), 'e=%'] = %sx ls", f"a, (b, *c) = {M0}\nd[f(k=1), 'e=%'] = {M1}"),
        ("x = 'a=%s' % 3\nf(y='=!')\n!ls", f"x = 'a=%s' % 3\nf(y='=!')\n{M0}"),
        ("x = y == 3\nx += 1 # = !ls\n!ls", f"x = y == 3\nx += 1 # = !ls\n{M0}"),
    ],
)
def test_magics_are_masked_and_come_back(text: str, masked: str | None) -> None:
    cell = mask_cell(text, first=0)
    if masked is None:
        assert cell.error is not None
        return
    assert (cell.text, cell.error) == (masked, None)
    assert cell.text.count("\n") == text.count("\n")
    ast.parse(cell.text)
    if cell.text.strip() or not text.strip():
        assert unmasked(cell.text, cell.hidden) == text


@pytest.mark.parametrize(
    ("text", "code", "prefixes"),
    [
        ("    x = 1\n    if x:\n        y\n", "x = 1\nif x:\n    y\n", ["    ", "    ", "    ", ""]),
        ("\n\tx = 1\n  \n\ty", "\nx = 1\n  \ny", ["", "\t", "", "\t"]),
        ("  x\n  !ls", f"x\n{M0}", ["  ", "  "]),
        (">>> x = 1\n>>> if x:\n...     y\n", "x = 1\nif x:\n    y\n", [">>> ", ">>> ", "... ", ""]),
        ("  >>> x = (\n  ...\n  ... )", "x = (\n\n)", ["  >>> ", "  ...", "  ... "]),
        ("In [1]: x = 1\nIn [12]: if x:\n    ...:     y\n", "x = 1\nif x:\n    y\n", ["In [1]: ", "In [12]: ", "    ...: ", ""]),
        ("In [1]: %time\nIn [2]: x = !ls", f"{M0}\nx = {M1}", ["In [1]: ", "In [2]: "]),
        ("%%time\n>>> x = 1", f"{M0}\nx = 1", ["", ">>> "]),
        ("    %%time\n    x = 1", f"{M0}\nx = 1", ["    ", "    "]),
        ("    x\ny", "x\ny", ["    ", ""]),
        ("  %%time\n    x\n      # y", f"{M0}\nx\n  # y", ["  ", "    ", "    "]),
    ],
)
def test_prompts_and_the_indentation_of_a_cell_are_taken_away_and_come_back(text: str, code: str, prefixes: list[str]) -> None:
    cell = mask_cell(text, first=0)
    assert (cell.text, list(cell.prefixes), cell.error) == (code, prefixes, None)
    assert unmasked(prefixed(cell.text, cell.prefixes, like=cell.text), cell.hidden) == text


def test_prompts_in_a_text_are_left_alone() -> None:
    text = "def f():\n    '''It is.\n\n    >>> f()\n    '''\n"
    cell = mask_cell(f"{text}!ls", first=0)
    assert (cell.text, cell.prefixes) == (f"{text}{M0}", ())


@pytest.mark.parametrize(
    ("text", "like", "prefixes", "whole"),
    [
        ("x\n\ny\n", "x\ny\n", ["  ", "  ", ""], "  x\n\n  y\n"),
        ("x", "x\ny", ["  ", "  "], "  x"),
        ("x\nz", "x\ny", [">>> ", "... "], ">>> x\n... z"),
        ("x\ny", "x", [">>> "], ">>> x\n>>> y"),
        ("y\nx", "x", [">>> "], ">>> y\n>>> x"),
        ("x\nnew\ny\nz", "x\ny\nz", ["  ", "", "\t"], "  x\n  new\ny\n\tz"),
        ("new\nx\ny", "x\ny", ["", "  "], "  new\nx\n  y"),
        ("x\ny", "x", [], "x\ny"),
    ],
)
def test_prefixes_come_back_to_the_lines_that_had_them(text: str, like: str, prefixes: list[str], whole: str) -> None:
    assert prefixed(text, prefixes, like=like) == whole


def test_a_message_names_magics_as_they_are() -> None:
    assert named(f"`x = {M0}` and {M1}", {0: "!ls"}) == f"`x = !ls` and {M1}"


@pytest.mark.parametrize("line", ["{}x", "x{}# c", "{}", "x = [{}]", "x {}?{}x", "'{}", "={}x", "a{}=", "In [1]:{}"])
def test_long_lines_do_not_take_for_ever(line: str) -> None:
    mask_cell("!ls\n" + line.replace("{}", " " * 20_000), first=0)
    mask_cell("!ls\n" + line.replace("{}", "? = " * 5_000), first=0)


def test_columns_of_other_code_stay() -> None:
    cell = mask_cell("!ls\n    \nif a:\n        b()", first=5)
    assert cell.text == "__halfstep_magic_5__\n    \nif a:\n        b()"
    assert dict(cell.hidden) == {5: "!ls"}


@pytest.mark.parametrize("text", ["x = = 1", "print 'a'", "%time\nx = (", "x = '\0'", "x = '\ud800'", "(" * 500])
def test_what_is_neither_python_nor_magic_is_an_error(text: str) -> None:
    cell = mask_cell(text, first=0)
    assert cell.error is not None
    assert cell.text == "\n" * text.count("\n")
    assert not cell.hidden


HIDDEN = MappingProxyType({0: "%a", 1: "!b"})


class TestPuttingBack:
    def test_a_moved_magic_keeps_its_new_indentation(self) -> None:
        assert unmasked(f"if x:\n    {M0}\n{M1}", HIDDEN) == "if x:\n    %a\n!b"

    @pytest.mark.parametrize("text", ["", M0, f"{M0}\n{M0}\n{M1}", f"{M0}\n{M1}\n__halfstep_magic_2__"])
    def test_a_magic_that_is_gone_or_doubled_or_foreign_is_refused(self, text: str) -> None:
        assert unmasked(text, HIDDEN) is None

    def test_what_a_magic_says_is_no_pattern(self) -> None:
        assert unmasked(M0, {0: r"!echo \1 \g<0>"}) == r"!echo \1 \g<0>"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::SyntaxWarning")
@given(text=st.text(st.sampled_from("%!?x=()\"'\\\n #:1>.,"), max_size=30))
def test_any_text_is_masked_line_by_line(text: str) -> None:
    cell = mask_cell(text, first=3)
    assert cell.text.count("\n") == text.count("\n")
    ast.parse(cell.text)
    if cell.text.strip():
        assert unmasked(prefixed(cell.text, cell.prefixes, like=cell.text), cell.hidden) == text
