"""Timelines as the JSON that plotly.js draws: lines of many values above each other, all over one axis, with lanes for events.

The plot area of every timeline begins and ends at the same places, so that what happened in one step stands in one column, whatever figure
it is in. Events have lanes of their own above and below the lines, so that neither hides the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from halfstep.report.document import Figure, MarkPlace, Marks, Tone
from halfstep.report.plot_parts import axis_scale, base_layout, line_colour, literal, numbers, positions, tight_range

__all__ = ["timeline_plot"]

# Pixels: of the lines, of one lane, of what is around them.
_LINES: Final = 176
_LANE: Final = 15
_MARGINS: Final = {"l": 62, "r": 14, "t": 26, "b": 28}
_LEGEND: Final = 18

_TONES: Final[dict[Tone, str]] = {"neutral": "--accent", "good": "--good", "warning": "--warn-line", "bad": "--bad"}

_SYMBOLS: Final[dict[MarkPlace, dict[str, Any]]] = {
    "throughout": {"symbol": "circle", "size": 9},
    "above": {"symbol": "triangle-up", "size": 8},
    "between": {"symbol": "square", "size": 8},
    "below": {"symbol": "line-ns", "size": 10},
}

_DASHES: Final = ("solid", "6px,4px", "2px,4px", "10px,4px,2px,4px")

# Beyond this ratio an axis has labels at the decades alone.
_DECADES_ALONE: Final = 100.0

# So many labels at most stand beside an axis of powers of two, and up to this one they are written out.
_MOST_POWERS: Final = 5
_LAST_WRITTEN_OUT: Final = 16

# The last power of two that is a float.
_LAST_POWER: Final = 1023


def timeline_plot(figure: Figure, *, colours: Mapping[str, str]) -> dict[str, Any]:
    """A timeline as the data and the layout of plotly.js, and its height in pixels.

    Args:
        figure: The figure.
        colours: The CSS variable of each role.

    Returns:
        JSON-like values under `data`, `layout` and `height`; numbers that are not finite became `None`, which leaves a gap.

    Example:
        >>> from halfstep.report.document import Axis, Series
        >>> skips = Marks(name="skipped steps", x=(2,), texts=("step 2 was skipped",), place="below")
        >>> figure = Figure(title="Loss", kind="timeline", x=Axis(label="Step"), y=Axis(label="Loss"),
        ...     series=(Series(name="fp16", x=(1, 2), y=(0.5, 0.4)),), marks=(skips,))
        >>> [trace["yaxis"] for trace in timeline_plot(figure, colours={})["data"]]
        ['y', 'y2']
    """
    above = _lanes(marks for marks in figure.marks if marks.place != "below")
    below = _lanes(marks for marks in figure.marks if marks.place == "below")
    has_legend = sum(line.emphasis == "normal" for line in figure.series) > 1
    margins = {**_MARGINS, "t": _MARGINS["t"] + _LEGEND * has_legend}
    inner = _LINES + _LANE * (len(above) + len(below))
    height = inner + margins["t"] + margins["b"]
    layout = base_layout(height=height)
    layout |= {
        "margin": margins,
        "showlegend": has_legend,
        "hovermode": "x unified",
        # One label for the lines and the lanes.
        "hoversubplots": "axis",
        "xaxis": _step_axis(figure, anchor="y2" if below else "y"),
        "yaxis": _value_axis(figure, domain=[_LANE * len(below) / inner, 1 - _LANE * len(above) / inner]),
        "shapes": [_upright(marks, x, colours) for marks in figure.marks if marks.place == "throughout" for x in marks.x],
    }
    data = [*_lines(figure, colours)]
    for axis, lanes, domain in (
        ("2", below, [0, _LANE * len(below) / inner]),
        ("3", above, [1 - _LANE * len(above) / inner, 1]),
    ):
        if lanes:
            layout[f"yaxis{axis}"] = {"domain": domain, "range": [0, len(lanes)], "visible": False, "fixedrange": True, "anchor": "x"}
            data += [_lane(one, colours, axis=f"y{axis}", at=place + 0.5) for place, lane in enumerate(lanes) for one in lane]
    return {"data": data, "layout": layout, "height": height}


def _lanes(marks: Iterable[Marks]) -> list[list[Marks]]:
    """The marks that share a lane: those of one sort that are about the same."""
    lanes: dict[tuple[MarkPlace, str], list[Marks]] = {}
    for one in marks:
        place: MarkPlace = "throughout" if one.place == "between" else one.place
        lanes.setdefault((place, one.role), []).append(one)
    return list(lanes.values())


def _lines(figure: Figure, colours: Mapping[str, str]) -> list[dict[str, Any]]:
    traces = []
    digits = 10 if figure.y.scale == "log2" else 6
    has_others = sum(line.emphasis == "normal" for line in figure.series) > 1
    solid: dict[str, int] = {}
    for line in sorted(figure.series, key=lambda one: one.emphasis != "faint"):
        trace: dict[str, Any] = {
            "type": "scatter",
            "mode": "lines",
            "name": literal(line.name),
            **positions(line.x),
            "y": numbers(line.y, digits=digits),
            "yaxis": "y",
            "line": {"color": line_colour(line, colours), "width": 1},
            "legendgroup": f"{line.role} {solid.get(line.role, 0)}",
        }
        if line.emphasis == "faint":
            trace |= {"opacity": 0.45, "showlegend": False}
        else:
            # Lines of one colour, such as those of the optimizers of one run, differ in their dashes. The first one is wide, so that it is
            # seen where another one lies on it.
            is_first = has_others and not solid
            trace["line"] |= {"width": 3 if is_first else 1.75, "dash": _DASHES[solid.get(line.role, 0) % len(_DASHES)]}
            solid[line.role] = solid.get(line.role, 0) + 1
        traces.append(trace)
    return traces


def _lane(marks: Marks, colours: Mapping[str, str], *, axis: str, at: float) -> dict[str, Any]:
    colour = _mark_colour(marks, colours)
    return {
        "type": "scatter",
        "mode": "markers",
        "name": literal(marks.name),
        "x": list(marks.x),
        "y": [at] * len(marks.x),
        "yaxis": axis,
        "text": [literal(text) for text in marks.texts],
        "hovertemplate": "%{text}<extra></extra>",
        "showlegend": False,
        # Half of a mark at the first or the last step would be cut off.
        "cliponaxis": False,
        "marker": {"color": colour, "opacity": 1, **_SYMBOLS[marks.place], "line": {"color": colour, "width": 1.5}},
    }


def _mark_colour(marks: Marks, colours: Mapping[str, str]) -> str:
    return f"var({colours.get(marks.role, _TONES[marks.tone])})"


def _upright(marks: Marks, x: float, colours: Mapping[str, str]) -> dict[str, Any]:
    line = {"color": _mark_colour(marks, colours), "width": 1, "dash": "3px,3px"}
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line, "layer": "between"}


def _step_axis(figure: Figure, *, anchor: str) -> dict[str, Any]:
    places = figure.x.limits or [place for line in figure.series for place in line.x if not isinstance(place, str)]
    return {
        "anchor": anchor,
        "gridcolor": "var(--grid)",
        "linecolor": "var(--line)",
        "zeroline": False,
        # 250k and 1M: on a phone, longer numbers would run into each other.
        "tickformat": "~s" if max(places, default=0) >= 10_000 else ",d",
        "hoverformat": ",d",
        "unifiedhovertitle": {"text": f"{literal(figure.x.label)} %{{x:,d}}"},
        **tight_range(places),
    }


def _value_axis(figure: Figure, *, domain: list[float]) -> dict[str, Any]:
    axis = {
        "domain": domain,
        **axis_scale(figure.y),
        "gridcolor": "var(--grid)",
        "zeroline": False,
        "exponentformat": "power",
        "hoverformat": ",.10~r" if figure.y.scale == "log2" else ",.4~r",
        "nticks": 6,
    }
    known = [value for line in figure.series for value in line.y if math.isfinite(value) and value > 0]
    ticks = {"log": _decade_ticks, "log2": _power_ticks}.get(figure.y.scale)
    return axis | (ticks(min(known), max(known)) if ticks is not None and known else {})


def _decade_ticks(smallest: float, largest: float) -> dict[str, Any]:
    """Labels at the decades, or also at the 2 and the 5 between them where there are few of those."""
    if largest > _DECADES_ALONE * smallest:
        return {"dtick": max(1, math.ceil((math.log10(largest) - math.log10(smallest)) / _MOST_POWERS))}
    # Left alone, plotly writes a small 2 and a small 5, whose decade is to be guessed.
    is_short = smallest >= 1e-3 and largest < 1e5
    return {"dtick": "D2", "tickformat": ",.1~r" if is_short else ".0e"}


def _power_ticks(smallest: float, largest: float) -> dict[str, Any]:
    """Labels at powers of two, evenly far from each other: loss scales are nothing else."""
    low, high = math.floor(math.log2(smallest)), min(math.ceil(math.log2(largest)), _LAST_POWER)
    apart = max(1, math.ceil((high - low + 1) / _MOST_POWERS))
    powers = list(range(low, high + 1, apart))
    is_long = low < 0 or high > _LAST_WRITTEN_OUT
    return {
        "tickmode": "array",
        "tickvals": [2.0**power for power in powers],
        "ticktext": [f"2<sup>{power}</sup>" if is_long else f"{2**power:,}" for power in powers],
        "range": [math.log10(2) * (low - 0.5), math.log10(2) * (high + 0.5)],
        "fixedrange": True,  # Between the labels there is nothing to see.
    }
