"""From what is named on the command line to the files that are checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from halfstep.errors import ConfigurationError

__all__ = ["SKIPPED_FOLDERS", "Discovery", "find_files"]

# What is not the user's own code. A folder that is named on the command line is checked whatever it, or one above it, is called.
SKIPPED_FOLDERS: Final = frozenset(
    {
        *(".bzr", ".git", ".hg", ".jj", ".svn"),
        *(".direnv", ".eggs", ".nox", ".pixi", ".pyenv", ".tox", ".venv", "dist-packages", "node_modules", "site-packages", "venv"),
        *(".cache", ".hypothesis", ".ipynb_checkpoints", ".mypy_cache", ".pytest_cache", ".pytype", ".ruff_cache", "__pycache__"),
        *("__pypackages__", "_build", "build", "dist"),
    }
)
_SUFFIXES: Final = (".py", ".ipynb")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """What was found.

    Attributes:
        files: The files in order, each once. They begin as what was named does.
        unread: Folders that could not be looked into, with the reason.
    """

    files: tuple[Path, ...]
    unread: tuple[str, ...] = ()


def find_files(paths: Sequence[Path], *, is_excluded: Callable[[Path], bool], exclude_named: bool = False) -> Discovery:
    """The files that are checked when these paths are named: they themselves, and what is Python below those that are folders.

    A file that is named is checked whatever its name ends with. Below folders those with Python in them are found, `.py` and `.ipynb`;
    environments, caches, version control and build results are passed over, and so are links to folders.

    Args:
        paths: Files and folders.
        is_excluded: Whether the user does not want a file or folder to be checked.
        exclude_named: Whether that is asked about files that were named, too.

    Raises:
        ConfigurationError: One of the paths does not exist.

    Example:
        >>> find_files([Path("no/such/train.py")], is_excluded=lambda path: False)
        Traceback (most recent call last):
        ...
        halfstep.errors.ConfigurationError: There is no file or folder no/such/train.py. Name what is to be checked.
    """
    unread: list[str] = []
    files: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise ConfigurationError(f"There is no file or folder {path}. Name what is to be checked.")
        named = () if exclude_named and is_excluded(path) else (path,)
        for file in _below(path, is_excluded, unread) if path.is_dir() else named:
            # One that is found twice, as through a link, would be fixed twice at once. The name that comes first is kept.
            files.setdefault(os.path.realpath(file), file)
    return Discovery(files=tuple(sorted(files.values(), key=lambda file: file.parts)), unread=tuple(unread))


def _below(top: Path, is_excluded: Callable[[Path], bool], unread: list[str]) -> Iterator[Path]:
    def give_up(error: OSError) -> None:
        unread.append(f"{Path(error.filename)}: {error.strerror}")

    for name, folders, files in os.walk(top, onerror=give_up):
        folder = Path(name)
        if folder != top and "pyvenv.cfg" in files:  # A virtual environment by any other name.
            folders.clear()
            continue
        folders[:] = [each for each in folders if each not in SKIPPED_FOLDERS and not is_excluded(folder / each)]
        for each in files:
            path = folder / each
            if each.endswith(_SUFFIXES) and not is_excluded(path) and path.is_file():
                yield path
