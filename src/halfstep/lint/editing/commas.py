"""Lists with commas between their parts: the arguments of a call and the names of an import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import libcst as cst

__all__ = ["add_argument", "drop_aliases", "drop_argument"]

_Space: TypeAlias = cst.BaseParenthesizableWhitespace
_Item = TypeVar("_Item", cst.Arg, cst.ImportAlias)
_NONE = cst.SimpleWhitespace("")


def _breaks(space: _Space) -> bool:
    return isinstance(space, cst.ParenthesizedWhitespace)


def _remarks(space: _Space) -> bool:
    """Whether white space holds a comment."""
    return isinstance(space, cst.ParenthesizedWhitespace) and (
        space.first_line.comment is not None or any(line.comment is not None for line in space.empty_lines)
    )


def _bare(space: _Space) -> _Space:
    """The white space without its comments and empty lines."""
    if not isinstance(space, cst.ParenthesizedWhitespace):
        return space
    return space.with_changes(first_line=cst.TrailingWhitespace(newline=space.first_line.newline), empty_lines=[])


def _joined(remarks: _Space, rest: _Space) -> _Space:
    """The comments of one white space, then what another one leads to."""
    if not isinstance(remarks, cst.ParenthesizedWhitespace):
        return rest
    if isinstance(rest, cst.ParenthesizedWhitespace):
        return remarks.with_changes(indent=rest.indent, last_line=rest.last_line)
    return remarks


def _comma_space(item: cst.Arg | cst.ImportAlias) -> _Space | None:
    """The white space behind the comma of an item; `None` where it has no comma."""
    return item.comma.whitespace_after if isinstance(item.comma, cst.Comma) else None


def _with_comma_space(item: _Item, space: _Space) -> _Item:
    comma = item.comma if isinstance(item.comma, cst.Comma) else cst.Comma()
    return item.with_changes(comma=comma.with_changes(whitespace_after=space))


def _place(arguments: Sequence[cst.Arg], new: cst.Arg, *, first: bool) -> int:
    """Where an argument goes: the very first place, or the last one that its kind may take."""
    if first:
        return 0
    for number, argument in enumerate(arguments):
        if argument.star == "**" or (new.keyword is None and argument.keyword is not None):
            return number
    return len(arguments)


def _separation(call: cst.Call) -> _Space:
    """The white space between the arguments of a call."""
    between = [space for space in map(_comma_space, call.args[:-1]) if space is not None]
    if between:
        return _bare(between[-1])
    return _bare(call.whitespace_before_args) if _breaks(call.whitespace_before_args) else cst.SimpleWhitespace(" ")


def add_argument(call: cst.Call, code: str, *, first: bool) -> cst.Call:
    """A call with more arguments, laid out as its others are.

    Args:
        call: The call.
        code: The text of one or more arguments.
        first: Whether they stand before the others, or as far behind as Python lets them.
    """
    wrapper = cst.parse_expression(f"f({code})")
    assert isinstance(wrapper, cst.Call)
    arguments = [_closed(argument) for argument in call.args]
    place = _place(arguments, wrapper.args[0], first=first)
    separation = _separation(call)
    new = [argument.with_changes(comma=cst.Comma(whitespace_after=separation)) for argument in wrapper.args]
    if place == len(arguments):
        new[-1] = new[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        if arguments:
            arguments[-1], new[-1] = _behind(arguments[-1], new[-1], separation)
    arguments[place:place] = new
    return call.with_changes(args=arguments)


def _closed(argument: cst.Arg) -> cst.Arg:
    """An argument that may have neighbours: a lone generator needs parentheses of its own then."""
    if not isinstance(argument.value, cst.GeneratorExp) or argument.value.lpar:
        return argument
    return argument.with_changes(value=argument.value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()]))


def _behind(last: cst.Arg, new: cst.Arg, separation: _Space) -> tuple[cst.Arg, cst.Arg]:
    """The argument that was the last, and the one that is now."""
    closing = _comma_space(last)
    if closing is not None:
        between = _joined(closing, separation) if _remarks(closing) else separation
        return _with_comma_space(last, between), _with_comma_space(new, _bare(closing))
    closing = last.whitespace_after_arg
    between = _joined(closing, separation) if _remarks(closing) else separation
    last = _with_comma_space(last.with_changes(whitespace_after_arg=_NONE), between)
    return last, new.with_changes(whitespace_after_arg=_bare(closing))


def drop_argument(call: cst.Call, number: int) -> cst.Call:
    """A call without one of its arguments.

    Args:
        call: The call.
        number: Which one, from 0.
    """
    arguments = list(call.args)
    gone = arguments.pop(number)
    if not arguments:
        before = call.whitespace_before_args
        return call.with_changes(args=[], whitespace_before_args=before if _remarks(before) else _NONE)
    if number == len(arguments):
        last = arguments[-1]
        between = _comma_space(last) or _NONE
        closing = _comma_space(gone)
        if closing is not None:
            arguments[-1] = _with_comma_space(last, _joined(between, closing) if _remarks(between) else _bare(closing))
        else:
            closing = _joined(between, _bare(gone.whitespace_after_arg)) if _remarks(between) else _bare(gone.whitespace_after_arg)
            arguments[-1] = last.with_changes(comma=cst.MaybeSentinel.DEFAULT, whitespace_after_arg=closing)
    return call.with_changes(args=arguments)


def drop_aliases(statement: cst.Import | cst.ImportFrom, numbers: set[int]) -> cst.Import | cst.ImportFrom:
    """An import without some of its names, of which at least one is left.

    Args:
        statement: The import.
        numbers: Which names, from 0.
    """
    assert not isinstance(statement.names, cst.ImportStar)
    names = list(statement.names)
    left = [name for number, name in enumerate(names) if number not in numbers]
    if len(names) - 1 not in numbers:
        return statement.with_changes(names=left)
    between = _comma_space(left[-1]) or _NONE
    closing = _comma_space(names[-1])
    if closing is not None:
        left[-1] = _with_comma_space(left[-1], _joined(between, closing) if _remarks(between) else _bare(closing))
        return statement.with_changes(names=left)
    left[-1] = left[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    if isinstance(statement, cst.ImportFrom) and statement.rpar is not None and _remarks(between):
        end = statement.rpar.with_changes(whitespace_before=_joined(between, statement.rpar.whitespace_before))
        return statement.with_changes(names=left, rpar=end)
    return statement.with_changes(names=left)
