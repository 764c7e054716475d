"""A document on a terminal, or in whatever its output is piped to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from halfstep.report.document import Card, Document, Excerpt, Item, Section, Table

__all__ = ["print_document"]

# What a console that cannot write these characters gets instead; anything else that it cannot write becomes a question mark.
_PLAIN = str.maketrans(
    {"×": "x", "–": "-", "−": "-", "µ": "u", "→": "->", "·": "-", "“": '"', "”": '"', "’": "'"}  # noqa: RUF001
)

# The blanks that rich puts to the left and right of every cell, and the one between two columns.
_CELL_PADDING = 3

# However narrow a terminal is, so many letters of a line of source code stand beside each other.
_LEAST_CODE = 10
_TAB = 4


def print_document(document: Document, console: Console) -> None:
    """Prints a document: the text, source code and tables of its sections, its notices, its conclusion. Figures are left out.

    A page is read from its top, a terminal from its end. So the order is turned round, and the conclusion comes last. Sections of one
    group keep their order.

    On a terminal a table that is too wide is printed in parts, each with the names of its rows, and a line of source code
    that is too wide goes on below itself. Into a pipe or a file every line is written whole, however long it is. Nothing in a document is
    read as markup.

    Args:
        document: What to print.
        console: Where to print it.

    Example:
        >>> import io
        >>> document = Document(kind="Precision comparison", title="digits", conclusion="Train in bf16: it is faster.")
        >>> out = io.StringIO()
        >>> print_document(document, Console(file=out))
        >>> print(out.getvalue())
        Precision comparison: digits
        <BLANKLINE>
        Train in bf16: it is faster.
    """
    _print_text(console, _text(console, f"{document.kind}: {document.title}", style="bold"))
    if document.subtitle:
        _print_text(console, _text(console, document.subtitle, style="dim"))
    for section in _from_the_end(document.sections):
        if section.place == "everywhere":
            _print_section(console, section)
    for notice in document.notices:
        console.print()
        _print_text(console, _text(console, notice, style="yellow"))
    console.print()
    _print_text(console, _text(console, document.conclusion, style="bold"))


def _from_the_end(sections: Sequence[Section]) -> Iterator[Section]:
    """The last section first; those of one group in their order."""
    groups = [list(members) for _, members in groupby(enumerate(sections), key=lambda each: each[1].group or each[0])]
    for members in reversed(groups):
        yield from (section for _, section in members)


def _text(console: Console, content: str, *, style: str = "") -> Text:
    """Text that means only itself: no markup, no control characters, nothing that the console's encoding lacks."""
    content = "".join(character if character.isprintable() else " " for character in content)
    try:
        content.encode(console.encoding)
    except UnicodeEncodeError:
        content = content.translate(_PLAIN).encode(console.encoding, errors="replace").decode(console.encoding)
    return Text(content, style=style)


def _print_text(console: Console, text: Text, *, indent: int = 0) -> None:
    if console.is_terminal:
        console.print(Padding(text, (0, 0, 0, indent), expand=False))
    else:
        console.print(Text(" " * indent).append_text(text), soft_wrap=True)


def _print_section(console: Console, section: Section) -> None:
    if not (section.paragraphs or section.cards or section.items or section.excerpts or section.tables):
        return
    console.print()
    _print_text(console, _text(console, section.title, style="bold underline"))
    for paragraph in section.paragraphs:
        _print_text(console, _text(console, paragraph))
    for card in section.cards:
        _print_item(console, _card_item(card))
    for item in section.items:
        _print_item(console, item)
    for excerpt in section.excerpts:
        _print_excerpt(console, excerpt)
    for table in section.tables:
        _print_table(console, table)


def _card_item(card: Card) -> Item:
    """A card as one line: its judgement and its advice, or its facts where it judges nothing."""
    facts = ", ".join(f"{fact.label} {fact.value}{f' ({fact.detail})' * bool(fact.detail)}" for fact in card.facts)
    label = " ".join(filter(None, (card.badge, card.title, f"({card.place})" if card.place else "")))
    return Item(label=label, text=" ".join(filter(None, (card.text, card.advice))) or facts)


def _print_item(console: Console, item: Item) -> None:
    label = _text(console, f"{item.label}: ", style="bold")
    _print_text(console, label.append_text(_text(console, item.text, style="not bold")), indent=2)


def _print_excerpt(console: Console, excerpt: Excerpt) -> None:
    console.print()
    for line, margin in zip(excerpt.lines, excerpt.margins, strict=True):
        code = _text(console, line.text.expandtabs(_TAB).rstrip()).plain
        room = max(console.width - cell_len(margin), _LEAST_CODE) if console.is_terminal else max(cell_len(code), 1)
        beside = margin
        for part in _folded(code, width=room):
            console.print(Text(f"{beside}{part}".rstrip(), style="bold" if line.is_marked else ""), soft_wrap=True)
            beside = f"{' ' * (len(margin) - 2)}| "


def _folded(code: str, *, width: int) -> list[str]:
    """The line in parts that are no wider. It is cut where it must be, and not between words: indentation has a meaning."""
    parts = [""]
    for character in code:
        if cell_len(parts[-1] + character) > width:
            parts.append("")
        parts[-1] += character
    return parts


def _print_table(console: Console, table: Table) -> None:
    for place, group in enumerate(_column_groups(console, table)):
        if place:
            console.print()
        console.print(_rich_table(console, table, columns=group), crop=False)
    if table.caption:
        _print_text(console, _text(console, table.caption, style="dim"), indent=1)


def _widths(console: Console, table: Table) -> list[int]:
    cells = [tuple(column.header for column in table.columns), *table.rows]
    return [max(cell_len(_text(console, row[place]).plain) for row in cells) for place in range(len(table.columns))]


def _column_groups(console: Console, table: Table) -> list[list[int]]:
    """The columns that are printed together: all of them, or as many as fit beside the first one."""
    widths = [width + _CELL_PADDING for width in _widths(console, table)]
    if len(widths) < 2 or not console.is_terminal or sum(widths) - 1 <= console.width:
        return [list(range(len(widths)))]
    groups: list[list[int]] = []
    for place in range(1, len(widths)):
        if groups and sum(widths[one] for one in (*groups[-1], place)) - 1 <= console.width:
            groups[-1].append(place)
        else:
            groups.append([0, place])
    return groups


def _rich_table(console: Console, table: Table, *, columns: list[int]) -> RichTable:
    widths = _widths(console, table)
    natural = sum(widths[place] + _CELL_PADDING for place in columns) - 1
    # Without a terminal nobody says how wide a line may be, so the table is as wide as its cells.
    rich_table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=True, width=None if console.is_terminal else natural)
    for place in columns:
        column = table.columns[place]
        rich_table.add_column(
            _text(console, column.header),
            justify=column.alignment,
            # Columns are grouped so that they fit; only one that alone is wider than the terminal is folded, and nothing is cut.
            no_wrap=not console.is_terminal,
            overflow="fold",
        )
    for row in table.rows:
        rich_table.add_row(*(_text(console, row[place]) for place in columns))
    return rich_table
