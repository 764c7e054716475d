from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from halfstep.batch import map_tensors, move_batch, sample_count, split_batch, tensors_in
from halfstep.errors import ConfigurationError

CPU = torch.device("cpu")
META = torch.device("meta")


class Sample(NamedTuple):
    x: Tensor
    label: str


class TestMapTensors:
    def test_containers_and_other_leaves_stay(self) -> None:
        odd = object()
        batch = [torch.ones(2), {"a": (torch.ones(3), "s"), "b": None}, Sample(torch.ones(4), "cat"), odd, 1.5]
        mapped = map_tensors(lambda tensor: tensor.shape[0], batch)
        assert mapped == [2, {"a": (3, "s"), "b": None}, Sample(4, "cat"), odd, 1.5]  # type: ignore[arg-type]
        assert isinstance(mapped[2], Sample)
        assert isinstance(map_tensors(len, OrderedDict(a=torch.ones(1))), OrderedDict)

    def test_a_bare_tensor_is_a_batch(self) -> None:
        assert map_tensors(lambda tensor: tensor + 1, torch.zeros(2)).tolist() == [1.0, 1.0]


class TestSampleCount:
    @pytest.mark.parametrize(
        ("batch", "count"),
        [
            (torch.zeros(3, 2), 3),
            ((torch.tensor(1.0), torch.zeros(4)), 4),
            ({"n": 7, "x": [torch.zeros(0, 2)]}, 0),
            ((torch.zeros(8), torch.zeros(2)), 8),
            (torch.tensor(1.0), None),
            (("text", None, 3), None),
            ([], None),
            (None, None),
        ],
    )
    def test_the_first_tensor_with_a_dimension_counts(self, batch: Any, count: int | None) -> None:
        assert sample_count(batch) == count


class TestMoveBatch:
    def test_tensors_move_and_the_rest_stays(self) -> None:
        moved = move_batch((torch.zeros(2), ["s", None, torch.zeros(3, dtype=torch.int64)]), device=META)
        assert moved[0].device == moved[1][2].device == META
        assert moved[1][:2] == ["s", None]
        assert moved[1][2].dtype is torch.int64

    def test_channels_last_is_for_images_alone(self) -> None:
        batch = [torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4, 4, dtype=torch.int64), torch.zeros(2, 3), torch.zeros(1, 2, 3, 4, 4)]
        moved = move_batch(batch, device=CPU, memory_format=torch.channels_last)
        assert moved[0].is_contiguous(memory_format=torch.channels_last)
        assert all(tensor.is_contiguous() for tensor in moved[1:])
        assert move_batch(batch, device=CPU)[0].is_contiguous()

    def test_objects_that_know_how_to_move_are_moved(self) -> None:
        class Encoding(UserDict[str, Tensor]):
            def to(self, device: torch.device) -> Encoding:
                return Encoding({name: tensor.to(device) for name, tensor in self.items()})

        moved = move_batch([Encoding(ids=torch.zeros(2)), 1], device=META)
        assert isinstance(moved[0], Encoding)
        assert moved[0]["ids"].device == META

    def test_what_is_there_already_is_not_copied(self) -> None:
        x = torch.zeros(2)
        assert move_batch({"x": x}, device=CPU)["x"] is x


class TestSplitBatch:
    @given(count=st.integers(1, 40), data=st.data())
    def test_the_parts_are_the_batch(self, count: int, data: st.DataObject) -> None:
        parts = data.draw(st.integers(1, count))
        x = torch.arange(count)
        split = split_batch({"x": x, "y": x * 2}, parts=parts)
        assert len(split) == parts
        assert torch.equal(torch.cat([part["x"] for part, _ in split]), x)
        assert torch.equal(torch.cat([part["y"] for part, _ in split]), x * 2)
        sizes = [len(part["x"]) for part, _ in split]
        assert max(sizes) - min(sizes) <= 1
        assert [share for _, share in split] == [size / count for size in sizes]
        assert sum(share for _, share in split) == pytest.approx(1.0)

    def test_no_data_is_copied(self) -> None:
        x = torch.zeros(4, 2)
        (first, _), (second, _) = split_batch(x, parts=2)
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()

    def test_what_has_no_first_dimension_goes_into_each_part(self) -> None:
        odd = object()
        for (part, share), expected in zip(
            split_batch([torch.arange(3), torch.tensor(7), "abc", None, odd], parts=2), ([0], [1, 2]), strict=True
        ):
            assert part[0].tolist() == expected
            assert (part[1].item(), *part[2:]) == (7, "abc", None, odd)
            assert share == len(expected) / 3

    @pytest.mark.parametrize(
        ("batch", "parts", "match"),
        [
            ({"s": "text"}, 2, r"A batch of dict has no tensor to split into 2 micro-batches\. Split it yourself: call autocast\(\)"),
            (torch.tensor(1.0), 2, r"A batch of Tensor has no tensor to split"),
            ([torch.ones(2), {"y": torch.ones(3)}], 2, r"differ in their first dimension \(2, 3\)\. Split it yourself"),
            (torch.ones(1), 2, r"A batch of 1 sample cannot be split into accumulate=2 micro-batches\. Use a larger batch, or a smaller"),
            (torch.ones(0, 3), 1, r"A batch of 0 samples cannot be split"),
        ],
    )
    def test_what_cannot_be_split_is_refused(self, batch: Any, parts: int, match: str) -> None:
        with pytest.raises(ConfigurationError, match=match):
            split_batch(batch, parts=parts)


@dataclass
class Batch:
    ids: Tensor
    name: str


@pytest.mark.parametrize(
    "batch", [UserDict(ids=torch.zeros(4, 7)), Batch(ids=torch.zeros(4, 7), name="a"), [UserDict(x={"ids": torch.zeros(4, 7)})]]
)
def test_tensors_are_found_in_mappings_and_dataclasses(batch: object) -> None:
    assert [tuple(tensor.shape) for tensor in tensors_in(batch)] == [(4, 7)]
    assert sample_count(batch) == 4
