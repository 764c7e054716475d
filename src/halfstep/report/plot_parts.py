"""What every plot is made of: texts, numbers and positions as plotly.js takes them."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from halfstep.report.document import Axis, Series

__all__ = ["FREE_COLOURS", "axis_scale", "base_layout", "line_colour", "literal", "numbers", "positions", "tight_range"]

# The CSS variables of roles that have no colour of their own.
FREE_COLOURS = tuple(f"--series-{number}" for number in range(1, 7))


def line_colour(series: Series, colours: Mapping[str, str]) -> str:
    """The colour of a series, as the name of a CSS variable.

    Args:
        series: The series.
        colours: The CSS variable of each role.

    Example:
        >>> line_colour(Series(name="fp16", y=(), role="fp16"), {"fp16": "--fp16"})
        'var(--fp16)'
    """
    return f"var({colours.get(series.role, FREE_COLOURS[0])})"


def literal(text: str) -> str:
    """Text as plotly shows it unchanged: plotly reads a few HTML tags and entities in every text.

    Example:
        >>> literal("<b>")
        '&lt;b&gt;'
    """
    return html.escape(text, quote=False)


def numbers(values: Iterable[float], *, digits: int = 6) -> list[float | None]:
    """Numbers with as many digits as a screen can show, which keeps the page small; `None`, a gap, for what is not finite.

    Example:
        >>> numbers((1.23456789, float("nan")))
        [1.23457, None]
    """
    # The largest of all floats is no float any more when it is rounded up.
    rounded = (float(f"{value:.{digits}g}") for value in values)
    return [value if math.isfinite(value) else None for value in rounded]


def positions(x: Sequence[float] | Sequence[str]) -> dict[str, Any]:
    """The x of a trace; whole numbers one apart, as steps are, take no room.

    Example:
        >>> positions((3, 4, 5)), positions((3, 5))
        ({'x0': 3, 'dx': 1}, {'x': [3, 5]})
    """
    whole = [value for value in x if isinstance(value, int)]
    if len(whole) == len(x) > 1 and whole == list(range(whole[0], whole[0] + len(whole))):
        return {"x0": whole[0], "dx": 1}
    return {"x": [literal(value) if isinstance(value, str) else value for value in x]}


def tight_range(places: Iterable[float]) -> dict[str, Any]:
    """The range of an axis that shows these places and hardly more; nothing where there is no such range.

    Left alone, plotly makes room for whole markers, and the axis begins before there was anything.

    Example:
        >>> tight_range((0.0, 100.0)), tight_range((3.0,))
        ({'range': [-1.2, 101.2]}, {})
    """
    known = [place for place in places if math.isfinite(place)]
    if not known or min(known) == max(known):
        return {}
    margin = 0.012 * (max(known) - min(known))
    return {"range": [min(known) - margin, max(known) + margin]}


def axis_scale(axis: Axis) -> dict[str, Any]:
    """How the numbers of an axis are spread along it.

    Example:
        >>> axis_scale(Axis(label="Memory", scale="from_zero"))
        {'type': 'linear', 'rangemode': 'tozero'}
    """
    if axis.scale == "from_zero":
        return {"type": "linear", "rangemode": "tozero"}
    # Between the decades, the 2 and the 5: a log axis that spans few decades would otherwise have hardly any label.
    return {"type": "linear"} if axis.scale == "linear" else {"type": "log", "dtick": "D2"}


def base_layout(*, height: int) -> dict[str, Any]:
    """The layout that all plots have: clear ground, the page's own colours.

    Args:
        height: In pixels.

    Example:
        >>> base_layout(height=420)["height"]
        420
    """
    return {
        "height": height,
        "margin": {"l": 12, "r": 12, "t": 12, "b": 12},
        "paper_bgcolor": "var(--clear)",
        "plot_bgcolor": "var(--clear)",
        "font": {"color": "var(--ink-soft)", "size": 13},
        "hoverlabel": {"bgcolor": "var(--surface)", "bordercolor": "var(--line)", "font": {"color": "var(--ink)"}},
        "hovermode": "closest",
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom", "font": {"color": "var(--ink)"}},
        "modebar": {"bgcolor": "var(--clear)", "color": "var(--ink-soft)", "activecolor": "var(--ink)"},
    }
