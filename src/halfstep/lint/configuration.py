"""`[tool.halfstep.lint]` of a `pyproject.toml`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, final

from halfstep.errors import ConfigurationError, did_you_mean
from halfstep.lint.selection import RuleName, Selection, check_selectors

__all__ = ["Configuration", "Configurations"]

_NOTHING: Final = Selection()
_FILE: Final = "pyproject.toml"
_TABLE: Final = ("tool", "halfstep", "lint")
# What a glob's characters mean in a regular expression; `*` and `?` stay within one folder.
_GLOB: Final = re.compile(r"\*\*/|\*\*|\*|\?|\[!?\]?[^\]/]*\]|.", re.DOTALL)
# What is no name of a file or folder.
_NO_NAMES: Final = frozenset({"", ".", ".."})
_CHOICE: Final = re.compile(r"\{[^{}]*,[^{}]*\}")
_GLOB_PARTS: Final = MappingProxyType({"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"})


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What a project wants from `halfstep lint`.

    Globs are relative to the folder of the configuration. One without a slash is about every file or folder of that name, and one that fits
    a folder is about all that is in it. `**` stands for any number of folders.

    Attributes:
        folder: The folder of the configuration.
        selection: Which rules are on.
        exclude: Globs of files and folders that are not checked.
        per_file_ignores: Globs, and the rules that are off in files that they fit.
        unsafe_fixes: Whether `--fix` applies fixes that contain a decision, too.

    Example:
        >>> configuration = Configuration(folder=Path("/work"), exclude=("old", "tests/*.py"))
        >>> [configuration.excludes(Path("/work") / name) for name in ("a/old", "tests/a.py", "tests/a/b.py")]
        [True, True, False]
    """

    folder: Path
    selection: Selection = _NOTHING
    exclude: tuple[str, ...] = ()
    per_file_ignores: tuple[tuple[str, tuple[str, ...]], ...] = ()
    unsafe_fixes: bool = False

    def excludes(self, path: Path) -> bool:
        """Whether a file or folder is not to be checked, for what it is called itself and not for the folders that it is in."""
        return any(_fits_itself(glob, self._relative(path)) for glob in self.exclude)

    def ignored_in(self, path: Path) -> tuple[str, ...]:
        """The rules that are off in one file."""
        if not self.per_file_ignores:
            return ()
        relative = self._relative(path)
        return tuple(selector for glob, selectors in self.per_file_ignores if _fits(glob, relative) for selector in selectors)

    def _relative(self, path: Path) -> str:
        return Path(os.path.relpath(os.path.abspath(path), self.folder)).as_posix()


@final
class Configurations:
    """The configurations of the files of one run, each read once.

    Args:
        known: All rules.
    """

    def __init__(self, known: Sequence[RuleName]) -> None:
        self._known = known
        self._found: dict[str, Configuration | None] = {}

    def of(self, path: Path) -> Configuration:
        """What counts for a file or folder: the nearest `pyproject.toml` with a table for halfstep, in its folder or above it.

        Raises:
            ConfigurationError: That file has settings that do not exist, or values that are not allowed.
        """
        folder = os.path.dirname(os.path.abspath(path))
        return self._in(folder) or Configuration(folder=Path(folder))

    def excludes(self, path: Path) -> bool:
        """Whether a file or folder is not to be checked, for what it is called itself and not for the folders that it is in.

        Raises:
            ConfigurationError: As above.
        """
        return self.of(path).excludes(path)

    def _in(self, folder: str) -> Configuration | None:
        if folder not in self._found:
            above = os.path.dirname(folder)
            own = _read(Path(folder) / _FILE, self._known)
            self._found[folder] = own or (self._in(above) if above != folder else None)
        return self._found[folder]


