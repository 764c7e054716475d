"""Carries the changes out on the tree of an excerpt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast, final

import libcst as cst

from halfstep.lint.editing.changes import Changes, Row, body_of
from halfstep.lint.editing.pairing import Statement, flat
from halfstep.lint.editing.rows import BlockWriter, Tail

__all__ = ["rewrite"]


@final
class _Rewriting(cst.CSTTransformer):
    """Writes each block that has changed statements anew, from the inside out."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        # What is moved out of a block, by the block's identity, until the statement that the block belongs to is written.
        self._tails: dict[int, Tail] = {}

    def on_visit(self, node: cst.CSTNode) -> bool:
        return not isinstance(node, cst.BaseSmallStatement | cst.BaseCompoundStatement) or id(node) in self._changes.reached

    def on_leave(self, original_node: cst.CSTNodeT, updated_node: cst.CSTNodeT) -> cst.CSTNodeT:
        node: cst.CSTNode = updated_node
        for _, mutation in sorted(self._changes.mutations.get(id(original_node), []), key=lambda entry: entry[0]):
            node = mutation(node)
        if isinstance(original_node, cst.Module | cst.IndentedBlock | cst.SimpleStatementSuite):
            if self._is_changed(flat(original_node.body)):
                node = self._block(original_node, node)
        elif isinstance(original_node, cst.If) and isinstance(original_node.orelse, cst.If) and self._is_changed([original_node.orelse]):
            node = self._branch(original_node.orelse, cst.ensure_type(node, cst.If))
        return cast("cst.CSTNodeT", node)

    def _is_changed(self, statements: Iterable[Statement]) -> bool:
        return any(id(statement) in self._changes.statements or self._tail(statement) is not None for statement in statements)

    def _tail(self, statement: cst.CSTNode) -> Tail | None:
        return self._tails.get(id(getattr(statement, "body", None)))

    def _block(self, original: cst.Module | cst.IndentedBlock | cst.SimpleStatementSuite, updated: cst.CSTNode) -> cst.CSTNode:
        writer = BlockWriter(self._changes)
        if isinstance(original, cst.SimpleStatementSuite):
            return self._suite(writer, original, cst.ensure_type(updated, cst.SimpleStatementSuite))
        assert isinstance(updated, cst.Module | cst.IndentedBlock)
        for old, new in zip(original.body, updated.body, strict=True):
            if isinstance(old, cst.SimpleStatementLine):
                writer.line(old, cst.ensure_type(new, cst.SimpleStatementLine))
            elif isinstance(old, cst.BaseCompoundStatement):
                assert isinstance(new, cst.BaseCompoundStatement)
                writer.compound(old, new, self._tail(old) or Tail())
        rows = self._rows(original, writer, updated.footer)
        if isinstance(updated, cst.Module):
            return updated.with_changes(body=rows, footer=writer.comments)
        body, footer = body_of(rows, writer.comments)
        return updated.with_changes(body=body, footer=footer)

    def _rows(self, original: cst.CSTNode, writer: BlockWriter, footer: Sequence[cst.EmptyLine]) -> list[Row]:
        rows, tail = writer.finish(footer)
        if tail.rows:
            self._tails[id(original)] = tail
        return rows

    def _suite(self, writer: BlockWriter, original: cst.SimpleStatementSuite, updated: cst.SimpleStatementSuite) -> cst.BaseSuite:
        """A block on the line of its statement, which it leaves where it no longer fits there."""
        writer.small(original.body, updated.body, updated.trailing_whitespace)
        rows = self._rows(original, writer, ())
        if not rows:
            end = cst.TrailingWhitespace(newline=updated.trailing_whitespace.newline)
            return updated.with_changes(body=[cst.Pass()], trailing_whitespace=end)
        if len(rows) == 1 and isinstance(rows[0], cst.SimpleStatementLine) and not rows[0].leading_lines and not writer.comments:
            return updated.with_changes(body=rows[0].body, trailing_whitespace=rows[0].trailing_whitespace)
        return cst.IndentedBlock(rows, indent=self._changes.indent, footer=writer.comments)

    def _branch(self, original: cst.If, updated: cst.If) -> cst.If:
        """A statement whose `elif` becomes an `else:` with a block, for there to be a place next to that `if`."""
        branch = cst.ensure_type(updated.orelse, cst.If)
        writer = BlockWriter(self._changes)
        writer.compound(original, branch.with_changes(leading_lines=[]), Tail())
        rows, _ = writer.finish(())
        body, footer = body_of(rows, writer.comments)
        block = cst.IndentedBlock(body, indent=self._changes.indent, footer=footer)
        return updated.with_changes(orelse=cst.Else(leading_lines=branch.leading_lines, body=block))


def rewrite(module: cst.Module, changes: Changes) -> cst.Module:
    """A tree with the changes carried out.

    Args:
        module: The tree.
        changes: What is changed in it, by the identity of its nodes.
    """
    return cst.ensure_type(module.visit(_Rewriting(changes)), cst.Module)
