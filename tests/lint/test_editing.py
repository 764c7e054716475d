"""Edits of statements in awkward layouts, and fixes that meet."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from halfstep.lint.editing import Edited
from halfstep.lint.edits import DeleteStatement, MoveOutOfBlock, WrapStatements
from tests.lint.fixes import (
    Fix,
    apply,
    argument,
    deleted,
    exchanged,
    inserted,
    inserted_before,
    moved,
    replaced,
    text_after,
    together,
    wrapped,
)


@pytest.mark.parametrize(
    ("text", "fix", "expected"),
    [
        # Comments above a statement stay above; its own line stays as it is.
        ("def f():\n    # above\n    a()  # own\n", inserted_before("a()"), "def f():\n    # above\n    m()\n    a()  # own\n"),
        ("def f():\n    a()  # own\n\n    b()\n", inserted("a()"), "def f():\n    a()  # own\n    m()\n\n    b()\n"),
        # A statement alone in a one-line suite gets a block, several are joined.
        ("if x: a()  # own\nb()\n", inserted_before("a()"), "if x:\n    m()\n    a()  # own\nb()\n"),
        ("if x: a(); b()  # own\n", inserted("a()"), "if x: a(); m(); b()  # own\n"),
        ("if x: a()\nelse: b()\n", inserted("b()"), "if x: a()\nelse:\n    b()\n    m()\n"),
        ("try: a()\nexcept E: b()\nfinally: c()\n", inserted_before("b()"), "try: a()\nexcept E:\n    m()\n    b()\nfinally: c()\n"),
        ("class A: x = 1; y = 2\n", inserted("y = 2"), "class A: x = 1; y = 2; m()\n"),
        ("async def f(): await a()\n", inserted_before("await a()"), "async def f():\n    m()\n    await a()\n"),
        ("a(); b();  # own\n", inserted("b()"), "a(); b(); m()  # own\n"),
        ("a();b()\n", inserted_before("b()"), "a();m(); b()\n"),
        ("a(); b()  # own\n", inserted("a()", "if x:\n    m()"), "a()\nif x:\n    m()\nb()  # own\n"),
        # A place next to an `elif` needs an `else:`.
        ("if a:\n    x\n# c\nelif b:\n    y\n", inserted_before("if b: y"), "if a:\n    x\n# c\nelse:\n    m()\n    if b:\n        y\n"),
        # Behind a block and the comments that are indented as it is.
        ("if a:\n    x\n    # tail\n# next\ny\n", inserted("if a: x"), "if a:\n    x\n    # tail\nm()\n# next\ny\n"),
        ("@d\ndef f(): pass\n", inserted_before("@d\ndef f(): pass"), "m()\n@d\ndef f(): pass\n"),
        ("a(); \\\n  b()\n", inserted("b()"), "a(); \\\n  b(); m()\n"),
        ("if x: \\\n  a()\n", inserted("a()"), "if x:\n    a()\n    m()\n"),
        # Indentation, ends of lines and the end of the file are as they were.
        ("if x:\n\ta\n\tif y:\n\t\tb\n", inserted_before("b", "if z:\n    m()"), "if x:\n\ta\n\tif y:\n\t\tif z:\n\t\t\tm()\n\t\tb\n"),
        ("if x:\n  a", inserted("a"), "if x:\n  a\n  m()"),
        ("if x:\r\n  a\r\nb", inserted("a"), "if x:\r\n  a\r\n  m()\r\nb"),
        ("a\r\nb", inserted("b"), "a\r\nb\r\nm()"),
        ("x\n\f\nclass A:\n\f\n    é = 'ü'  # ö\n", inserted("é = 'ü'"), "x\n\f\nclass A:\n\f\n    é = 'ü'  # ö\n    m()\n"),
        ("\fif x:\n    a\n", inserted("a"), "\fif x:\n    a\n    m()\n"),
        ("x\n\fdef f(): pass\n", inserted("def f(): pass"), "x\n\fdef f(): pass\nm()\n"),
        # New code may have comments and several statements.
        ("a()\n", inserted("a()", "# why\nm()\nn()  # n\n"), "a()\n# why\nm()\nn()  # n\n"),
        ("a(); b()\n", inserted("a()", "m()\nn()"), "a(); m(); n(); b()\n"),
    ],
)
def test_insertion(text: str, fix: Fix, expected: str) -> None:
    assert text_after(text, fix) == expected


@pytest.mark.parametrize(
    ("text", "fix", "expected"),
    [
        ("a()\n# above\nb()  # own\n# below\nc()\n", deleted("b()"), "a()\n# above\n# below\nc()\n"),
        ("def f():\n    # above\n    b()  # own\n", deleted("b()"), "def f():\n    # above\n    pass\n"),
        ("def f():\n    a()\n    # above\n    b()\nc()\n", deleted("b()"), "def f():\n    a()\n    # above\nc()\n"),
        ("if x: a()  # own\n", deleted("a()"), "if x: pass\n"),
        ("if x: a(); b()  # own\n", deleted("b()"), "if x: a()  # own\n"),
        ("a(); b(); c()  # own\n", deleted("a()"), "b(); c()  # own\n"),
        ("a(); b(); c();\n", deleted("c()"), "a(); b()\n"),
        ("if x:\n    a\nelse:\n    b\n", deleted("b"), "if x:\n    a\nelse:\n    pass\n"),
        ("if x:\n    a\nelif y:\n    b\nelif z:\n    c\n", deleted("b"), "if x:\n    a\nelif y:\n    pass\nelif z:\n    c\n"),
        ("if x:\n    a\nelif y:\n    b\n", deleted("if y: b"), "if x:\n    a\nelse:\n    pass\n"),
        ("match x:\n    case 1: a()\n", deleted("a()"), "match x:\n    case 1: pass\n"),
        ("a()\nb()", deleted("b()"), "a()\n"),
        ("a()", deleted("a()"), ""),
        ("# c\na()\n", deleted("a()"), "# c\n"),
        ("def f():\n    '''\n  x'''\n    a(1,\n2)\n    b()\n", deleted("a(1, 2)"), "def f():\n    '''\n  x'''\n    b()\n"),
    ],
)
def test_deletion(text: str, fix: Fix, expected: str) -> None:
    assert text_after(text, fix) == expected


@pytest.mark.parametrize(
    ("text", "fix", "expected"),
    [
        ("def f():\n    # above\n    a()  # own\n", replaced("a()", "m()"), "def f():\n    # above\n    m()  # own\n"),
        ("a()  # own\nb()\n", replaced("a()", "m()\nn()"), "m()  # own\nn()\nb()\n"),
        ("a()  # own\n", replaced("a()", "if x:\n    m()"), "if x:  # own\n    m()\n"),
        ("a(); b()  # own\n", replaced("b()", "m()\nn()"), "a(); m(); n()  # own\n"),
        ("a(); b(); c()  # own\n", replaced("b()", "if x:\n    m()"), "a()\nif x:\n    m()\nc()  # own\n"),
        ("if x: a()\n", replaced("a()", "m()"), "if x: m()\n"),
        ("with a:\n  b\n  # tail\nc\n", replaced("with a: b", "for x in y:\n    with a:\n        b"), "for x in y:\n  with a:\n    b\nc\n"),
        ("if x:\n    a()\n", replaced("a()", ""), "if x:\n    pass\n"),
        ("if x:\n    a\nelif y:\n    b\n", replaced("if y: b", "m()"), "if x:\n    a\nelse:\n    m()\n"),
    ],
)
def test_replaced_statement(text: str, fix: Fix, expected: str) -> None:
    assert text_after(text, fix) == expected


@pytest.mark.parametrize(
    ("text", "fix", "expected"),
    [
        (
            "def f():\n\twith a:  # own\n\t\tb()\n\n\t\t# above\n\t\tc('''\n\tx''')  # c\n\t\t# tail\n\td()\n",
            moved("c('''\n\tx''')"),
            "def f():\n\twith a:  # own\n\t\tb()\n\n\t# above\n\tc('''\n\tx''')  # c\n\t# tail\n\td()\n",
        ),
        ("with a:\n    b\n    c\n", moved("b"), "with a:\n    pass\nb\nc\n"),
        ("with a: b; c; d  # own\n", moved("c"), "with a: b\nc; d  # own\n"),
        ("with a:\n    b; c; d  # own\n    e", moved("d"), "with a:\n    b; c\nd  # own\ne"),
        (
            "async def f():\n  async with a:\n    b\n    if c:\n      d  # d\n      # e\n    # f\n  g\n",
            moved("if c: d"),
            "async def f():\n  async with a:\n    b\n  if c:\n    d  # d\n    # e\n  # f\n  g\n",
        ),
        ("with a:\r\n    b\r\n    c(1,\r\n      2)", moved("c(1, 2)"), "with a:\r\n    b\r\nc(1,\r\n  2)"),
    ],
)
def test_move(text: str, fix: Fix, expected: str) -> None:
    assert text_after(text, fix) == expected


@pytest.mark.parametrize(
    ("text", "fix", "expected"),
    [
        (
            "def f():\n    a\n    # above\n    b(1,\n      2)  # own\n    # mid\n    c('''\nx''')\n    # tail\n    d\n",
            wrapped("b(1, 2)", "c('''\nx''')"),
            "def f():\n    a\n    # above\n    if ok:\n        b(1,\n          2)  # own\n        # mid\n        c('''\nx''')\n"
            "    # tail\n    d\n",
        ),
        ("a; b; c  # own\n", wrapped("b", "b"), "a\nif ok:\n    b\nc  # own\n"),
        ("a; b; c  # own\nd\n", wrapped("b", "d"), "a\nif ok:\n    b; c  # own\n    d\n"),
        ("if x: a  # own\n", wrapped("a", "a"), "if x:\n    if ok:\n        a  # own\n"),
        ("if x:\n\ta", wrapped("a", "a"), "if x:\n\tif ok:\n\t\ta"),
        ("if x:\n  a\nelif y:\n  b\n", wrapped("if y: b", "if y: b"), "if x:\n  a\nelse:\n  if ok:\n    if y:\n      b\n"),
        (
            "@d\nclass A:\n    x\n    # tail\n",
            wrapped("@d\nclass A: x", "@d\nclass A: x"),
            "if ok:\n    @d\n    class A:\n        x\n        # tail\n",
        ),
    ],
)
def test_wrapping(text: str, fix: Fix, expected: str) -> None:
    assert text_after(text, fix) == expected


@pytest.mark.parametrize(
    "second",
    [inserted("a()", "n()"), deleted("if x: a()"), exchanged("x", "y"), wrapped("if x: a()", "b()"), deleted("a()")],
)
def test_of_fixes_that_meet_the_first_wins(second: Fix) -> None:
    edited = apply("if x:\n    a()\nb()\n", inserted("a()"), second)
    assert edited == Edited(text="if x:\n    a()\n    m()\nb()\n", applied=1)


def test_fixes_of_neighbours_go_together() -> None:
    text = "def f():\n    a(); b()\n    c()\n    with d():\n        e()\n"
    fixes = inserted("a()"), deleted("b()"), wrapped("c()", "c()"), argument("d()", "1")
    assert text_after(text, *fixes) == "def f():\n    a(); m()\n    if ok:\n        c()\n    with d(1):\n        e()\n"


def test_two_deletions_that_empty_a_block_leave_a_pass() -> None:
    assert text_after("if x:\n    a()\n    b()\n", deleted("a()"), deleted("b()")) == "if x:\n    pass\n"


@pytest.mark.parametrize(
    "bad",
    [
        inserted("b()", "m("),
        replaced("b()", "return = 1"),
        exchanged("b", "c d"),
        wrapped("b()", "b()", "if ok"),
        together(replaced("b()", "m()"), deleted("b()")),
        lambda _: [DeleteStatement(statement=ast.parse("b()").body[0])],
        lambda tree: [MoveOutOfBlock(block=ast.With(items=[], body=[tree.body[0]]), first=tree.body[0])],
        lambda tree: [WrapStatements(first=tree.body[1], last=tree.body[0], header="if ok:")],
    ],
)
def test_a_fix_that_does_not_work_is_left_out_alone(bad: Fix) -> None:
    edited = apply("a()\nb()\nc()\n", inserted("a()"), bad, inserted("b()", "n()"), deleted("c()"))
    assert edited == Edited(text="a()\nm()\nb()\nn()\n", applied=3)


def test_a_fix_that_does_not_work_keeps_no_place_from_others() -> None:
    assert apply("a()\n", inserted("a()", "m("), inserted("a()")) == Edited(text="a()\nm()\n", applied=1)


def test_one_edit_that_does_not_work_takes_its_fix_along() -> None:
    edited = apply("a()\nb()\n", together(deleted("a()"), inserted("b()", "m(")))
    assert edited == Edited(text="a()\nb()\n", applied=0)


def test_what_libcst_does_not_keep_is_not_touched() -> None:
    # libcst moves a form feed before a statement and loses a space before the colon of an `except`.
    for text in ("class A:\n    a\n\f    b\n", "try:\n    a\nexcept E :\n    b\n"):
        outer = ast.parse(text).body[0]
        code = ast.get_source_segment(text, outer) or ""
        assert apply(text, wrapped(code, code)) == Edited(text=text, applied=0)


def test_libcst_is_loaded_with_the_first_fix_only() -> None:
    code = (
        "import ast, sys\nfrom halfstep.lint.editing import apply_edits\nfrom halfstep.lint.edits import AddImport\n"
        "tree = ast.parse('x')\nassert apply_edits('x', tree, [()]).text == 'x'\nassert 'libcst' not in sys.modules\n"
        "assert apply_edits('x', tree, [(AddImport(module='a'),)]).applied\nassert 'libcst' in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
