from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import ConfigurationError
from halfstep.watching.scripts import Script, check_script


@given(st.text(), st.lists(st.text()), st.booleans())
def test_a_command_is_what_a_shell_takes(target: str, arguments: list[str], is_module: bool) -> None:
    command = Script(target=target, arguments=tuple(arguments), is_module=is_module).command
    assert shlex.split(command) == [*(["-m"] if is_module else []), target, *arguments]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a script and a package that must not be imported."""
    (tmp_path / "train.py").write_text("1 / 0")
    (tmp_path / "research_of_mine").mkdir()
    (tmp_path / "research_of_mine" / "__init__.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    return tmp_path


class TestCheck:
    @pytest.mark.parametrize("target", ["train.py", "./train.py", "research_of_mine", "-", os.devnull])
    def test_what_is_there(self, here: Path, target: str) -> None:
        check_script(Script(target=target))

    @pytest.mark.parametrize("target", ["train", "research_of_mine", "research_of_mine.train", "research_of_mine.nope", "json.tool"])
    def test_a_module_that_may_be_there(self, here: Path, target: str) -> None:
        before = {*sys.modules}
        check_script(Script(target=target, is_module=True))
        assert "research_of_mine" not in {*sys.modules} - before

    @pytest.mark.parametrize(
        ("target", "message"),
        [
            (
                "trian.py",
                r"^There is no 'trian\.py' to run in .*\. Did you mean 'train\.py'\? Name what python runs: a file",
            ),
            ("sub/train.py", r"^There is no 'sub/train\.py' to run, and no folder 'sub'\. Name what python runs"),
            ("", r"^There is no '' to run in "),
        ],
    )
    def test_a_file_that_is_not_there(self, here: Path, target: str, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            check_script(Script(target=target))

    @pytest.mark.parametrize("target", ["no_such_thing", "no_such_thing.train", ".train", ""])
    def test_a_module_that_is_not_there(self, here: Path, target: str) -> None:
        with pytest.raises(ConfigurationError, match=r"^There is no module '\w*' for -m .*\. Modules are looked for in .* and"):
            check_script(Script(target=target, is_module=True))

    def test_the_path_of_a_file_as_a_module(self, here: Path) -> None:
        (here / "of_mine").mkdir()
        (here / "of_mine" / "run-it.py").touch()
        with pytest.raises(ConfigurationError, match=r"For the file: halfstep run of_mine/run-it\.py$"):
            check_script(Script(target="of_mine/run-it.py", is_module=True))
