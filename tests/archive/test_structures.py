"""Names in the structure of a file, found without running anything."""

from __future__ import annotations

import pickle
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.archive.structures import foreign_name


def written(path: Path, pickled: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickled)
    return path


class Gadget:
    def __init__(self, call: Any, *arguments: Any) -> None:
        self.reduced = (call, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize(
    "value",
    [
        {
            "a": torch.ones(2),
            "b": nn.Parameter(torch.ones(1)),
            "sparse": torch.eye(2).to_sparse(),
            "bits": torch.ones(1, dtype=torch.bfloat16),
        },
        OrderedDict(a=1, b=Counter("ab")),
        [1, 2.5, 1j, "text", b"bytes", None, True, {1, 2}, (1,), 2**80, float("nan")],
        [torch.float32, torch.device("cpu"), torch.Size([1]), torch.strided, torch.complex64],
        nn.Sequential(nn.BatchNorm1d(2), nn.LSTM(2, 2)).state_dict(),
        {},
    ],
    ids=["tensors", "mappings", "values", "torch's", "state", "nothing"],
)
def test_plain_values_and_tensors_have_none(value: Any, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "a.pt")
    assert foreign_name(tmp_path / "a.pt") == ""


@pytest.mark.parametrize(
    ("call", "arguments", "name"),
    [
        (print, ("ran",), "__builtin__.print"),
        (eval, ("1",), "__builtin__.eval"),
        (Path.unlink, ("x",), ""),
        (pickle.loads, (b"",), "pickle.loads"),
    ],
)
def test_a_function_has_its_name(call: Any, arguments: Any, name: str, tmp_path: Path) -> None:
    found = foreign_name(written(tmp_path / "a.pt", pickle.dumps({"deep": [Gadget(call, *arguments)]}, protocol=2)))
    assert name in found
    assert found


@pytest.mark.parametrize("protocol", [4, 5])
def test_a_name_that_is_put_together_is_none_of_ours(protocol: int, tmp_path: Path) -> None:
    assert "put together while it is read" in foreign_name(written(tmp_path / "a.pt", pickle.dumps(Gadget(print), protocol=protocol)))


@pytest.mark.parametrize("pickled", [b"", b"no pickle", b"\x80\x02}q"])
def test_what_is_no_structure(pickled: bytes, tmp_path: Path) -> None:
    assert "is no structure" in foreign_name(written(tmp_path / "a.pt", pickled))


def test_a_file_without_one(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as file:
        file.writestr("archive/version", b"3")
    assert foreign_name(tmp_path / "a.pt") == "no structure that could be read"
