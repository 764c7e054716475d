"""From what is named on the command line to the files that are checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from halfstep.errors import ConfigurationError

__all__ = ["SKIPPED_FOLDERS", "Discovery", "find_files", "is_left_out"]

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
# What a virtual environment has, whatever it is called.
_ENVIRONMENT: Final = "pyvenv.cfg"


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
        is_excluded: Whether the user does not want this file or folder to be checked. What is in a folder need not be known by it.
        exclude_named: Whether what is named is left out, too, where a walk through the folders around it would leave it out.

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
        if exclude_named and is_left_out(path, is_excluded=is_excluded):
            continue
        for file in _below(path, is_excluded, unread) if path.is_dir() else (path,):
            # One that is found twice, as through a link, would be fixed twice at once.
            real = os.path.realpath(file)
            files[real] = _better(files.get(real), file)
    return Discovery(files=tuple(sorted(files.values(), key=lambda file: file.parts)), unread=tuple(unread))


def is_left_out(path: Path, *, is_excluded: Callable[[Path], bool]) -> bool:
    """Whether a walk would not come to a file or folder: because it, a folder that it is in, or what it leads to is excluded.

    Folders that are passed over for their names count below the current folder: that one may well lie in a folder called `build`.

    Args:
        path: The file or folder; it need not exist.
        is_excluded: Whether the user does not want this file or folder to be checked.

    Example:
        >>> [is_left_out(Path(name), is_excluded=lambda path: path.name == "old") for name in ("old/deep/a.py", "build/a.py", "a.py")]
        [True, True, False]
    """
    return _is_apart(Path(os.path.abspath(path)), is_excluded) or _leads_apart(path, is_excluded)


def _leads_apart(path: Path, is_excluded: Callable[[Path], bool]) -> bool:
    """Whether it is a link to something that is left out: to fix the one is to change the other."""
    return path.is_symlink() and _is_apart(Path(os.path.realpath(path)), is_excluded)


def _is_apart(absolute: Path, is_excluded: Callable[[Path], bool]) -> bool:
    here = Path.cwd()
    around = (absolute, *absolute.parents)[:-1]
    if any(is_excluded(each) for each in around):
        return True
    folders = around if absolute.is_dir() else around[1:]
    return any(here in each.parents and _is_passed_over(each) for each in folders)


def _is_passed_over(folder: Path) -> bool:
    return folder.name in SKIPPED_FOLDERS or (folder / _ENVIRONMENT).exists()


def _better(known: Path | None, file: Path) -> Path:
    """One of two names of a file: the file itself rather than a link to it, otherwise the one that came first."""
    return file if known is None or (known.is_symlink() and not file.is_symlink()) else known


def _below(top: Path, is_excluded: Callable[[Path], bool], unread: list[str]) -> Iterator[Path]:
    def give_up(error: OSError) -> None:
        unread.append(f"{Path(error.filename)}: {error.strerror}")

    for name, folders, files in os.walk(top, onerror=give_up):
        folder = Path(name)
        if folder != top and _ENVIRONMENT in files:
            folders.clear()
            continue
        # Sorted, because file systems list in any order, and what comes first counts.
        folders[:] = sorted(each for each in folders if each not in SKIPPED_FOLDERS and not is_excluded(folder / each))
        for each in sorted(files):
            path = folder / each
            if each.endswith(_SUFFIXES) and not is_excluded(path) and not _leads_apart(path, is_excluded) and _may_be_file(path):
                yield path


def _may_be_file(path: Path) -> bool:
    """Whether it is a file, as far as that can be seen: who reads it says what is wrong with it."""
    try:
        return path.is_file()
    except OSError:
        return True
