"""What is said of checkpoints that cannot be read or written."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given

from halfstep.archive import bytes_text, unwritable
from halfstep.archive.wording import part_text, plain, tensor_text
from tests.archive import samples
from tests.strategies import texts

PATH = Path("no/such/step-00000100.pt")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1, "1 byte"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (1536 << 20, "1.5 GiB"), (5 << 50, "5120.0 TiB")],
)
def test_amounts(count: int, text: str) -> None:
    assert bytes_text(count) == text


class TestUnwritable:
    def test_a_full_disk_says_what_is_needed_and_what_is_free(self, tmp_path: Path) -> None:
        error = unwritable(tmp_path / "step-00000100.pt", OSError(errno.ENOSPC, "No space left on device"), needed=3 << 30)
        assert f"Cannot write {tmp_path}/step-00000100.pt: the disk is full (3.0 GiB are needed and " in str(error)
        assert str(error).endswith("iB are free). Older checkpoints are untouched. Free some space, or keep fewer checkpoints.")

    def test_what_is_not_known_is_not_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        full = OSError(errno.EDQUOT, "Disk quota exceeded")

        def fail(_: Path) -> NoReturn:
            raise FileNotFoundError

        monkeypatch.setattr(shutil, "disk_usage", fail)
        assert str(unwritable(PATH, full)).startswith("Cannot write no/such/step-00000100.pt: the disk is full. Older")
        assert str(unwritable(PATH, full, needed=5)).startswith(
            "Cannot write no/such/step-00000100.pt: the disk is full (5 bytes are needed)."
        )

    def test_what_the_system_does_not_name_is_told_as_it_is(self) -> None:
        assert str(unwritable(PATH, OSError("odd"))) == f"Cannot write {PATH}: odd. Older checkpoints are untouched."


@given(texts())
def test_a_name_is_one_line_that_can_be_printed(name: str) -> None:
    assert plain(name).isprintable()
    assert plain(name) == name or not name.isprintable() or len(name) > 200


def test_a_lone_surrogate_can_be_printed() -> None:
    assert plain("a\ud800") == "a\\ud800"


def test_tensors_that_share_their_data_are_named_by_the_first() -> None:
    assert tensor_text(["a", "b"]) == "a and 1 more"
    assert part_text("data/0", samples.TENSORS) == "the data of model.table and 1 more (data/0)"


def test_a_part_of_a_number_is_not_that_number() -> None:
    assert part_text("data/1", [samples.tensor("model.weight", "data/10,data/11")]) == "its record data/1"
