"""Functions are replaced, are left out of what warnings name, and are put back."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from halfstep.watching.patches import Patches


class Base:
    def run(self) -> str:
        """Runs."""
        return "base"

    def warn(self) -> None:
        warnings.warn("late", UserWarning, stacklevel=2)


class Derived(Base):
    pass


def around(name: str) -> Callable[[Any], Callable[..., Any]]:
    def make(original: Any) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return f"{name}({original(*args, **kwargs)})"

        return replacement

    return make


def through(original: Any) -> Callable[..., Any]:
    def call(self: Any) -> Any:
        return original(self)

    return call


def test_a_method_is_put_back_itself() -> None:
    before = vars(Base)["run"]
    patches = Patches()
    patches.wrap(Base, "run", around("seen"))
    assert (Base().run(), Derived().run()) == ("seen(base)", "seen(base)")
    patches.undo()
    assert vars(Base)["run"] is before


def test_what_a_class_inherits_it_inherits_again() -> None:
    patches = Patches()
    patches.wrap(Derived, "run", around("seen"))
    assert (Base().run(), Derived().run()) == ("base", "seen(base)")
    patches.undo()
    assert "run" not in vars(Derived)
    assert Derived().run() == "base"


def test_what_is_replaced_twice_is_put_back_in_turn() -> None:
    before = vars(Base)["run"]
    patches = Patches()
    patches.wrap(Base, "run", around("first"))
    patches.wrap(Base, "run", around("second"))
    assert Base().run() == "second(first(base))"
    patches.undo()
    assert vars(Base)["run"] is before
    patches.undo()  # There is nothing left to do.
    assert vars(Base)["run"] is before


def test_a_function_of_a_module_is_put_back() -> None:
    module: Any = types.ModuleType("loops")
    module.run = before = lambda: "ran"
    patches = Patches()
    patches.wrap(module, "run", around("seen"))
    assert module.run() == "seen(ran)"
    patches.undo()
    assert module.run is before


def test_what_stands_in_between_looks_like_what_it_replaces() -> None:
    patches = Patches()
    patches.wrap(Base, "run", around("seen"))
    try:
        replaced: Any = Base.run
        assert (replaced.__name__, replaced.__qualname__, replaced.__doc__) == ("run", "Base.run", "Runs.")
        assert replaced.__module__ == __name__
    finally:
        patches.undo()


def test_a_warning_names_the_line_that_calls_and_no_line_in_between() -> None:
    patches = Patches()
    patches.wrap(Base, "warn", through)
    patches.wrap(Base, "warn", through)
    try:
        with pytest.warns(UserWarning, match="late") as seen:
            Base().warn()
    finally:
        patches.undo()
    with pytest.warns(UserWarning, match="late") as alone:
        Base().warn()
    assert seen[0].filename == alone[0].filename == __file__
    assert alone[0].lineno - seen[0].lineno == 4


def test_each_replacement_has_code_of_its_own() -> None:
    """Two of the same function must not share what one of them is marked with."""
    patches = Patches()
    code = through(None).__code__
    patches.wrap(Base, "warn", through)
    try:
        assert code.co_filename == __file__
        assert vars(Base)["warn"].__code__ is not code
    finally:
        patches.undo()


def test_what_is_not_there_is_not_replaced() -> None:
    patches = Patches()
    with pytest.raises(AttributeError, match="walk"):
        patches.wrap(Base, "walk", around("seen"))
    patches.undo()
    assert Base().run() == "base"


class TestPauses:
    def test_what_pauses_is_put_back_for_a_while(self) -> None:
        before = vars(Base)["run"]
        patches = Patches()
        patches.wrap(Base, "run", around("seen"), pauses=True)
        patches.wrap(Base, "warn", through)
        replaced = vars(Base)["warn"]
        patches.pause()
        assert vars(Base)["run"] is before
        assert vars(Base)["warn"] is replaced
        patches.pause()
        patches.resume()
        patches.resume()
        assert Base().run() == "seen(base)"
        patches.pause()
        patches.undo()
        assert vars(Base)["run"] is before
        patches.resume()
        assert vars(Base)["run"] is before

    def test_what_somebody_else_has_replaced_since_is_left_alone(self) -> None:
        mine, others = Patches(), Patches()
        mine.wrap(Base, "run", around("mine"), pauses=True)
        others.wrap(Base, "run", around("others"))
        mine.pause()
        assert Base().run() == "others(mine(base))"
        mine.resume()
        assert Base().run() == "others(mine(base))"
        others.undo()
        mine.undo()
        assert Base().run() == "base"
