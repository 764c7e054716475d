"""Comments that switch rules off."""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.lint.module import parse_module
from halfstep.lint.selection import RuleName, known_rules
from halfstep.lint.suppressions import Suppressions, header_lines, leading_suppressions, read_suppressions

KNOWN = known_rules(
    [
        RuleName(code="HS001", name="deprecated_namespace", severity="warning"),
        RuleName(code="HS002", name="clip_before_unscale", severity="error"),
        RuleName(code="HS018", name="sync_every_step", severity="info"),
    ]
)
EVERY = frozenset({"HS000", "HS001", "HS002", "HS018"})


def read(text: str) -> Suppressions:
    return read_suppressions(text, ast.parse(text), known=KNOWN)


class TestOneLine:
    @pytest.mark.parametrize(
        ("comment", "codes"),
        [
            ("# halfstep: ignore[HS002]", {"HS002"}),
            ("#halfstep:ignore[HS002]", {"HS002"}),
            ("# halfstep: ignore[HS002, deprecated_namespace]", {"HS001", "HS002"}),
            ("# halfstep: ignore[ hs002 ,HS001,]", {"HS001", "HS002"}),
            ("# halfstep: ignore [HS002]", {"HS002"}),
            ("# halfstep: ignore[HS00]", {"HS000", "HS001", "HS002"}),
            ("# halfstep: ignore[ALL]", EVERY),
            ("# halfstep: ignore", EVERY),
            ("# halfstep: ignore because it is wanted", EVERY),
            ("# halfstep: ignore (it is wanted)", EVERY),
            ("# halfstep: ignore -- it is wanted", EVERY),
            ("# halfstep: ignore  # HS002", EVERY),
            ("# halfstep: ignore[HS002] because it is wanted", {"HS002"}),
            ("# noqa: E501 # halfstep: ignore[HS002]", {"HS002"}),
            ("# halfstep: ignore[HS002] # halfstep: ignore[HS001]", {"HS001", "HS002"}),
            ("# halfstep: ignore[HS002]  # type: ignore[attr-defined]", {"HS002"}),
        ],
    )
    def test_what_is_off(self, comment: str, codes: set[str]) -> None:
        found = read(f"a = 1\nb = 2  {comment}\nc = 3\n")
        assert {code for code in EVERY if found.cover(code, range(2, 3))} == codes
        assert not any(found.cover(code, lines) for code in EVERY for lines in (range(1, 2), range(3, 4)))
        assert found.warnings == ()

    @pytest.mark.parametrize(
        ("comment", "warning"),
        [
            ("# halfstep: ignore[HS002", "# halfstep: ignore[HS002 switches nothing off. Write # halfstep: ignore[HS018]."),
            ("# halfstep: ignore[]", "# halfstep: ignore[] switches nothing off. Write # halfstep: ignore[HS018]."),
            ("# halfstep: ignored", "# halfstep: ignored is no comment that halfstep lint knows. Did you mean 'ignore'"),
            ("# halfstep: ignroe[HS002]", "# halfstep: ignroe is no comment that halfstep lint knows. Did you mean 'ignore'?"),
            ("# halfstep: ignore[HS099]", "# halfstep: ignore[...] names 'HS099', which is no rule. Did you mean 'HS00"),
            (
                "# halfstep: ignore[HS001 HS002]",
                "# halfstep: ignore[...] names 'HS001 HS002', which is no rule. Write a comma between two.",
            ),
            ("# halfstep: ignore HS002", "# halfstep: ignore HS002 switches nothing off. Write # halfstep: ignore[HS002]."),
            (
                "# halfstep: ignore  clip_before_unscale",
                "# halfstep: ignore  clip_before_unscale switches nothing off. Write # halfstep: ignore[clip",
            ),
            (
                "# halfstep: ignore hs002, because",
                "# halfstep: ignore hs002, because switches nothing off. Write # halfstep: ignore[hs002].",
            ),
            ("# halfstep: ignore HS042", "# halfstep: ignore HS042 switches nothing off. Write # halfstep: ignore[HS018]."),
            ("# halfstep: ignore HS00", "# halfstep: ignore HS00 switches nothing off. Write # halfstep: ignore[HS018]."),
            ("# halfstep: ignore HS", "# halfstep: ignore HS switches nothing off. Write # halfstep: ignore[HS018]."),
            ("# halfstep: ignore. See HS002", "# halfstep: ignore. See HS002 switches nothing off. Write # halfstep: ignore[HS002]."),
            (
                "# halfstep: ignore HS001, HS002",
                "# halfstep: ignore HS001, HS002 switches nothing off. Write # halfstep: ignore[HS001, HS002]",
            ),
            ("# halfstep: ignore: HS002", "# halfstep: ignore: HS002 switches nothing off. Write # halfstep: ignore[HS002]."),
            ("# halfstep: ignore(HS002)", "# halfstep: ignore(HS002) switches nothing off. Write # halfstep: ignore[HS002]."),
            ("# halfstep: ignore (HS002)", "# halfstep: ignore (HS002) switches nothing off. Write # halfstep: ignore[HS002]."),
            ("# halfstep: ignore=HS0", "# halfstep: ignore=HS0 switches nothing off. Write # halfstep: ignore[HS018]."),
            ("# halfstep: ignore: it is wanted", "# halfstep: ignore: it is wanted switches nothing off. Write # halfstep: ignore[HS018]."),
            ("# Halfstep: ignore[HS002]", "# Halfstep: ignore[HS002] switches nothing off. Write # halfstep: ignore[HS002]."),
            ("# halfstep : ignore[HS002]", "# halfstep : ignore[HS002] switches nothing off."),
            ("# halfstep ignore[HS002]", "# halfstep ignore[HS002] switches nothing off."),
            ("# halfstep ignore", "# halfstep ignore switches nothing off."),
            ("#: halfstep: ignore[HS002]", "#: halfstep: ignore[HS002] switches nothing off."),
            ("# noqa: E501 halfstep: ignore[HS002]", "# noqa: E501 halfstep: ignore[HS002] switches nothing off."),
            (f"# HALFSTEP: ignore[HS002] {'x' * 99}", f"# HALFSTEP: ignore[HS002] {'x' * 31}... switches nothing off."),
            ("# halfstep: ignore[clip]", "# halfstep: ignore[...] names 'clip', which is no rule."),
        ],
    )
    def test_what_is_wrong_is_told_and_switches_nothing_off(self, comment: str, warning: str) -> None:
        found = read(f"a = 1\nb = 2  {comment}\n")
        assert not found.file
        assert not any(found.cover(code, range(1, 3)) for code in EVERY)
        ((line, told),) = found.warnings
        assert line == 2
        assert told.startswith(warning)

    def test_what_is_right_beside_what_is_wrong_counts(self) -> None:
        found = read("b = 2  # halfstep: ignore[HS002, HS042]")
        assert found.cover("HS002", range(1, 2))
        assert len(found.warnings) == 1

    @pytest.mark.parametrize(
        "text",
        [
            "x = 'a  # halfstep: ignore'\n",
            '"""\n# halfstep: ignore-file\n"""\nx = 1\n',
            "x = f'# halfstep: ignore {1}'\n",
            "x = 1  # halfstep: see docs/rules\n",
            "x = 1  # is halfstep: ignore\n",
            "x = 1  # halfstep ignores this\n",
            "x = 1  # halfstep\n",
            "x = 1\n",
        ],
    )
    def test_what_is_no_such_comment(self, text: str) -> None:
        assert read(text) == Suppressions()

    def test_a_line_of_its_own_has_no_effect_and_says_so(self) -> None:
        found = read("if a:\n    # halfstep: ignore[HS002]\n    b = 2\n")
        assert found.lines == ()
        assert found.warnings == (
            (2, "# halfstep: ignore has no effect on a line of its own. Move it to the end of the line that it is about."),
        )

    def test_the_end_of_a_text_of_several_lines_is_no_line_of_its_own(self) -> None:
        assert read('x = """\na\n"""  # halfstep: ignore[HS002]\n').cover("HS002", range(1, 4))


