"""Hypothesis strategies for what every record is made of: numbers, texts, tuples."""

from __future__ import annotations

from hypothesis import strategies as st

__all__ = ["floats", "texts", "tuples"]

_AWKWARD_TEXTS = ("</script>", "<!--", "a & b", '"quoted"', "back\\slash", "NaN", "\u2028\u2029", "\x00\x1f", "\U0001f600", "null", "")


def floats() -> st.SearchStrategy[float]:
    """Any float: NaN, both infinities, subnormal numbers and -0.0 included."""
    return st.floats() | st.sampled_from([float("nan"), float("inf"), float("-inf"), -0.0, 5e-324])


def texts() -> st.SearchStrategy[str]:
    """Any text that UTF-8 can hold, with what breaks out of HTML, JSON or a line well represented."""
    return st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(_AWKWARD_TEXTS)


def tuples(items: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(items, max_size=4).map(tuple)
