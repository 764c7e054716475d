"""Figures as the JSON that plotly.js draws. Plotly itself is not needed here: a plot is nothing but dictionaries and lists.

Colours are written as the names of CSS variables (`var(--ink)`), and the page puts the values in. So one plot serves a light and a dark
page, and can change from one to the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from halfstep.report.document import Axis, Document, Emphasis, Figure, Series
from halfstep.report.plot_parts import FREE_COLOURS, axis_scale, base_layout, line_colour, literal, numbers, positions, tight_range
from halfstep.report.timelines import timeline_plot

__all__ = ["plot", "role_colours"]

# Precisions have the same colour in every report; other roles take the next free one.
_FIXED = {"fp32": "--fp32", "bf16": "--bf16", "fp16": "--fp16"}

# Up to here every step is a dot of its own; beyond, dots would hide the box and slow the page down.
_MOST_DOTS = 400

# What is drawn first lies below.
_LAYERS: dict[Emphasis, int] = {"faint": 0, "normal": 1, "marks": 2}

_DASHES = ("solid", "6px,4px", "2px,4px", "10px,4px,2px,4px")

_BAR_HEIGHT = 64
_AXIS_HEIGHT = 110


def role_colours(document: Document) -> dict[str, str]:
    """The CSS variable that holds the colour of each role in a document.

    Args:
        document: A document. Roles are found in its cards, its columns and its series.

    Example:
        >>> from halfstep.report.document import Card, Section
        >>> section = Section(title="Verdicts", cards=(Card(title="bf16", role="bf16"), Card(title="fp32 (2)", role="fp32 (2)")))
        >>> role_colours(Document(kind="Report", title="t", conclusion="c", sections=(section,)))
        {'bf16': '--bf16', 'fp32 (2)': '--series-1'}
    """
    colours: dict[str, str] = {}
    free = 0
    for role in _roles(document):
        if role in colours or not role:
            continue
        if role in _FIXED:
            colours[role] = _FIXED[role]
        else:
            colours[role] = FREE_COLOURS[free % len(FREE_COLOURS)]
            free += 1
    return colours


def _roles(document: Document) -> Iterable[str]:
    yield from document.roles
    for section in document.sections:
        yield from (card.role for card in section.cards)
        yield from (column.role for table in section.tables for column in table.columns)
        yield from (series.role for figure in section.figures for series in figure.series)
        yield from (marks.role for figure in section.figures for marks in figure.marks)


def plot(figure: Figure, *, colours: Mapping[str, str]) -> dict[str, Any]:
    """A figure as the data and the layout of plotly.js, and its height in pixels.

    Args:
        figure: The figure.
        colours: The CSS variable of each role, as `role_colours` gives them.

    Returns:
        JSON-like values under `data`, `layout` and `height`; numbers that are not finite became `None`, which leaves a gap.

    Example:
        >>> line = Series(name="bf16", x=(1, 2), y=(0.5, float("nan")), role="bf16")
        >>> figure = Figure(title="Loss", kind="lines", x=Axis(label="Step"), y=Axis(label="Loss"), series=(line,))
        >>> plot(figure, colours={"bf16": "--bf16"})["data"][0]["y"]
        [0.5, None]
    """
    if figure.kind == "timeline":
        return timeline_plot(figure, colours=colours)
    makers = {"lines": _line_traces, "distribution": _box_traces, "stacked_bars": _bar_traces}
    data = makers[figure.kind](figure.series, {series: line_colour(series, colours) for series in figure.series})
    rows = len(figure.series) if figure.kind == "distribution" else len(figure.series[0].x) if figure.series else 0
    height = 420 if figure.kind == "lines" else _AXIS_HEIGHT + _BAR_HEIGHT * rows
    return {"data": data, "layout": _layout(figure, height=height), "height": height}


def _line_traces(series: Sequence[Series], colours: Mapping[Series, str]) -> list[dict[str, Any]]:
    traces = []
    lines = [line for line in series if line.emphasis == "normal"]
    for line in sorted(series, key=lambda one: _LAYERS[one.emphasis]):
        trace: dict[str, Any] = {
            "type": "scatter",
            "mode": "lines",
            "name": literal(line.name),
            **positions(line.x),
            "y": numbers(line.y),
        }
        if line.emphasis == "marks":
            trace |= {"mode": "markers", "marker": {"symbol": "x-thin", "size": 9, "line": {"color": colours[line], "width": 2.5}}}
        elif line.emphasis == "faint":
            trace |= {"line": {"color": colours[line], "width": 1}, "opacity": 0.4, "showlegend": False, "hoverinfo": "skip"}
            trace["legendgroup"] = line.role
        else:
            # Losses of different precisions often lie on each other; through a dashed line the one below is seen.
            trace["line"] = {
                "color": colours[line],
                "width": 2.5 if lines.index(line) else 3.5,
                "dash": _DASHES[lines.index(line) % len(_DASHES)],
            }
            trace["legendgroup"] = line.role
        traces.append(trace)
    return traces


def _box_traces(series: Sequence[Series], colours: Mapping[Series, str]) -> list[dict[str, Any]]:
    return [
        {
            "type": "box",
            "name": literal(box.name),
            "x": numbers(box.y),
            "boxpoints": "all" if len(box.y) <= _MOST_DOTS else "outliers",
            # The dots lie in a band of their own below the box, so that neither hides the other.
            "jitter": 0.6,
            "pointpos": 1.8,
            "width": 0.32,
            "fillcolor": "var(--clear)",
            "line": {"color": colours[box], "width": 2},
            "marker": {"color": colours[box], "size": 4, "opacity": 0.45},
            "hoveron": "boxes",
        }
        for box in series
    ]


def _bar_traces(series: Sequence[Series], colours: Mapping[Series, str]) -> list[dict[str, Any]]:
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": literal(part.name),
            "x": numbers(part.y),
            "y": [literal(str(name)) for name in part.x],
            "width": 0.6,
            "marker": {"color": colours[part], "line": {"color": "var(--surface)", "width": 1}},
        }
        for part in series
    ]


def _axis(axis: Axis) -> dict[str, Any]:
    return {
        "title": {"text": literal(str(axis)), "standoff": 12, "font": {"size": 13}},
        **axis_scale(axis),
        "automargin": True,
        "gridcolor": "var(--grid)",
        "linecolor": "var(--line)",
        "zeroline": False,
        "exponentformat": "power",
    }


def _layout(figure: Figure, *, height: int) -> dict[str, Any]:
    layout = base_layout(height=height)
    layout |= {
        "hovermode": "x unified" if figure.kind == "lines" else "closest",
        "xaxis": _axis(figure.x),
        "yaxis": _axis(figure.y),
    }
    if figure.kind == "lines" and figure.x.scale == "linear":
        layout["xaxis"] |= tight_range(place for line in figure.series for place in line.x if not isinstance(place, str))
    if figure.kind != "lines":
        # The names are on the axis, in the order of the document from the top down.
        layout["yaxis"] = {"type": "category", "automargin": True, "autorange": "reversed", "tickfont": {"color": "var(--ink)", "size": 14}}
        layout["showlegend"] = figure.kind == "stacked_bars"
    if figure.kind == "stacked_bars":
        layout["barmode"] = "stack"
        layout["legend"]["traceorder"] = "normal"
    return layout
