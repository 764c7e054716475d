"""Figures as the JSON that plotly.js draws. Plotly itself is not needed here: a plot is nothing but dictionaries and lists.

Colours are written as the names of CSS variables (`var(--ink)`), and the page puts the values in. So one plot serves a light and a dark
page, and can change from one to the other.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from halfstep.report.document import Axis, Document, Emphasis, Figure, Series

__all__ = ["plot", "role_colours"]

# Precisions have the same colour in every report; other roles take the next free one.
_FIXED = {"fp32": "--fp32", "bf16": "--bf16", "fp16": "--fp16"}
_FREE = tuple(f"--series-{number}" for number in range(1, 7))

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
            colours[role] = _FREE[free % len(_FREE)]
            free += 1
    return colours


def _roles(document: Document) -> Iterable[str]:
    for section in document.sections:
        yield from (card.role for card in section.cards)
        yield from (column.role for table in section.tables for column in table.columns)
        yield from (series.role for figure in section.figures for series in figure.series)


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
    makers = {"lines": _line_traces, "distribution": _box_traces, "stacked_bars": _bar_traces}
    data = makers[figure.kind](figure.series, {series: _colour(series, colours) for series in figure.series})
    rows = len(figure.series) if figure.kind == "distribution" else len(figure.series[0].x) if figure.series else 0
    height = 420 if figure.kind == "lines" else _AXIS_HEIGHT + _BAR_HEIGHT * rows
    return {"data": data, "layout": _layout(figure, height=height), "height": height}


def _colour(series: Series, colours: Mapping[str, str]) -> str:
    return f"var({colours.get(series.role, _FREE[0])})"


def _literal(text: str) -> str:
    """Text as plotly shows it unchanged: plotly reads a few HTML tags and entities in every text."""
    return html.escape(text, quote=False)


def _numbers(values: Iterable[float]) -> list[float | None]:
    # Six digits are more than a screen can show, and keep the page small.
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def _positions(x: Sequence[float] | Sequence[str]) -> dict[str, Any]:
    """The x of a trace; whole numbers one apart, as steps are, take no room."""
    numbers = [value for value in x if isinstance(value, int)]
    if len(numbers) == len(x) > 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return {"x0": numbers[0], "dx": 1}
    return {"x": [_literal(value) if isinstance(value, str) else value for value in x]}


def _line_traces(series: Sequence[Series], colours: Mapping[Series, str]) -> list[dict[str, Any]]:
    traces = []
    lines = [line for line in series if line.emphasis == "normal"]
    for line in sorted(series, key=lambda one: _LAYERS[one.emphasis]):
        trace: dict[str, Any] = {
            "type": "scatter",
            "mode": "lines",
            "name": _literal(line.name),
            **_positions(line.x),
            "y": _numbers(line.y),
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
            "name": _literal(box.name),
            "x": _numbers(box.y),
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
            "name": _literal(part.name),
            "x": _numbers(part.y),
            "y": [_literal(str(name)) for name in part.x],
            "width": 0.6,
            "marker": {"color": colours[part], "line": {"color": "var(--surface)", "width": 1}},
        }
        for part in series
    ]


def _axis(axis: Axis) -> dict[str, Any]:
    return {
        "title": {"text": _literal(str(axis)), "standoff": 12, "font": {"size": 13}},
        "type": axis.scale,
        "automargin": True,
        "gridcolor": "var(--grid)",
        "linecolor": "var(--line)",
        "zeroline": False,
        "exponentformat": "power",
        # Between the decades, the 2 and the 5: a log axis that spans few decades would otherwise have hardly any label.
        **({"dtick": "D2"} if axis.scale == "log" else {}),
    }


def _tight_range(series: Sequence[Series]) -> dict[str, Any]:
    positions = [x for line in series for x in line.x if not isinstance(x, str) and math.isfinite(x)]
    if not positions or min(positions) == max(positions):
        return {}
    margin = 0.012 * (max(positions) - min(positions))
    return {"range": [min(positions) - margin, max(positions) + margin]}


def _layout(figure: Figure, *, height: int) -> dict[str, Any]:
    layout: dict[str, Any] = {
        "height": height,
        "margin": {"l": 12, "r": 12, "t": 12, "b": 12},
        "paper_bgcolor": "var(--clear)",
        "plot_bgcolor": "var(--clear)",
        "font": {"color": "var(--ink-soft)", "size": 13},
        "hoverlabel": {"bgcolor": "var(--surface)", "bordercolor": "var(--line)", "font": {"color": "var(--ink)"}},
        "hovermode": "x unified" if figure.kind == "lines" else "closest",
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom", "font": {"color": "var(--ink)"}},
        "modebar": {"bgcolor": "var(--clear)", "color": "var(--ink-soft)", "activecolor": "var(--ink)"},
        "xaxis": _axis(figure.x),
        "yaxis": _axis(figure.y),
    }
    if figure.kind == "lines" and figure.x.scale == "linear":
        # Left alone, plotly makes room for whole markers, and the axis begins before there was anything.
        layout["xaxis"] |= _tight_range(figure.series)
    if figure.kind != "lines":
        # The names are on the axis, in the order of the document from the top down.
        layout["yaxis"] = {"type": "category", "automargin": True, "autorange": "reversed", "tickfont": {"color": "var(--ink)", "size": 14}}
        layout["showlegend"] = figure.kind == "stacked_bars"
    if figure.kind == "stacked_bars":
        layout["barmode"] = "stack"
        layout["legend"]["traceorder"] = "normal"
    return layout
