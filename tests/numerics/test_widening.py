"""A step without half precision: the same operations, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.numerics import Trace, Widening, trace

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
BIG = 300.0  # Its square leaves the range of fp16.


def big(dtype: torch.dtype = FULL) -> Tensor:
    return torch.full((4,), BIG, dtype=dtype)


class TestCasts:
    @pytest.mark.parametrize("dtype", [HALF, BF16])
    @pytest.mark.parametrize(
        "cast",
        [
            lambda x, dtype: x.to(dtype),
            lambda x, dtype: x.type(dtype),
            lambda x, dtype: x.half() if dtype is HALF else x.bfloat16(),
            lambda x, dtype: torch.empty(4, dtype=dtype).copy_(x),
            lambda x, dtype: x.double().to(dtype),
            lambda x, dtype: torch.ops.aten._to_copy(x, dtype=dtype),
        ],
    )
    def test_those_of_the_code_give_fp32_without_rounding(self, cast: Callable[[Tensor, torch.dtype], Tensor], dtype: torch.dtype) -> None:
        values = torch.tensor([1e6, 1 + 2.0**-20, 1e-9, 3e38])
        with Widening():
            result = cast(values, dtype)
        assert result.dtype is FULL
        assert torch.equal(result, values)

    @pytest.mark.parametrize("dtype", [HALF, BF16])
    def test_those_of_autocast_give_fp32(self, dtype: torch.dtype) -> None:
        x, weight = torch.randn(3, 4) * 1e4, torch.randn(4, 5) * 1e4
        with Widening(), torch.autocast("cpu", dtype=dtype):
            product = x @ weight
        assert product.dtype is FULL
        assert torch.equal(product, x @ weight)

    @pytest.mark.parametrize("dtype", [torch.float64, FULL, torch.int32, torch.bool, torch.complex64])
    def test_others_stay(self, dtype: torch.dtype) -> None:
        with Widening():
            assert big().to(dtype).dtype is dtype

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.full((4,), 1e6, dtype=HALF),
            lambda: torch.zeros(4, dtype=HALF) + 1e6,
            lambda: torch.full_like(big(HALF), 1e6),
            lambda: big().new_full((4,), 1e6, dtype=HALF),
            lambda: big(HALF).new_full((4,), 1e6),
            lambda: torch.sum(torch.full((4, 4), 250_000.0), dim=0, dtype=HALF),
            lambda: torch.full((4, 1), 1e6).prod(dim=1, dtype=BF16),
            lambda: torch.full((1, 4), 1e6).cumsum(0, dtype=HALF)[0],
        ],
    )
    def test_a_dtype_among_arguments_is_fp32(self, make: Callable[[], Tensor]) -> None:
        with Widening():
            result = make()
        assert result.dtype is FULL
        assert result.tolist() == [1e6] * 4


class TestSoftmax:
    @pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
    @pytest.mark.parametrize(("stored", "asked"), [(HALF, FULL), (HALF, None), (HALF, HALF), (FULL, HALF), (BF16, FULL), (FULL, FULL)])
    def test_what_converts_is_told_not_to(self, function: Callable[..., Tensor], stored: torch.dtype, asked: torch.dtype | None) -> None:
        x = torch.randn(3, 5).to(stored)
        with Widening():
            result = function(x, -1, dtype=asked)
        assert result.dtype is FULL
        assert torch.equal(result, function(x.float(), -1))

    def test_the_kernels_own_argument_is_refused_no_more(self) -> None:
        x = big(HALF)
        with Widening():
            result = torch.ops.aten._softmax(x, 0, True)
        assert result.tolist() == [0.25] * 4


class TestStorage:
    def test_what_is_stored_in_half_stays_so_and_is_rounded(self) -> None:
        stored = big(HALF)
        with Widening():
            result = stored.mul_(2.0 + 2.0**-12)
        assert result is stored
        assert stored.dtype is HALF
        assert stored.tolist() == [600.0] * 4

    def test_it_takes_fp32(self) -> None:
        stored = torch.zeros(4, dtype=HALF)
        with Widening():
            stored.add_(big().half() * BIG)
        assert stored.tolist() == [float("inf")] * 4

    def test_what_is_made_meanwhile_is_not_rounded(self) -> None:
        with Widening():
            made = big(HALF)
            made.mul_(BIG)
            indexed = torch.zeros(2, 4, dtype=HALF)
            indexed[torch.tensor([0, 1]), torch.tensor([1, 2])] = torch.tensor([1e6, 2e6]).half()
        assert made.tolist() == [BIG**2] * 4
        assert (indexed.dtype, indexed.max().item()) == (FULL, 2e6)

    def test_values_are_put_at_places_of_what_is_stored_in_half(self) -> None:
        stored = torch.zeros(2, 4, dtype=HALF)
        with Widening():
            stored[torch.tensor([0, 1]), torch.tensor([1, 2])] = torch.tensor([5.0, 1e6])[:2].half()
            stored[0, 3] = 7
        assert stored.tolist() == [[0.0, 5.0, 0.0, 7.0], [0.0, 0.0, float("inf"), 0.0]]

    def test_out_takes_the_dtype_of_what_is_written_to(self) -> None:
        stored, wide = torch.empty(4, dtype=HALF), torch.empty(4)
        with Widening():
            torch.mul(big(HALF), 2.0, out=stored)
            torch.mul(big(HALF), big(HALF), out=wide)
        assert (stored.dtype, stored.tolist()) == (HALF, [600.0] * 4)
        assert wide.tolist() == [BIG**2] * 4

    def test_running_statistics_in_half_are_written_to(self) -> None:
        norm = nn.BatchNorm1d(4).half()
        with Widening():
            norm(torch.randn(8, 4).half())
        assert norm.running_mean is not None
        assert norm.running_mean.dtype is HALF
        assert norm.running_mean.abs().min() > 0


class TestLists:
    def test_results_are_in_fp32(self) -> None:
        with Widening():
            results = torch._foreach_mul([big(HALF), big(BF16), big()], BIG)
            stacked = torch.cat([big(HALF) * big(HALF), big()])
        assert [each.dtype for each in results] == [FULL] * 3
        assert [each[0].item() for each in results] == [BIG**2] * 3
        assert stacked.dtype is FULL

    def test_what_is_stored_in_half_is_written_to(self) -> None:
        stored = [big(HALF), big(HALF)]
        with Widening():
            torch._foreach_add_(stored, [big(), big().half()])
            torch._foreach_copy_([stored[0]], [big() * 3])
        assert [(each.dtype, each[0].item()) for each in stored] == [(HALF, 900.0), (HALF, 600.0)]


class TestGradients:
    def test_a_function_of_the_users_own_is_widened_forward_and_backward(self) -> None:
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                ctx.save_for_backward(x)
                low = x.half()
                return low * low

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Tensor:
                (x,) = ctx.saved_tensors
                result: Tensor = (gradients[0].half() * BIG * x).float()
                return result

        x = torch.full((4,), BIG, requires_grad=True)
        with Widening():
            y: Tensor = Square.apply(x)  # type: ignore[no-untyped-call]
            y.sum().backward()  # type: ignore[no-untyped-call]
        assert y.detach().tolist() == [BIG**2] * 4
        assert x.grad is not None
        assert x.grad.tolist() == [BIG**2] * 4

    def test_half_parameters_are_widened_where_they_are_used(self) -> None:
        layer = nn.Linear(4, 3).half()
        with Widening():
            result = layer(big(HALF) * BIG)
        assert result.dtype is FULL
        assert torch.equal(result, F.linear(big() * BIG, layer.weight.float(), layer.bias.float()))
        assert layer.weight.dtype is HALF


class Net(nn.Module):
    """What autocast lowers, what it keeps, casts of the code itself, and a mask that only fp32 holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.attention = nn.Embedding(11, 8), nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.convolution, self.batch_norm, self.head = nn.Conv1d(8, 4, 3), nn.BatchNorm1d(4), nn.Linear(4, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids))
        mask = torch.zeros(len(ids[0]), len(ids[0]), dtype=x.dtype).masked_fill(torch.ones(6, 6).triu(1) > 0, -1e9)
        x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        x = self.batch_norm(self.convolution(x.transpose(1, 2))).relu().mean(-1)
        result: Tensor = self.head(x).to(HALF)
        return result


