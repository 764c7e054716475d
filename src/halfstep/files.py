"""Files that are either written whole or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from halfstep.errors import ConfigurationError

__all__ = ["check_writable", "rewrite", "write_text"]


def check_writable(path: Path) -> None:
    """Makes sure, before long work, that a file can be written in the end.

    Raises:
        ConfigurationError: The path is a folder, or its folder does not exist or may not be written to.

    Example:
        >>> check_writable(Path("no/such/folder/report.html"))
        Traceback (most recent call last):
        ...
        halfstep.errors.ConfigurationError: Cannot write no/such/folder/report.html: there is no folder no/such/folder. Make it first.
    """
    try:
        _check(path)
    except OSError as error:  # Such as a name that is too long to ask about.
        raise ConfigurationError(f"Cannot write {path}: {error.strerror or error}.") from error


def write_text(path: Path, text: str) -> None:
    """Writes a text file in UTF-8; a reader sees the old file or the whole new one, whatever happens in between.

    A symbolic link stays one: the file that it leads to is replaced. Devices and pipes, such as `/dev/stdout`, are written to directly.

    Raises:
        ConfigurationError: The file cannot be written; the old one, if there was one, is untouched.
    """
    check_writable(path)
    try:
        if _is_stream(path):
            path.write_text(text, encoding="utf-8")
        else:
            _replace(_target(path), text.encode("utf-8"), like=None)
    except OSError as error:
        raise ConfigurationError(f"Cannot write {path}: {error.strerror or error}.") from error


def rewrite(path: Path, content: bytes) -> None:
    """Gives a file other content; its permissions and its owner stay, and a reader sees the old file or the whole new one.

    A symbolic link stays one: the file that it leads to is replaced.

    Raises:
        ConfigurationError: It is no file, or cannot be written; it is untouched.
    """
    check_writable(path)
    if not path.is_file():
        raise ConfigurationError(f"Cannot write {path}: there is no such file.")
    if not os.access(path, os.W_OK):  # Its folder would let it be replaced, but whoever protected it meant it.
        raise ConfigurationError(f"Cannot write {path}: no permission.")
    try:
        _replace(_target(path), content, like=path.stat())
    except OSError as error:
        raise ConfigurationError(f"Cannot write {path}: {error.strerror or error}.") from error


def _check(path: Path) -> None:
    folder = path.parent
    if path.is_dir():
        raise ConfigurationError(f"Cannot write {path}: it is a folder. Name a file in it.")
    if not folder.is_dir():
        raise ConfigurationError(f"Cannot write {path}: there is no folder {folder}. Make it first.")
    if _is_stream(path):
        if not os.access(path, os.W_OK):
            raise ConfigurationError(f"Cannot write {path}: no permission.")
    elif not os.access(_target(path).parent, os.W_OK):
        raise ConfigurationError(f"Cannot write {path}: no permission to write in the folder {_target(path).parent}.")


def _is_stream(path: Path) -> bool:
    """Whether it is a device or a pipe, which must not be replaced by a file."""
    return path.exists() and not path.is_file()


def _target(path: Path) -> Path:
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _replace(path: Path, content: bytes, *, like: os.stat_result | None) -> None:
    """Puts a new file in the place of one, with the permissions that new files have, or with those of another."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    part = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        if like is not None and hasattr(os, "chown"):
            with suppress(OSError):  # Only the superuser may give a file to somebody, and only he needs to.
                os.chown(part, like.st_uid, like.st_gid)
        # mkstemp makes files that only their owner can read.
        part.chmod(0o666 & ~_umask() if like is None else stat.S_IMODE(like.st_mode))
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
