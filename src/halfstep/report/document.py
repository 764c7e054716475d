"""A report as a value: titled sections of text, cards, tables and figures, before anyone decides how it looks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from halfstep.records import SourceLine

__all__ = ["Axis", "Card", "Column", "Document", "Excerpt", "Fact", "Figure", "Item", "Marks", "Place", "Section", "Series", "Table"]

Alignment = Literal["left", "right"]
Emphasis = Literal["normal", "faint", "marks"]
FigureKind = Literal["lines", "distribution", "stacked_bars", "timeline"]
MarkPlace = Literal["throughout", "between", "above", "below"]
Scale = Literal["linear", "from_zero", "log", "log2"]
Tone = Literal["neutral", "good", "warning", "bad"]
Place = Literal["everywhere", "page"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table.

    Attributes:
        header: What stands above the column; the first column of a table names its rows.
        alignment: `left` for text, `right` for numbers.
        role: What the column is about, for example a precision: everything with one role has one colour.

    Example:
        >>> Column(header="bf16", alignment="right", role="bf16").alignment
        'right'
    """

    header: str
    alignment: Alignment = "left"
    role: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under columns.

    Attributes:
        columns: The columns, the one that names the rows first.
        rows: One text for each column.
        caption: What a reader must know to read the numbers; empty when nothing.

    Raises:
        ValueError: A row has more or fewer cells than there are columns.

    Example:
        >>> table = Table(columns=(Column(header="Metric"), Column(header="bf16", alignment="right")), rows=(("Skipped steps", "0"),))
        >>> table.rows[0][1]
        '0'
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"A row of this table has {len(row)} cells, but the table has {len(self.columns)} columns: {row!r}.")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What one direction of a figure means.

    Attributes:
        label: What is drawn along it.
        unit: The unit of its numbers; empty for counts and names.
        scale: `linear`, `from_zero` for a linear one that shows how large a change is, `log` where the values span too much for one linear
            axis, or `log2` for a logarithmic one with powers of two.
        limits: Where it begins and ends; `None` leaves that to the values.

    Example:
        >>> str(Axis(label="Step time", unit="ms"))
        'Step time (ms)'
    """

    label: str
    unit: str = ""
    scale: Scale = "linear"
    limits: tuple[float, float] | None = None

    def __str__(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One set of values in a figure.

    Attributes:
        name: What the legend calls it.
        x: Where each value of `y` stands: numbers for lines, names for bars, empty for a distribution.
        y: The values. What is not finite is not drawn.
        role: What the series is about, for example a precision: everything with one role has one colour.
        emphasis: `normal`, `faint` for the members behind a mean, or `marks` for events that are points and not a line.

    Raises:
        ValueError: `x` and `y` have different lengths, and `x` is not empty.

    Example:
        >>> Series(name="bf16", x=(1, 2), y=(0.9, 0.7), role="bf16").emphasis
        'normal'
    """

    name: str
    x: tuple[float, ...] | tuple[str, ...] = ()
    y: tuple[float, ...]
    role: str = ""
    emphasis: Emphasis = "normal"

    def __post_init__(self) -> None:
        if self.x and len(self.x) != len(self.y):
            raise ValueError(f"The series {self.name!r} has {len(self.x)} positions for {len(self.y)} values.")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Events in a timeline, which have a place along it and no value.

    Attributes:
        name: What the legend calls them.
        x: Where they are.
        texts: What is said of each when it is pointed at.
        place: `above` or `below` the lines; `throughout` for dots above and a line from top to bottom; `between` for squares above, between
            what was before and what came after.
        tone: What sort of news they are.
        role: What they are about; it gives them their colour, instead of the tone.

    Raises:
        ValueError: There are more or fewer texts than places.

    Example:
        >>> Marks(name="skipped steps", x=(40.0,), texts=("step 40 was skipped",), place="below").tone
        'neutral'
    """

    name: str
    x: tuple[float, ...]
    texts: tuple[str, ...]
    place: MarkPlace
    tone: Tone = "neutral"
    role: str = ""

    def __post_init__(self) -> None:
        if len(self.x) != len(self.texts):
            raise ValueError(f"The marks {self.name!r} have {len(self.texts)} texts for {len(self.x)} places.")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Series on two axes.

    Attributes:
        title: What the figure shows.
        kind: `lines` (values along x), `distribution` (one box with its points for each series), `stacked_bars` (one bar for each name
            in `x`, one part for each series) or `timeline` (lines of many values; all timelines of a document show the same stretch of x).
        x: The horizontal axis.
        y: The vertical axis.
        series: What is drawn, in the order of the legend.
        marks: Events in a timeline.
        caption: How to read it; empty when it speaks for itself.
        table: The same numbers as text, for whoever cannot see or run the figure.

    Example:
        >>> loss = Series(name="fp32", x=(1, 2), y=(0.9, 0.7))
        >>> Figure(title="Loss", kind="lines", x=Axis(label="Step"), y=Axis(label="Loss"), series=(loss,)).table is None
        True
    """

    title: str
    kind: FigureKind
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    marks: tuple[Marks, ...] = ()
    caption: str = ""
    table: Table | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One number that matters, with its name.

    Attributes:
        label: What is known.
        value: The number or the word.
        detail: How sure it is, or what it is measured against.
        tone: Whether that is good news.

    Example:
        >>> Fact(label="Peak memory", value="62 %", detail="of fp32", tone="good").value
        '62 %'
    """

    label: str
    value: str
    detail: str = ""
    tone: Tone = "neutral"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What there is to say about one thing: a judgement in words and the facts that carry it.

    Attributes:
        title: The thing.
        badge: One word that classes it, such as `error`; empty for none.
        tone: What sort of news it is; the badge has its colour.
        place: Where it is, such as a step and a line of code.
        text: The judgement.
        advice: What to do.
        facts: The numbers behind it.
        role: What the card is about: everything with one role has one colour.

    Example:
        >>> Card(title="bf16", text="Use it: faster, with the same loss.").facts
        ()
    """

    title: str
    badge: str = ""
    tone: Tone = "neutral"
    place: str = ""
    text: str = ""
    advice: str = ""
    facts: tuple[Fact, ...] = ()
    role: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A line of a list: a name and what is said of it.

    Example:
        >>> Item(label="fp16", text="Stopped after one step: it is emulated on this processor.").label
        'fp16'
    """

    label: str
    text: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """Lines of source code, shown as they stand in their file.

    Attributes:
        lines: The lines, one after the other.

    Example:
        >>> lines = (SourceLine(number=9, text="q = split(x)", is_marked=False), SourceLine(number=10, text="s = q @ k", is_marked=True))
        >>> Excerpt(lines=lines).margins
        ('   9 | ', '> 10 | ')
    """

    lines: tuple[SourceLine, ...]

    @property
    def margins(self) -> tuple[str, ...]:
        """What stands before each line, all of one width: a `>` before one that is marked, and the number."""
        width = max((len(str(line.number)) for line in self.lines), default=0)
        return tuple(f"{'>' if line.is_marked else ' '} {line.number:>{width}} | " for line in self.lines)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A titled part of a document. Its parts are shown in the order of these fields.

    Attributes:
        title: The heading.
        paragraphs: Text.
        cards: Judgements with their facts.
        items: A list of names and what is said of each.
        excerpts: Source code.
        tables: Tables.
        figures: Figures; a terminal leaves them out.
        place: `everywhere`, or `page` for what a terminal leaves out.
        group: What sections that follow each other have in common, such as one for each policy. They are read in their order, on a
            terminal as well; empty for a section by itself.

    Example:
        >>> Section(title="Notes", paragraphs=("All went well.",)).tables
        ()
    """

    title: str
    paragraphs: tuple[str, ...] = ()
    cards: tuple[Card, ...] = ()
    items: tuple[Item, ...] = ()
    excerpts: tuple[Excerpt, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    place: Place = "everywhere"
    group: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A whole report.

    Attributes:
        kind: What sort of report it is.
        title: What it is about, for example the name of the task.
        subtitle: Where and how it was made, in one line.
        conclusion: What to do, in one sentence with its reason.
        notices: What a reader must know before trusting the numbers.
        sections: The rest, most important first.
        roles: Roles in the order in which they take colours; others follow in the order in which they appear.

    Example:
        >>> document = Document(kind="Precision comparison", title="digits", conclusion="Train in bf16: it is faster.")
        >>> document.sections
        ()
    """

    kind: str
    title: str
    subtitle: str = ""
    conclusion: str
    notices: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()
    roles: tuple[str, ...] = ()
