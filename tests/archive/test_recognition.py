"""Files of others, and what they are called."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halfstep.archive import read_record, verify
from halfstep.archive.recognition import foreign_kind
from halfstep.errors import DamagedCheckpointError
from tests.archive import samples

TORCH = "a file that torch.save wrote. Its scaler can be read with halfstep.import_scaler_state"

OLD_TORCH = f"{TORCH}, in its format before version 1.6"


def saved_by_torch(**settings: Any) -> bytes:
    file = io.BytesIO()
    torch.save(samples.state(), file, **settings)
    return file.getvalue()


def zipped(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name.replace("__", "/"), content)
    return file.getvalue()


def array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(3))
    return file.getvalue()


def arrays() -> bytes:
    file = io.BytesIO()
    np.savez(file, weight=np.zeros(3))
    return file.getvalue()


def tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("weights"))
    return file.getvalue()


def safetensors() -> bytes:
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        pytest.param(saved_by_torch(), TORCH, id="torch.save"),
        pytest.param(
            saved_by_torch(_use_new_zipfile_serialization=False), f"{TORCH}, in its format before version 1.6", id="old torch.save"
        ),
        pytest.param(
            zipped(model__data__pkl=b"", **{"model__data.pkl": b"", "model__constants.pkl": b""}), "a TorchScript program", id="script"
        ),
        pytest.param(zipped(model__archive_format=b"pt2"), "a program that torch.export wrote", id="export"),
        pytest.param(zipped(**{"notes.txt": b"text"}), "a zip archive", id="zip"),
        pytest.param(arrays(), "an archive of NumPy", id="npz"),
        pytest.param(array(), "an array of NumPy", id="npy"),
        pytest.param(pickle.dumps({"step": 100}), "a pickle", id="pickle"),
        pytest.param(safetensors(), "a file of safetensors", id="safetensors"),
        pytest.param(b"\x89HDF\r\n\x1a\n\0\0", "a file of HDF5", id="hdf5"),
        pytest.param(b"GGUF\x03\0\0\0", "a file of GGUF", id="gguf"),
        pytest.param(b"\x1f\x8b\x08\0", "compressed with gzip", id="gzip"),
        pytest.param(tar(), "a tar archive", id="tar"),
        pytest.param(b'{"step": 100}\n', "text", id="json"),
        pytest.param("Es lief gut: 半精度\n".encode() * 1000, "text", id="text"),
        pytest.param(b"\xfe\xed\xfa\xcf" * 8, "something else", id="something else"),
    ],
)
def test_a_file_of_others_is_named(tmp_path: Path, content: bytes, kind: str) -> None:
    path = tmp_path / "last.pt"
    path.write_bytes(content)
    assert foreign_kind(path) == kind
    for check in (verify, read_record):
        with pytest.raises(DamagedCheckpointError) as caught:
            check(path)
        assert str(caught.value) == f"{path} is no checkpoint of halfstep, but {kind}."


@pytest.mark.parametrize("length", [0, 1, 3, 4, 500, 2000])
def test_what_may_be_a_part_of_ours_is_not_called_anothers(tmp_path: Path, length: int) -> None:
    path = samples.sealed(tmp_path / "step-00000100.pt")
    path.write_bytes(path.read_bytes()[:length])
    assert foreign_kind(path) == ""


@pytest.mark.parametrize("lost", [9, 64, 73, 100])
def test_ours_is_known_by_its_manifest_or_its_comment(tmp_path: Path, lost: int) -> None:
    path = samples.sealed(tmp_path / "step-00000100.pt")
    content = path.read_bytes()
    path.write_bytes(content[:-lost] + b"?" * lost)
    assert foreign_kind(path) == ""
    path.write_bytes(b"?" * 1000 + content[1000:])
    assert foreign_kind(path) == ""


def test_an_archive_whose_end_is_cut_may_be_anyones(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    path.write_bytes(saved_by_torch()[:-2])
    assert foreign_kind(path) == ""
    with pytest.raises(DamagedCheckpointError, match=r"^.*last\.pt is cut short: it has no end record\.$"):
        verify(path)


@pytest.mark.parametrize("said", ["halfstep: it went well", "halfstep:" + 60 * "0", "halfstep.json"])
def test_what_only_speaks_of_halfstep_is_not_ours(tmp_path: Path, said: str) -> None:
    path = tmp_path / "last.pt"
    torch.save({"said": said}, path)
    assert foreign_kind(path) == TORCH


def test_a_large_archive_is_known_by_its_table(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    torch.save({number: torch.zeros(1) for number in range(2000)}, path)
    assert foreign_kind(path) == TORCH