class TestWholeFile:
    @pytest.mark.parametrize(
        "text",
        [
            "# halfstep: ignore-file[HS002]\nx = 1\n",
            "#!/usr/bin/env python\n# coding: utf-8\n\n# halfstep: ignore-file[HS002]\nx = 1\n",
            '"""Docstring."""\n\n# halfstep: ignore-file[HS002]\n\nx = 1\n',
            "import a\nfrom b import c  # halfstep: ignore-file[HS002]\nx = 1\n",
            "# halfstep: ignore-file[HS002]\n",
            "# halfstep: ignore-file[HS002]\n@decorated\ndef f(): pass\n",
        ],
    )
    def test_it_is_off_everywhere(self, text: str) -> None:
        found = read(text)
        assert found.file == {"HS002"}
        assert found.cover("HS002", range(99, 100))
        assert not found.cover("HS001", range(99, 100))
        assert found.warnings == ()

    def test_everything(self) -> None:
        assert read("# halfstep: ignore-file\nx = 1\n").file == EVERY

    def test_a_list_without_brackets_is_told_and_switches_nothing_off(self) -> None:
        found = read("# halfstep: ignore-file HS002\nx = 1\n")
        assert found.file == frozenset()
        assert found.warnings == ((1, "# halfstep: ignore-file HS002 switches nothing off. Write # halfstep: ignore-file[HS002]."),)

    @pytest.mark.parametrize("text", ["x = 1\n# halfstep: ignore-file\n", "@decorated\n# halfstep: ignore-file\ndef f(): pass\n"])
    def test_below_the_first_statement_it_has_no_effect_and_says_so(self, text: str) -> None:
        found = read(text)
        assert found.file == frozenset()
        assert "no effect below the first statement" in found.warnings[0][1]


