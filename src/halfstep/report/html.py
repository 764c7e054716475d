"""A document as one HTML file that needs nothing else: no network, no other file."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from halfstep.files import write_text
from halfstep.report.document import Document
from halfstep.report.plots import plot, role_colours

__all__ = ["render_html", "write_html"]

# Inside <script> these end the element or begin a comment; JSON may write each of them as an escape instead.
_SCRIPT_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def render_html(document: Document) -> str:
    """A document as a self-contained page: interactive figures, light and dark, readable on a phone and without JavaScript.

    Everything that the document says is escaped, and the page's Content-Security-Policy allows no network and no script but its own.

    Args:
        document: What to show.

    Example:
        >>> page = render_html(Document(kind="Precision comparison", title="<b>digits</b>", conclusion="Train in bf16."))
        >>> "&lt;b&gt;digits&lt;/b&gt;" in page, "<b>digits</b>" in page
        (True, False)
    """
    colours = role_colours(document)
    figures = [figure for section in document.sections for figure in section.figures]
    plots = [plot(figure, colours=colours) for figure in figures]
    drawn = [
        {"data": one["data"], "layout": one["layout"], "linked": figure.kind == "timeline"}
        for figure, one in zip(figures, plots, strict=True)
    ]
    scripts = [_plotly_js(), _asset("page.js")] if plots else []
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_asset("page.html.j2")).render(
        document=document,
        colours=colours,
        heights=[one["height"] for one in plots],
        plots=_script_json(drawn),
        style=Markup(_asset("page.css")),
        scripts=[Markup(script) for script in scripts],
        hashes=[_csp_hash(script) for script in scripts],
    )


def write_html(document: Document, path: str | os.PathLike[str]) -> Path:
    """Writes a document as one HTML file. A file that is already there is replaced whole, or stays as it was.

    Args:
        document: What to show.
        path: The file.

    Returns:
        The file.

    Raises:
        ConfigurationError: The folder does not exist, the path is itself a folder, or the file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_html(Document(kind="Report", title="digits", conclusion="Train in bf16."), f"{folder}/report.html").name
        'report.html'
    """
    target = Path(path)
    # A name may hold half a surrogate pair, which no file can: a path on Linux, or JSON from elsewhere.
    page = render_html(document).encode(errors="replace").decode()
    write_text(target, page)
    return target


def _asset(name: str) -> str:
    return files("halfstep.report").joinpath(name).read_text(encoding="utf-8")


def _plotly_js() -> str:
    # Plotly is heavy, and only a page needs it.
    from plotly.offline import get_plotlyjs  # noqa: PLC0415

    script: str = get_plotlyjs()
    return script


def _script_json(value: Any) -> Markup:
    """JSON that is safe inside a script element, whatever texts it holds."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character, escape in _SCRIPT_ESCAPES.items():
        text = text.replace(character, escape)
    return Markup(text)


def _csp_hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
