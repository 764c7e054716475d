"""What a step was given that is not finite."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from math import inf, nan
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from halfstep.replay.inputs import named_tensors, nonfinite_tensors, zeroed


@dataclass
class Sample:
    image: Tensor
    label: Any = None


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Encoding:
    """As the output of Hugging Face's tokenizers: no mapping itself, but with one."""

    def __init__(self, **data: Any) -> None:
        self.data = data


ONE = torch.ones(1)


class TestNames:
    @pytest.mark.parametrize(
        ("batch", "names"),
        [
            (ONE, ["batch"]),
            ((ONE, ONE), ["batch[0]", "batch[1]"]),
            ([ONE, (ONE, [ONE])], ["batch[0]", "batch[1][0]", "batch[1][1][0]"]),
            ({"x": ONE, 3: ONE, ("a", 1): ONE}, ["batch['x']", "batch[3]", "batch[('a', 1)]"]),
            (OrderedDict(x=[ONE]), ["batch['x'][0]"]),
            (UserDict(ids=ONE), ["batch['ids']"]),
            (Sample(ONE, {"y": ONE}), ["batch.image", "batch.label['y']"]),
            (Pair(ONE, ONE), ["batch[0]", "batch[1]"]),
            (Encoding(input_ids=ONE, mask=ONE), ["batch['input_ids']", "batch['mask']"]),
            ({"a": "text", "b": 3, "c": None, "d": ONE.numpy(), "e": Sample}, []),
            (None, []),
            ({"it's": ONE}, ['batch["it\'s"]']),
        ],
    )
    def test_they_are_the_expressions_that_tensors_are_reached_by(self, batch: Any, names: list[str]) -> None:
        found = list(named_tensors(batch, "batch"))
        assert [name for name, _ in found] == names
        for name, tensor in found:
            reached = eval(name, {"batch": batch.data if isinstance(batch, Encoding) else batch})
            assert reached is tensor


def names_of(batch: Any, model: nn.Module | None = None, **since: int) -> list[tuple[str, str, int, int, int | None]]:
    found = nonfinite_tensors(batch, nn.Linear(1, 1) if model is None else model, since=since)
    return [(each.name, each.kind, each.nonfinite, each.elements, each.since) for each in found]


class TestNonfinite:
    def test_infinities_and_nan_are_counted(self) -> None:
        batch = {"x": torch.tensor([[1.0, inf], [nan, -inf]]), "y": torch.zeros(3)}
        assert names_of(batch) == [("batch['x']", "input", 3, 4, None)]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
    def test_any_floating_point_dtype_is_looked_at(self, dtype: torch.dtype) -> None:
        assert names_of(torch.tensor([1.0, nan]).to(dtype)) == [("batch", "input", 1, 2, None)]

    @pytest.mark.parametrize("batch", [torch.tensor([1, 2]), torch.tensor([True]), torch.zeros(0), None, torch.eye(2).to_sparse()])
    def test_others_are_not(self, batch: Any) -> None:
        assert names_of(batch) == []

    def test_parameters_and_buffers_of_the_model_are_named_by_their_paths(self) -> None:
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        with torch.no_grad():
            model[0].weight[0, 0] = nan
            model[1].bias.fill_(inf)
            model[1].get_buffer("running_var")[1] = inf
        assert names_of(torch.tensor([nan]), model, **{"1.bias": 7, "1.running_var": 9}) == [
            ("batch", "input", 1, 1, None),
            ("0.weight", "parameter", 1, 4, None),
            ("1.bias", "parameter", 2, 2, 7),
            ("1.running_var", "buffer", 1, 2, None),
        ]

    def test_views_and_tensors_of_a_graph_are_read_as_well(self) -> None:
        x = torch.tensor([[1.0, nan]], requires_grad=True)
        assert names_of([(x * 2).t()[1:].expand(3, 1)]) == [("batch[0]", "input", 3, 3, None)]


class TestZeroed:
    def batch(self) -> dict[str, Any]:
        return {
            "x": torch.tensor([[1.5, inf], [nan, -inf]]),
            "clean": torch.tensor([2.0]),
            "nested": [Sample(torch.tensor([-0.0, nan], dtype=torch.float16))],
            "ids": torch.tensor([3]),
            "more": UserDict(y=torch.tensor([inf], dtype=torch.float64)),
        }

    def test_what_is_not_finite_is_zero_within(self) -> None:
        batch = self.batch()
        with zeroed(batch):
            assert batch["x"].tolist() == [[1.5, 0.0], [0.0, 0.0]]
            assert batch["nested"][0].image.tolist() == [0.0, 0.0]
            assert batch["more"]["y"].tolist() == [0.0]
            assert (batch["clean"].tolist(), batch["ids"].tolist()) == ([2.0], [3])

    @pytest.mark.parametrize("error", [False, True])
    def test_every_bit_comes_back(self, error: bool) -> None:
        batch = self.batch()
        odd = torch.tensor([0x7FC00123, 0x7F800001, -0x00400000, 0x3F800000], dtype=torch.int32).view(torch.float32)
        batch["odd"] = odd
        bits = {name: each.clone().view(torch.int32) for name, each in batch.items() if name in ("x", "clean", "odd")}
        objects = {name: id(each) for name, each in batch.items()}
        try:
            with zeroed(batch):
                assert odd.isfinite().all()
                if error:
                    raise ValueError
        except ValueError:
            pass
        assert {name: id(each) for name, each in batch.items()} == objects
        for name, expected in bits.items():
            assert torch.equal(batch[name].view(torch.int32), expected), name
        assert batch["nested"][0].image.view(torch.int16)[0] == -(2**15)

    def test_a_leaf_that_gets_gradients_is_written_to(self) -> None:
        x = torch.tensor([nan, 1.0], requires_grad=True)
        with zeroed([x]):
            assert x.tolist() == [0.0, 1.0]
        assert bool(x[0].isnan())

    def test_what_cannot_be_looked_at_is_left_alone(self) -> None:
        batch = [(torch.eye(2) * torch.tensor([nan, 1.0])).to_sparse(), torch.tensor([nan])]
        with zeroed(batch):
            assert bool(batch[0].to_dense().isnan().any())
            assert batch[1].tolist() == [0.0]

    def test_a_clean_batch_is_left_alone(self) -> None:
        x = torch.ones(2)
        with zeroed([x, None, "text"]):
            assert x._version == 0
        assert x._version == 0

    def test_the_output_of_a_tokenizer_is_zeroed_as_it_is_named(self) -> None:
        batch = Encoding(scores=torch.tensor([nan]))
        assert [name for name, *_ in names_of(batch)] == ["batch['scores']"]
        with zeroed(batch):
            assert batch.data["scores"].tolist() == [0.0]

    def test_what_is_complex_is_zeroed_as_it_is_named(self) -> None:
        batch = [torch.tensor([complex(nan, 1)])]
        assert names_of(batch) != []
        with zeroed(batch):
            assert bool(batch[0].isfinite().all())

    def test_expanded_tensors_are_zeroed(self) -> None:
        batch = [torch.tensor([nan]).expand(3)]
        assert names_of(batch) != []
        with zeroed(batch):
            assert batch[0].tolist() == [0.0] * 3
        assert bool(batch[0].isnan().all())
