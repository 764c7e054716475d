"""Source code in a report: as a value, on a terminal, and on a page."""

from __future__ import annotations

import io
from html.parser import HTMLParser

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from halfstep.records import SourceLine
from halfstep.report import Document, Excerpt, Item, Section, Table, print_document, render_html
from halfstep.report.document import Column

ATTACK = "</code></pre></script><img src=x onerror=alert(1)>"


def excerpt(*texts: str, first: int = 9, marked: int = 10) -> Excerpt:
    return Excerpt(
        lines=tuple(SourceLine(number=number, text=text, is_marked=number == marked) for number, text in enumerate(texts, start=first))
    )


def document(shown: Excerpt) -> Document:
    return Document(kind="Report", title="t", conclusion="c", sections=(Section(title="Where", excerpts=(shown,)),))


def printed(shown: Excerpt, *, width: int = 80, terminal: bool = True, colours: bool = False) -> list[str]:
    """The lines of the excerpt alone."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system="standard" if colours else None)
    print_document(document(shown), console)
    lines = out.getvalue().split("\n")
    begin, end = next(place for place, line in enumerate(lines) if "Where" in line) + 2, len(lines) - 3
    return lines[begin:end]


def test_margins_have_one_width_and_mark_without_colour() -> None:
    assert excerpt("a", "b", "c").margins == ("   9 | ", "> 10 | ", "  11 | ")
    assert Excerpt(lines=()).margins == ()


class TestTerminal:
    def test_lines_stand_as_in_their_file(self) -> None:
        assert printed(excerpt("def f(q, k):", "    s = q @ k   ", "", "\treturn s", first=8)) == [
            "   8 | def f(q, k):",
            "   9 |     s = q @ k",
            "> 10 |",
            "  11 |     return s",
        ]

    def test_what_is_marked_is_bold(self) -> None:
        lines = printed(excerpt("a", "b"), colours=True)
        assert lines[0] == "   9 | a"
        assert lines[1] == "\x1b[1m> 10 | b\x1b[0m"

    def test_a_wide_line_goes_on_below_itself(self) -> None:
        assert printed(excerpt("scores = query @ key.transpose", marked=9), width=20) == [
            "> 9 | scores = query",
            "    |  @ key.transpo",
            "    | se",
        ]

    def test_into_a_pipe_it_is_whole(self) -> None:
        assert printed(excerpt("x" * 200), width=20, terminal=False) == [f"  9 | {'x' * 200}"]

    def test_a_terminal_of_no_width_still_shows_something(self) -> None:
        assert [line[6:] for line in printed(excerpt("0123456789abc"), width=9)] == ["0123456789", "abc"]

    def test_it_is_no_markup_and_moves_no_cursor(self) -> None:
        (line,) = printed(excerpt("a[0] = '[red]\x1b[31m\r:smile:'"))
        assert line == "  9 | a[0] = '[red] [31m :smile:'"

    def test_it_stands_between_the_items_and_the_tables(self) -> None:
        section = Section(
            title="Where",
            items=(Item(label="Line", text="train.py:10"),),
            excerpts=(excerpt("q @ k", marked=9),),
            tables=(Table(columns=(Column(header="Tensor"),), rows=()),),
        )
        out = io.StringIO()
        print_document(Document(kind="Report", title="t", conclusion="c", sections=(section,)), Console(file=out))
        shown = out.getvalue()
        assert shown.index("train.py:10") < shown.index("> 9 | q @ k") < shown.index("Tensor")
        page = render_html(Document(kind="Report", title="t", conclusion="c", sections=(section,)))
        assert page.index("train.py:10") < page.index("q @ k") < page.index("Tensor")

    @given(text=st.text(st.characters(codec="utf-8"), max_size=60), width=st.integers(20, 60))
    @settings(deadline=None)
    def test_no_letter_is_lost_and_no_line_too_wide(self, text: str, width: int) -> None:
        lines = printed(excerpt(text), width=width)
        shown = "".join(line[6:] for line in lines)
        assert [each for each in shown if each.isalnum()] == [each for each in text if each.isalnum()]
        assert max(map(cell_len, lines)) <= width


class Code(HTMLParser):
    """The text of the excerpt on a page, the text that is marked, and all elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = self.marked = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "pre" in self._open:
            self.text += data
        if "mark" in self._open:
            self.marked += data

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


class TestPage:
    def test_lines_stand_as_in_their_file_and_one_is_marked(self) -> None:
        page = Code(render_html(document(excerpt("def f(q, k):", "    s = q @ k", "", "\treturn s"))))
        assert page.text == "   9 | def f(q, k):\n> 10 |     s = q @ k\n  11 | \n  12 | \treturn s\n"
        assert page.marked == "> 10 |     s = q @ k\n"

    def test_what_it_says_cannot_become_code(self) -> None:
        text = render_html(document(excerpt(ATTACK, marked=9)))
        page = Code(text)
        assert page.text == f"> 9 | {ATTACK}\n"
        assert page.attributes("img") == []
        assert "<img" not in text

    def test_it_can_be_scrolled_with_the_keyboard_and_has_a_name(self) -> None:
        page = Code(render_html(document(excerpt("a"))))
        (block,) = page.attributes("pre")
        assert (block["tabindex"], block["role"]) == ("0", "region")
        assert block["aria-labelledby"] in {attributes.get("id") for attributes in page.attributes("h2")}

    def test_without_excerpts_there_is_none(self) -> None:
        assert "<pre" not in render_html(Document(kind="Report", title="t", conclusion="c", sections=(Section(title="Where"),)))

    @given(text=st.text(st.characters(codec="utf-8", exclude_characters="\r\x00"), max_size=60))
    @settings(deadline=None, max_examples=50)
    def test_any_text_comes_back_as_it_was(self, text: str) -> None:
        assert Code(render_html(document(excerpt(text)))).text == f"  9 | {text}\n"
