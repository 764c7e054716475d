"""Random edits of random statements of the standard library do to the text what they say that they do to the tree."""

from __future__ import annotations

import ast
import io
import random
import sysconfig
import tokenize
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.lint.editing import apply_edits
from halfstep.lint.editing.outline import Outline, blocks, first_line, last_line
from halfstep.lint.edits import (
    AddArgument,
    DeleteStatement,
    Edit,
    InsertStatement,
    MoveOutOfBlock,
    RemoveArgument,
    ReplaceExpression,
    WrapStatements,
)
from tests.lint.programs import Program

# A case: an edit, the lines that it may change (from 0, the last one included), and what it does to the tree that it points into.
_Case: TypeAlias = tuple[Edit, tuple[int, int], Callable[[], None]]
_CODES = ("a + b", "c if d else e", "f(x)", "lambda: g", "-1", "not h", "i, j", "'k'", "l.m", "n or o", "(p)", "{q: r}")
_FILES = sorted(path for path in Path(sysconfig.get_paths()["stdlib"]).rglob("*.py") if "site-packages" not in path.parts)


def _parse(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def read(path: Path, *, newline: str = "\n") -> str | None:
    """The text of a file of the standard library; `None` where it is no text that Python reads."""
    try:
        text = path.read_text(encoding="utf-8").replace("\n", newline)
        _parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    return text


def _comments(text: str, *, without: tuple[int, int] = (0, -1)) -> Counter[str]:
    """The comments of a text, save for those on some lines."""
    tokens = tokenize.generate_tokens(io.StringIO(text, newline="").readline)
    return Counter(
        token.string.rstrip() for token in tokens if token.type == tokenize.COMMENT and not without[0] <= token.start[0] - 1 <= without[1]
    )


class Choice:
    """Chooses edits of a tree."""

    def __init__(self, tree: ast.Module, chance: random.Random) -> None:
        self.tree = tree
        self.chance = chance
        self.blocks: list[tuple[ast.stmt | ast.Module, list[ast.stmt]]] = [
            (node, block) for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.Module) for block in blocks(node) if block
        ]

    def statement(self) -> tuple[ast.stmt | ast.Module, list[ast.stmt], int]:
        parent, block = self.chance.choice(self.blocks)
        return parent, block, self.chance.randrange(len(block))

    def insertion(self) -> _Case:
        _, block, number = self.statement()
        where = self.chance.choice(("before", "after"))
        code = self.chance.choice(("marker()", "marker(1)\nmarker(2)", "if marker():\n    marker(1)"))
        place = number + (where == "after")

        def change() -> None:
            block[place:place] = ast.parse(code).body

        edit = InsertStatement(statement=block[number], code=code, where="before" if where == "before" else "after")
        return edit, (first_line(block[number]), last_line(block[number])), change

    def deletion(self) -> _Case:
        parent, block, number = self.statement()
        statement = block[number]

        def change() -> None:
            del block[number]
            if not block and parent is not self.tree:
                block.append(ast.Pass())

        return DeleteStatement(statement=statement), (first_line(statement), last_line(statement)), change

    def wrapping(self) -> _Case:
        _, block, first = self.statement()
        last = self.chance.randrange(first, min(first + 4, len(block)))
        edit = WrapStatements(first=block[first], last=block[last], header="if marker():")
        lines = first_line(block[first]), last_line(block[last])

        def change() -> None:
            wrapper = ast.parse("if marker(): pass").body[0]
            assert isinstance(wrapper, ast.If)
            wrapper.body = block[first : last + 1]
            block[first : last + 1] = [wrapper]

        return edit, lines, change

    def move(self) -> _Case | None:
        places = [(block, statement) for _, block in self.blocks for statement in block if isinstance(statement, ast.With | ast.AsyncWith)]
        if not places:
            return None
        block, owner = self.chance.choice(places)
        number = self.chance.randrange(len(owner.body))
        place = block.index(owner) + 1

        def change() -> None:
            block[place:place] = owner.body[number:]
            owner.body[number:] = []
            if not owner.body:
                owner.body.append(ast.Pass())

        return MoveOutOfBlock(block=owner, first=owner.body[number]), (first_line(owner), last_line(owner)), change

    def calls(self) -> list[tuple[ast.stmt, ast.Call]]:
        return [
            (statement, node) for _, block in self.blocks for statement in block for node in _own(statement) if isinstance(node, ast.Call)
        ]

    def argument(self) -> _Case | None:
        calls = self.calls()
        if not calls:
            return None
        statement, call = self.chance.choice(calls)
        code = self.chance.choice(('"cuda"', "marker=True"))
        first = not ("=" in code and call.args) and self.chance.random() < 0.5

        def change() -> None:
            new = ast.parse(f"f({code})", mode="eval").body
            assert isinstance(new, ast.Call)
            call.args[:] = [*new.args, *call.args] if first else [*call.args, *new.args]
            stars = [number for number, keyword in enumerate(call.keywords) if keyword.arg is None]
            place = 0 if first else [*stars, len(call.keywords)][0]
            call.keywords[place:place] = new.keywords

        edit = AddArgument(call=call, code=code, where="first" if first else "last")
        return edit, (first_line(statement), last_line(statement)), change

    def no_argument(self) -> _Case | None:
        calls = [(statement, call) for statement, call in self.calls() if call.args or call.keywords]
        if not calls:
            return None
        statement, call = self.chance.choice(calls)
        arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        argument = self.chance.choice(arguments)

        def change() -> None:
            call.args[:] = [other for other in call.args if other is not argument]
            call.keywords[:] = [other for other in call.keywords if other is not argument]

        return RemoveArgument(call=call, argument=argument), (first_line(statement), last_line(statement)), change

    def replacement(self) -> _Case | None:
        _, block, number = self.statement()
        statement = block[number]
        nodes = (statement, *_own(statement))
        places = [(node, field) for node in nodes for field, _ in ast.iter_fields(node) if _is_replaceable(node, field)]
        if not places:
            return None
        node, field = self.chance.choice(places)
        code = self.chance.choice(_CODES)

        def change() -> None:
            setattr(node, field, ast.parse(f"({code})", mode="eval").body)

        return ReplaceExpression(node=getattr(node, field), code=code), (first_line(statement), last_line(statement)), change

    def case(self) -> _Case | None:
        kinds = (self.insertion, self.deletion, self.wrapping, self.move, self.argument, self.no_argument, self.replacement)
        return self.chance.choice(kinds)()


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """The parts of a statement without the statements in it and without patterns."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            if not isinstance(child, ast.stmt | ast.pattern):
                yield child
                waiting.append(child)


def _is_replaceable(node: ast.AST, field: str) -> bool:
    child = getattr(node, field)
    if not isinstance(child, ast.expr) or isinstance(child, ast.Starred | ast.Slice):
        return False
    if not isinstance(getattr(child, "ctx", ast.Load()), ast.Load) or field == "format_spec":
        return False
    # libcst has no node for the parts between the brackets, and no place for a tuple behind a star or for an `=` behind `:`.
    return not (isinstance(node, ast.Subscript) and field == "slice" and isinstance(child, ast.Tuple))


def _logical_lines(text: str, first: int, last: int) -> tuple[int, int]:
    """Where the logical line begins that a line is part of, and where that of another one ends."""
    begin = 0
    lines: dict[int, tuple[int, int]] = {}
    for token in tokenize.generate_tokens(io.StringIO(text, newline="").readline):
        if token.type == tokenize.NEWLINE or (token.type == tokenize.NL and token.line.lstrip()[:1] in ("", "#")):
            end = token.start[0] - 1
            lines.update((line, (begin, end)) for line in range(begin, end + 1) if line not in lines)
            begin = end + 1
    return lines[first][0], lines[last][1]


def violations(text: str, choose: Callable[[Choice], _Case | None], chance: random.Random) -> str | None:
    """What is wrong with the result of an edit; empty where nothing is, `None` where it was not applied."""
    tree = _parse(text)
    case = choose(Choice(tree, chance))
    if case is None:
        return None
    edit, (first, last), change = case
    edited = apply_edits(text, tree, [(edit,)])
    if edited.applied == 0:
        return None if edited.text == text else "not applied, but changed"
    change()
    name = f"{type(edit).__name__} lines {first + 1}-{last + 1}"
    if ast.dump(_parse(edited.text)) != ast.dump(tree):
        return f"{name}: another tree"
    before, after = ([line.rstrip() for line in Outline(code, tree).lines] for code in (text, edited.text))
    first, last = _logical_lines(text, first, last)
    # Comments behind a statement may belong to its block.
    while last + 1 < len(before) and (not before[last + 1].strip() or "#" in before[last + 1]):
        last += 1
    behind = len(before) - last - 1
    if before[:first] != after[:first] or (behind > 0 and before[-behind:] != after[-behind:]):
        return f"{name}: other lines changed"
    removes = isinstance(edit, DeleteStatement | RemoveArgument | ReplaceExpression)
    if removes and _comments(text, without=(first, last)) - _comments(edited.text):
        return f"{name}: comments of other lines are lost"
    if not removes and _comments(text) != _comments(edited.text):
        return f"{name}: comments are lost"
    return ""


@given(st.integers(0, 2**64))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_random_edits_of_ugly_programs_change_what_they_say(seed: int) -> None:
    chance = random.Random(seed)
    text = Program(chance).text()
    wrong = violations(text, Choice.case, chance)
    assert not wrong, text


@given(st.sampled_from(_FILES), st.integers(0, 2**32), st.sampled_from(["\n", "\r\n"]))
@settings(max_examples=120, deadline=None, derandomize=True)
def test_random_edits_change_what_they_say(path: Path, seed: int, newline: str) -> None:
    text = read(path, newline=newline)
    if text is None or len(text) > 60_000 or not _parse(text).body:
        return
    chance = random.Random(seed)
    assert not violations(text, Choice.case, chance), path


@pytest.mark.parametrize("path", _FILES[::40], ids=lambda path: path.name)
def test_no_edit_leaves_the_text_as_it_is(path: Path) -> None:
    text = read(path)
    if text is not None:
        assert apply_edits(text, _parse(text), [(), ()]).text is text
