"""The index of a folder: whatever it holds, nothing is executed, and what cannot be true is refused."""

from __future__ import annotations

import pickle
import random
import tracemalloc
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

if not dist.is_available():
    pytest.skip("this build of torch has no torch.distributed", allow_module_level=True)

from halfstep._torch.sharding import _KINDS
from halfstep.checkpoint.shard_index import Box, overlap, read_index
from halfstep.checkpoint.shards import shard_shapes
from halfstep.errors import CheckpointError, DamagedCheckpointError
from tests.checkpoint.written_folders import FILE, Hostile, changed, made, place_of, read, written


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "step-00000001")


def entry(name: str, index: Any) -> Any:
    return index.state_dict_metadata[name]


def key_of(name: str, index: Any) -> Any:
    return next(key for key in index.storage_data if key.fqn == name)


def moved(index: Any, offsets: tuple[int, ...]) -> None:
    """The first tensor as one that begins elsewhere, in both places where the index says so."""
    entry("first", index).chunks[0].offsets = torch.Size(offsets)
    place = index.storage_data.pop(key_of("first", index))
    index.storage_data[type(key_of("second", index))("first", offsets)] = place


def reshaped(index: Any, sizes: tuple[int, ...]) -> None:
    entry("first", index).chunks[0].sizes = torch.Size(sizes)


def renamed(index: Any, file: str) -> None:
    place_of("third", index).relative_path = file


class TestWhatIsThere:
    def test_tensors_by_name(self, folder: Path) -> None:
        index = read_index(folder)
        assert {name: (shards.dtype, shards.size) for name, shards in index.items()} == shard_shapes(folder)
        assert shard_shapes(folder) == {name: (tensor.dtype, tensor.shape) for name, tensor in made().items()}
        ((box, extent),) = index["second"].parts
        assert box == Box(offsets=(0,), sizes=(6,))
        assert extent.file == FILE
        assert extent.offset > 0

    def test_a_missing_index(self, tmp_path: Path) -> None:
        for path in (tmp_path / "none", tmp_path):
            with pytest.raises(DamagedCheckpointError, match=r"is damaged: its file \.metadata is missing\."):
                shard_shapes(path)

    def test_a_missing_file(self, folder: Path) -> None:
        (folder / FILE).unlink()
        for look in (read, shard_shapes):
            with pytest.raises(DamagedCheckpointError, match=r"step-00000001 is damaged: its file __0_0\.distcp is missing\."):
                look(folder)

    def test_a_file_that_is_cut_short(self, folder: Path) -> None:
        path = folder / FILE
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(DamagedCheckpointError, match=r"\.metadata is damaged: a tensor lies beyond the end of __0_0\.distcp, or"):
            shard_shapes(folder)

    def test_an_index_that_cannot_be_read(self, folder: Path) -> None:
        (folder / ".metadata").unlink()
        (folder / ".metadata").mkdir()
        with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: Is a directory\."):
            shard_shapes(folder)


class TestWhatCannotBe:
    @pytest.mark.parametrize(
        ("change", "text"),
        [
            (lambda index: index.storage_data.pop(key_of("first", index)), "a part of first has no place in a file, or two parts have"),
            (lambda index: index.state_dict_metadata.pop("first"), "it knows a place for a part of first that does not exist"),
            (lambda index: moved(index, (1, 0)), "a part of first lies outside of it"),
            (lambda index: reshaped(index, (1, 3)), "the parts of first do not make up all of it"),
            (lambda index: reshaped(index, (2, 3, 1)), "a part of first lies outside of it"),
            (lambda index: setattr(entry("first", index), "size", torch.Size([3, 3])), "the parts of first do not make up all of it"),
            (lambda index: setattr(entry("third", index), "chunks", []), "the parts of third do not make up all of it"),
            (lambda index: entry("first", index).chunks.append(entry("first", index).chunks[0]), "or two parts have the same"),
            (lambda index: setattr(place_of("second", index), "offset", 1), r"two tensors lie in the same place of __0_0\.distcp"),
            (lambda index: setattr(place_of("third", index), "length", 10**12), r"a tensor lies beyond the end of __0_0\.distcp"),
            (lambda index: renamed(index, "../passwd"), r"it names '\.\./passwd', which is no file of tensors"),
            (lambda index: renamed(index, "/etc/passwd"), "it names '/etc/passwd', which is no file of tensors"),
            (lambda index: renamed(index, "__0_0.distcp\0"), "which is no file of tensors"),
            (lambda index: renamed(index, "rank-0.pt"), "which is no file of tensors"),
        ],
    )
    def test_parts_and_places_that_do_not_fit(self, change: Callable[[Any], object], text: str, folder: Path) -> None:
        changed(folder, lambda index: change(index) and None)
        with pytest.raises(DamagedCheckpointError, match=rf"step-00000001/\.metadata is damaged: .*{text}"):
            shard_shapes(folder)

    def test_a_file_of_another_rank_that_is_missing(self, folder: Path) -> None:
        changed(folder, lambda index: setattr(place_of("third", index), "relative_path", "__1_0.distcp"))
        with pytest.raises(DamagedCheckpointError, match=r"step-00000001 is damaged: its file __1_0\.distcp is missing\."):
            shard_shapes(folder)


