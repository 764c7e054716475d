"""`halfstep lint` as a process, with the real rules, and the hooks that start it."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_process import read_terminal

ROOT = Path(__file__).parents[2]
# What PyTorch's documentation warns of first.
CLIPPED = """\
import torch

scaler = torch.amp.GradScaler("cuda")


def train(model, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x, y)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the command runs in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


class TestProcess:
    def words(self, *words: object) -> list[str]:
        return [sys.executable, "-m", "halfstep", "lint", *map(str, words)]

    def test_a_mistake_is_found_and_fixed(self, folder: Path) -> None:
        path = folder / "train.py"
        path.write_text(CLIPPED)
        done = subprocess.run(self.words(path, "--format", "json"), capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (1, "")
        assert [(found["rule"], found["line"], found["fix"]) for found in json.loads(done.stdout)] == [("clip_before_unscale", 12, "safe")]
        done = subprocess.run(self.words(path, "--fix"), capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        clip = "        torch.nn.utils.clip_grad_norm_"
        assert path.read_text() == CLIPPED.replace(clip, f"        scaler.unscale_(optimizer)\n{clip}")

    @pytest.mark.parametrize("options", [[], ["--format", "json"], ["--format", "github"], ["--statistics"]])
    def test_it_loads_nothing_heavy(self, folder: Path, options: list[str]) -> None:
        (folder / "train.py").write_text(CLIPPED)
        command = [sys.executable, "-X", "importtime", "-m", "halfstep", "lint", "train.py", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        loaded = {module.split(".")[0] for module in modules}
        assert {"ast", "click", "halfstep"} <= loaded
        heavy = {"torch", "numpy", "plotly", "jinja2", "rich", "libcst", "cattrs", "tomlkit", "multiprocessing", "concurrent"}
        assert not heavy & loaded
        assert not {"halfstep.lint.fixing", "halfstep.records.run", "halfstep.records.codec", "halfstep.report.html"} & modules

    def test_a_terminal_shows_colours(self, folder: Path) -> None:
        (folder / "train.py").write_text(CLIPPED)
        shown: dict[str, str] = {}
        for name, more in (("colours", {}), ("none", {"NO_COLOR": "1"})):
            ours, theirs = pty.openpty()
            environment = {**os.environ, "TERM": "xterm", **more}
            environment.pop("NO_COLOR", None) if not more else None
            with subprocess.Popen(self.words("train.py"), stdout=theirs, stderr=theirs, env=environment):
                os.close(theirs)
                shown[name] = read_terminal(ours)
            os.close(ours)
        assert "\x1b[1;31mHS002\x1b[0m" in shown["colours"]
        assert "\x1b[1;31m" not in shown["none"]
        assert "clip_before_unscale" in shown["none"]

    def test_a_terminal_without_a_character_shows_it_escaped(self, folder: Path) -> None:
        (folder / "é.py").write_text(CLIPPED)
        ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "ascii"}
        with subprocess.Popen(self.words("é.py"), stdout=theirs, stderr=theirs, env=environment):
            os.close(theirs)
            shown = read_terminal(ours)
        os.close(ours)
        assert "\\xe9.py:12:9" in shown
        assert "1 finding in 1 of 1 file." in shown

    def test_a_reader_that_leaves_changes_no_exit_code(self, folder: Path) -> None:
        (folder / "train.py").write_text(CLIPPED)
        read, write = os.pipe()
        os.close(read)
        with os.fdopen(write, "wb") as closed:
            done = subprocess.run(self.words("train.py"), stdout=closed, stderr=subprocess.PIPE, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (1, b"")


class TestHooks:
    """The hooks for pre-commit. They are plain enough to be read without a parser of YAML."""

    def hooks(self) -> dict[str, dict[str, str]]:
        text = (ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")
        assert "\t" not in text
        hooks: dict[str, dict[str, str]] = {}
        for block in re.split(r"^- ", text, flags=re.MULTILINE)[1:]:
            lines = [line for line in block.splitlines() if not line.lstrip().startswith("#")]
            assert all(line.startswith("  ") for line in lines[1:])
            fields = dict(line.strip().split(": ", 1) for line in lines)
            hooks[fields["id"]] = fields
        return hooks

    def test_they_are_complete(self) -> None:
        assert list(self.hooks()) == ["halfstep-lint", "halfstep-lint-fix"]
        for hook in self.hooks().values():
            assert {key: hook[key] for key in ("language", "types_or", "require_serial")} == {
                "language": "python",
                "types_or": "[python, jupyter]",
                "require_serial": "true",
            }
            assert hook["name"].startswith("halfstep lint")
            assert hook["description"].endswith(".")

    @pytest.mark.parametrize(("hook", "is_fixed"), [("halfstep-lint", False), ("halfstep-lint-fix", True)])
    def test_their_commands_run(self, folder: Path, hook: str, is_fixed: bool) -> None:
        (folder / "train.py").write_text(CLIPPED)
        (folder / "excluded.py").write_text(CLIPPED)
        (folder / "pyproject.toml").write_text("[tool.halfstep.lint]\nexclude = ['excluded.py']\n")
        program, *words = shlex.split(self.hooks()[hook]["entry"])
        assert program == "halfstep"
        command = [sys.executable, "-m", program, *words, "train.py", "excluded.py"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (int(not is_fixed), "")
        assert ("unscale_" in (folder / "train.py").read_text()) is is_fixed
        assert (folder / "excluded.py").read_text() == CLIPPED
