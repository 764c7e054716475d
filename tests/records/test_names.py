"""The names of `halfstep.records`, which load on first use."""

from __future__ import annotations

from importlib import import_module

import pytest

import halfstep.records
from tests.test_package import run


@pytest.mark.parametrize("name", halfstep.records.__all__)
def test_every_name_resolves(name: str) -> None:
    value = getattr(halfstep.records, name)
    module = import_module(f"halfstep.records.{halfstep.records._HOMES[name]}")
    assert value is getattr(module, name)
    assert name in module.__all__
    assert name in dir(halfstep.records)


def test_no_name_is_missing() -> None:
    assert set(halfstep.records._HOMES) == set(halfstep.records.__all__)
    with pytest.raises(AttributeError, match=r"^module 'halfstep\.records' has no attribute 'nonsense'$"):
        halfstep.records.nonsense  # noqa: B018


def test_one_record_does_not_load_the_others() -> None:
    code = "import sys; from halfstep.records import Violation; print('cattrs' in sys.modules, 'halfstep.records.diagnosis' in sys.modules)"
    assert run(code) == "False False"