class TestHostile:
    def look(self, folder: Path, canary: Path, text: str) -> None:
        for reading in (read, shard_shapes):
            with pytest.raises(DamagedCheckpointError, match=rf"step-00000001/\.metadata is damaged: .*{text}"):
                reading(folder)
        assert not canary.exists()

    @pytest.mark.parametrize("place", ["whole", "planner_data", "storage_meta", "version", "name", "place"])
    def test_a_command_in_any_place_is_not_run(self, place: str, folder: Path, tmp_path: Path) -> None:
        hostile = Hostile(tmp_path / "canary")

        def change(index: Any) -> Any:
            if place == "whole":
                return hostile
            if place == "name":
                index.state_dict_metadata[hostile] = 1
            elif place == "place":
                place_of("first", index).relative_path = hostile
            else:
                setattr(index, place, hostile)
            return None

        changed(folder, change)
        self.look(folder, tmp_path / "canary", "it names posix.system, which no index of tensors needs")

    @pytest.mark.parametrize("protocol", [0, 1, 2])
    def test_nor_with_other_opcodes(self, protocol: int, folder: Path, tmp_path: Path) -> None:
        (folder / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "canary"), protocol=protocol))
        self.look(folder, tmp_path / "canary", "")

    def test_a_class_of_torch_is_not_changed(self, folder: Path, tmp_path: Path) -> None:
        """A pickle can set attributes of what it names: of a class too, if that has no way of its own to take a state."""

        def text(value: str) -> bytes:
            return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()

        attributes = pickle.NONE + pickle.EMPTY_DICT + pickle.MARK + text("a") + pickle.NONE + pickle.SETITEMS + pickle.TUPLE2
        for module, name in [("torch", "Size"), ("torch.distributed.checkpoint.metadata", "Metadata"), ("torch", "float32")]:
            named = pickle.PROTO + b"\x04" + text(module) + text(name) + pickle.STACK_GLOBAL
            (folder / ".metadata").write_bytes(named + attributes + pickle.BUILD + pickle.STOP)
            self.look(folder, tmp_path / "canary", "")
        assert not hasattr(torch.Size, "a")
        assert not any(hasattr(kind, "a") for kind in _KINDS.values())

    @pytest.mark.parametrize(
        "opcodes",
        [
            pickle.NONE + pickle.LONG_BINPUT + b"\xff\xff\xff\x7f",
            pickle.BYTEARRAY8 + (1 << 40).to_bytes(8, "little"),
            pickle.BINUNICODE8 + (1 << 40).to_bytes(8, "little"),
            pickle.BINUNICODE + (0xFFFFFFF0).to_bytes(4, "little"),
            pickle.FRAME + (1 << 62).to_bytes(8, "little"),
            pickle.GLOBAL + b"os\nsystem\n",
            pickle.INST + b"os\nsystem\n",
            pickle.EXT1 + b"\x01",
            pickle.PERSID + b"x\n",
        ],
    )
    def test_no_number_in_it_takes_up_memory(self, opcodes: bytes, folder: Path, tmp_path: Path) -> None:
        (folder / ".metadata").write_bytes(pickle.PROTO + b"\x04" + opcodes + pickle.STOP)
        tracemalloc.start()
        try:
            self.look(folder, tmp_path / "canary", "")
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()


class TestRandomDamage:
    @pytest.mark.parametrize("seed", range(200))
    def test_a_flipped_bit_is_told_or_changes_nothing_that_is_read(self, seed: int, folder: Path) -> None:
        """Or changes a name, a type or a shape so that it makes sense: whoever knows what to expect sees that, and so does a checksum."""
        before = shard_shapes(folder)
        path = folder / ".metadata"
        data = bytearray(path.read_bytes())
        place = random.Random(seed).randrange(8 * len(data))
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        try:
            after = shard_shapes(folder)
            found = read(folder) if before == after else {}
        except DamagedCheckpointError:
            return
        if before == after:
            assert all(torch.equal(found[name], tensor) for name, tensor in made().items())
        else:
            with pytest.raises(CheckpointError, match=r"is not in|has the shape|is .*, and"):
                read(folder)

    @given(data=st.binary(max_size=200))
    def test_any_bytes(self, data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
        folder = tmp_path_factory.mktemp("any")
        (folder / ".metadata").write_bytes(data)
        with pytest.raises(DamagedCheckpointError, match=r"\.metadata is damaged: "):
            shard_shapes(folder)

    @pytest.mark.parametrize("length", [0, 1, 11, 100, -1])
    def test_one_that_is_cut_short(self, length: int, folder: Path) -> None:
        path = folder / ".metadata"
        path.write_bytes(path.read_bytes()[:length])
        with pytest.raises(DamagedCheckpointError, match=r"\.metadata is damaged: "):
            shard_shapes(folder)


Numbers = st.integers(0, 6)


class TestOverlap:
    @given(numbers=st.lists(st.tuples(Numbers, Numbers, Numbers, Numbers), max_size=3))
    def test_it_holds_the_elements_that_lie_in_both(self, numbers: list[tuple[int, int, int, int]]) -> None:
        one = Box(offsets=tuple(a for a, *_ in numbers), sizes=tuple(m for _, m, *_ in numbers))
        other = Box(offsets=tuple(b for *_, b, _ in numbers), sizes=tuple(n for *_, n in numbers))
        common = overlap(one, other)
        assert (set() if common is None else elements(common)) == elements(one) & elements(other)
        assert overlap(other, one) == common


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))))
