"""Objects of classes that torch does not count as plain data, some of which do harm when they are unpickled."""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CANARY = "canary.txt"


class Dictionary(dict[Any, Any]):
    pass


class List(list[Any]):
    pass


class Ordered(OrderedDict[Any, Any]):
    pass


class Thing:
    def __init__(self, value: object) -> None:
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class Kind(Tensor):
    pass


class Wrapper(Tensor):
    """A tensor that holds another, as those of quantization do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made: Wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return made

    def __init__(self, inner: Tensor) -> None:
        self.held = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError


class Acting:
    """Does what it was told to when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.called = (function, arguments)

    def __reduce__(self) -> Any:
        return self.called


class Waking:
    """Leaves a trace when it is filled."""

    def __init__(self) -> None:
        self.value = 1

    def __setstate__(self, _: Any) -> None:
        Path(CANARY).touch()


class Born:
    """Leaves a trace when it is made."""

    def __new__(cls, *_: Any) -> Born:
        Path(CANARY).touch()
        return super().__new__(cls)


def written(value: Any, path: Path, **settings: Any) -> Path:
    torch.save(value, path, **settings)
    return path


def pickled(path: Path, code: bytes) -> Path:
    """A file of torch.save whose pickle was made by hand."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", code)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/version", b"3\n")
    return path
