"""The names of `halfstep.report`, which load on first use."""

from __future__ import annotations

from importlib import import_module

import pytest

import halfstep.report
from tests.test_package import run


@pytest.mark.parametrize("name", halfstep.report.__all__)
def test_every_name_resolves(name: str) -> None:
    value = getattr(halfstep.report, name)
    module = import_module(f"halfstep.report.{halfstep.report._HOMES[name]}")
    assert value is getattr(module, name)
    assert name in module.__all__
    assert name in dir(halfstep.report)


def test_no_name_is_missing() -> None:
    assert set(halfstep.report._HOMES) == set(halfstep.report.__all__)
    with pytest.raises(AttributeError, match=r"^module 'halfstep\.report' has no attribute 'nonsense'$"):
        halfstep.report.nonsense  # noqa: B018


def test_lines_load_no_pages() -> None:
    code = "import sys, halfstep.report.lint; print(*sorted({'jinja2', 'plotly', 'rich', 'numpy', 'torch', 'cattrs'} & set(sys.modules)))"
    assert run(code) == ""