class TestHeaders:
    """A finding is switched off by a comment on any line of its statement's header."""

    @pytest.mark.parametrize(
        ("text", "lines"),
        [
            ("x(\n    FIND,\n)\n", (1, 3)),
            ("y\nFIND\n", (2, 2)),
            ("with FIND:\n    y\n", (1, 1)),
            ("with (\n    FIND\n):\n    y\n", (1, 3)),
            ("with a:\n    y\n    FIND\n", (3, 3)),
            ("if FIND:\n    y\nelse:\n    z\n", (1, 1)),
            ("if a: FIND\n", (1, 1)),
            ("with FIND: y\n", (1, 1)),
            ("@a\n@FIND\ndef f(\n    x,\n):\n    y\n", (1, 5)),
            ("@a\ndef f(x=FIND): y\n", (1, 2)),
            ("class A(FIND):\n    @a\n    def f(self): y\n", (1, 1)),
            ("for x in FIND:\n    y\n", (1, 1)),
            ("while FIND:\n    y\n", (1, 1)),
            ("try:\n    FIND\nfinally:\n    y\n", (2, 2)),
            ("match FIND:\n    case 1:\n        y\n", (1, 1)),
            ("f(lambda: (\n    FIND))\n", (1, 2)),
            ("match a:\n    case 1 if FIND:\n        y\n    case 2:\n        y\n", (2, 2)),
            ("match a:\n    case 1:\n        y\n    case (\n        2\n    ) if FIND:\n        y\n", (4, 6)),
            ("match a:\n    case 1 if FIND: y\n", (2, 2)),
            ("match (\n    FIND\n):\n    case 1:\n        y\n", (1, 3)),
            ("try:\n    y\nexcept FIND:\n    y\nexcept z:\n    y\n", (3, 3)),
            ("try:\n    y\nexcept z:\n    y\nexcept (\n    z,\n    FIND,\n):\n    y\n", (5, 8)),
            ("try: y\nexcept FIND: y\n", (2, 2)),
        ],
    )
    def test_lines(self, text: str, lines: tuple[int, int]) -> None:
        module = parse_module(text)
        node = next(name for name in module.nodes(ast.Name) if name.id == "FIND")
        found = header_lines(module.statement(node), node)
        assert (found[0], found[-1]) == lines

    def test_a_statement_is_a_finding_itself(self) -> None:
        module = parse_module("with a:\n    y\n")
        assert header_lines(module.tree.body[0], module.tree.body[0]) == range(1, 2)


class TestWhatDoesNotParse:
    def test_only_what_it_begins_with_is_read(self) -> None:
        text = "#!/usr/bin/python2\n\n# halfstep: ignore-file[HS000]\nprint 'a'  # halfstep: ignore-file[HS002]\n"
        assert leading_suppressions(text, known=KNOWN).file == {"HS000"}
        assert leading_suppressions("print 'a'\n# halfstep: ignore-file\n", known=KNOWN) == Suppressions()
        assert leading_suppressions("print 'a'\n", known=KNOWN) == Suppressions()


def test_what_the_parser_takes_and_its_copy_in_python_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tokenize.generate_tokens

    def fail(read: Callable[[], str]) -> Iterator[tokenize.TokenInfo]:
        yield from tokens(read)
        raise tokenize.TokenError("EOF in multi-line statement", (2, 0))

    monkeypatch.setattr(tokenize, "generate_tokens", fail)
    assert read("x  # halfstep: ignore[HS002]\n").cover("HS002", range(1, 2))


@given(text=st.text(st.sampled_from("#halfstep: ignore[HS002]()'\"\\\n\t\f x=1,")))
def test_no_text_that_parses_is_too_much(text: str) -> None:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        leading_suppressions("halfstep:" + text, known=KNOWN)
        return
    read_suppressions(text + "\n#halfstep:", tree, known=KNOWN)