IDS, TARGET = torch.arange(12).reshape(2, 6) % 11, torch.tensor([1, 4])


def step(model: Net, dtype: torch.dtype) -> tuple[Trace, Tensor, list[Tensor]]:
    """The trace, the loss and the gradients of a step under autocast."""
    model.zero_grad()
    with trace(model) as seen:
        with torch.autocast("cpu", dtype=dtype):
            loss = F.cross_entropy(model(IDS).float(), TARGET)
        loss.backward()  # type: ignore[no-untyped-call]
    return seen, loss.detach(), [each.grad for each in model.parameters() if each.grad is not None]


def calls(seen: Trace) -> list[tuple[str, str, str, str]]:
    """What ran where, without casts: in fp32, autocast casts again what it would have cast once."""
    return [(op.op, op.phase, op.site.module, op.node) for op in seen.ops if op.op != "aten._to_copy.default"]


@pytest.mark.parametrize("dtype", [HALF, BF16])
class TestSteps:
    def test_it_computes_what_a_step_in_fp32_computes(self, dtype: torch.dtype) -> None:
        model = Net()
        with Widening():
            _, loss, gradients = step(model, dtype)
        model.zero_grad()
        expected = F.cross_entropy(uncast(model), TARGET)
        expected.backward()  # type: ignore[no-untyped-call]
        references = [each.grad for each in model.parameters() if each.grad is not None]
        assert torch.equal(loss, expected.detach())
        assert len(references) == len(gradients) > 10
        for gradient, reference in zip(gradients, references, strict=True):
            assert torch.equal(gradient, reference)

    def test_it_runs_the_operations_of_the_step_in_half(self, dtype: torch.dtype) -> None:
        model = Net()
        low, _, _ = step(model, dtype)
        with Widening():
            full, _, _ = step(model, dtype)
        halves = [op for op in low.ops if {"float16", "bfloat16"} & {*op.output_dtypes}]
        assert len(halves) > 10
        assert all({"float16", "bfloat16"}.isdisjoint((*op.input_dtypes, *op.output_dtypes)) for op in full.ops)
        assert calls(low) == calls(full)


def uncast(model: Net) -> Tensor:
    """What a model computes in fp32, with nothing cast."""
    cast: Any = Tensor.to

    def stay(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return cast(tensor, *[FULL if each is HALF else each for each in args], **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "to", stay)
        result: Tensor = model(IDS)
        return result