def _read(path: Path, known: Sequence[RuleName]) -> Configuration | None:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except PermissionError as error:
        if not os.access(path.parent, os.X_OK):  # Nobody can tell whether it is there.
            return None
        raise ConfigurationError(f"Cannot read {path}: {error.strerror}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"Cannot read {path}: {error.strerror if isinstance(error, OSError) else error}.") from error
    if not all(word in text for word in _TABLE):
        return None
    table = _table(path, text)
    return None if table is None else _configuration(path, table, known)


def _table(path: Path, text: str) -> Mapping[str, Any] | None:
    # It is loaded only for a file that has something to say.
    import tomlkit  # noqa: PLC0415
    from tomlkit.exceptions import TOMLKitError  # noqa: PLC0415

    try:
        table: Any = tomlkit.parse(text).unwrap()
    except TOMLKitError as error:
        raise ConfigurationError(f"{path} is no valid TOML: {str(error).rstrip('.')}.") from error
    for place, word in enumerate(_TABLE, start=1):
        table = table.get(word)
        if table is None:
            return None
        if not isinstance(table, dict):
            raise ConfigurationError(f"{path}: {'.'.join(_TABLE[:place])} is no table. Write [{'.'.join(_TABLE)}] and settings below it.")
    return dict(table)


def _configuration(path: Path, table: Mapping[str, Any], known: Sequence[RuleName]) -> Configuration:
    where = f"{path}: [{'.'.join(_TABLE)}]"
    unknown = next((key for key in table if key not in _SETTINGS), None)
    if unknown is not None:
        *first, last = _SETTINGS
        raise ConfigurationError(
            f"{where} has no setting {unknown!r}.{did_you_mean(unknown, known=_SETTINGS)} Allowed are {', '.join(first)} and {last}."
        )
    values = {key: _SETTINGS[key](value, f"{where} {key}") for key, value in table.items()}
    selection = Selection(select=values.get("select"), ignore=values.get("ignore", ()))
    ignores = values.get("per-file-ignores", ())
    check_selectors(selection.select or (), known=known, where=f"{where} select")
    check_selectors(selection.ignore, known=known, where=f"{where} ignore")
    for _, selectors in ignores:
        check_selectors(selectors, known=known, where=f"{where} per-file-ignores")
    return Configuration(
        folder=path.parent,
        selection=selection,
        exclude=values.get("exclude", ()),
        per_file_ignores=ignores,
        unsafe_fixes=values.get("unsafe-fixes", False),
    )


def _words(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise ConfigurationError(f'{where} is {value!r}. Allowed is a list of texts, such as ["HS002"].')
    return tuple(value)


def _globs(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) and word for word in value):
        raise ConfigurationError(f'{where} is {value!r}. Allowed is a list of globs, such as ["vendored", "tests/**/old_*.py"].')
    return tuple(_glob(glob, where) for glob in value)


def _glob(glob: str, where: str) -> str:
    if not _NO_NAMES.isdisjoint(_inner(glob).split("/")):
        raise ConfigurationError(
            f"{where}: {glob!r} fits nothing. Name files or folders below that of this file, such as tests/**/old_*.py."
        )
    if _CHOICE.search(glob):
        raise ConfigurationError(f"{where}: {glob!r} fits nothing: braces have no meaning here. Write one glob for each choice.")
    try:
        _pattern(glob)
    except re.error as error:
        raise ConfigurationError(f"{where}: {glob!r} is no glob: {error.msg}.") from error
    return glob


def _ignores(value: Any, where: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    if not isinstance(value, dict):
        raise ConfigurationError(f'{where} is {value!r}. Allowed is a table of globs and rules, such as {{"tests/**" = ["HS002"]}}.')
    return tuple((_glob(glob, where), _words(selectors, f"{where} {glob!r}")) for glob, selectors in value.items())


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{where} is {value!r}. Allowed are true and false.")
    return value


_SETTINGS: Final[Mapping[str, Callable[[Any, str], Any]]] = MappingProxyType(
    {"select": _words, "ignore": _words, "exclude": _globs, "per-file-ignores": _ignores, "unsafe-fixes": _flag}
)


def _fits(glob: str, path: str) -> bool:
    """Whether a glob fits a path, or a folder that the path is in."""
    parts = path.split("/")
    return any(_fits_itself(glob, "/".join(parts[:number])) for number in range(len(parts), 0, -1))


def _fits_itself(glob: str, path: str) -> bool:
    return _pattern(glob).fullmatch(path if _is_path(glob) else path.rpartition("/")[2]) is not None


def _is_path(glob: str) -> bool:
    return "/" in glob.rstrip("/")


def _inner(glob: str) -> str:
    """The glob without the marks of its ends, which stand for the folder of the configuration and for a folder."""
    return glob.removeprefix("./").strip("/")


@cache
def _pattern(glob: str) -> re.Pattern[str]:
    parts = (_GLOB_PARTS.get(part) or _literal(part) for part in _GLOB.findall(_inner(glob)))
    return re.compile("".join(parts), re.DOTALL)


def _literal(part: str) -> str:
    if len(part) == 1:
        return re.escape(part)
    letters = part[1:-1].removeprefix("!")
    for special in "\\[]^":
        letters = letters.replace(special, f"\\{special}")
    return f"[{'^' if part.startswith('[!') else ''}{letters}]"
