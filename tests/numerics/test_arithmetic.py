"""The mode that computes half operations in fp32: what it leaves to native kernels, what it is given, and what it must not break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep._torch import DispatchMode, predict_dtypes
from halfstep.numerics import rehearse
from halfstep.numerics.arithmetic import how_computed
from tests.numerics.models import STEPS

ATEN = torch.ops.aten
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
HALVES = (FP16, BF16)


def takes_half(values: Any) -> bool:
    return any(each.dtype in HALVES if isinstance(each, Tensor) else isinstance(each, list | tuple) and takes_half(each) for each in values)


class Seeing(DispatchMode):
    """Notes operations that are given half tensors; below a rehearsal where it is opened before, and above where it is opened after."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[str, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if takes_half([*args, *(kwargs or {}).values()]):
            self.seen[str(func)] = func
        return func(*args, **(kwargs or {}))

    def by(self, how: str) -> set[str]:
        return {name for name, operation in self.seen.items() if how_computed(operation) == how}


@pytest.mark.parametrize("name", STEPS)
def test_what_computes_in_a_training_step_never_meets_a_half_kernel(name: str) -> None:
    torch.manual_seed(0)
    with Seeing() as below, rehearse("cuda"), Seeing() as above:
        with torch.autocast("cpu", dtype=FP16):
            loss = STEPS[name]()
        (loss * 64).backward()  # type: ignore[no-untyped-call]
    assert above.by("fp32")
    assert below.by("fp32") == set()
    assert below.by("passed") >= above.by("passed") - {"aten._local_scalar_dense.default"}
    assert below.by("view") >= above.by("view")


@pytest.mark.parametrize(
    ("operation", "how"),
    [
        (ATEN.mm.default, "fp32"),
        (ATEN.exp.default, "fp32"),
        (ATEN.native_batch_norm.default, "fp32"),
        (ATEN.add.Scalar, "fp32"),
        (ATEN.add_.Tensor, "exact"),
        (ATEN.div.Tensor, "exact"),
        (ATEN.clone.default, "passed"),
        (ATEN.view.default, "view"),
        (ATEN.split.Tensor, "view"),
    ],
    ids=str,
)
def test_how_an_operation_is_computed(operation: Any, how: str) -> None:
    assert how_computed(operation) == how


def half(*shape: int, dtype: torch.dtype = FP16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


class TestDtypesOfTheTarget:
    """Fake tensors of CUDA tell what an operation returns."""

    @pytest.mark.parametrize("dtype", HALVES, ids=str)
    @pytest.mark.parametrize(
        ("operation", "args", "expected"),
        [
            (ATEN.native_layer_norm.default, ((2, 4), [4], None, None, 1e-5), ("half", FP32, FP32)),
            (ATEN.native_group_norm.default, ((2, 4, 3), None, None, 2, 4, 3, 2, 1e-5), ("half", "half", "half")),
            (ATEN._fused_rms_norm.default, ((2, 4), [4], None, None), ("half", FP32)),
            (ATEN._softmax.default, ((2, 4), 1, False), ("half",)),
            (ATEN._softmax.default, ((2, 4), 1, True), (FP32,)),
            (ATEN.var_mean.correction, ((2, 4), [1]), ("half", "half")),
            (ATEN.max_pool2d_with_indices.default, ((1, 2, 4, 4), [2, 2]), ("half", torch.int64)),
            (ATEN.convolution.default, ((1, 2, 4, 4), (3, 2, 1, 1), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1), ("half",)),
            (ATEN.sum.dim_IntList, ((2, 4), [1]), ("half",)),
            (ATEN.frexp.Tensor, ((2, 4),), ("half", torch.int32)),
        ],
        ids=str,
    )
    def test_of_results(self, operation: Any, args: tuple[Any, ...], expected: tuple[Any, ...], dtype: torch.dtype) -> None:
        given = [half(*each, dtype=dtype) if isinstance(each, tuple) else each for each in args]
        predicted = predict_dtypes(operation, given, {}, device_type="cuda")
        assert predicted == [dtype if each == "half" else each for each in expected]

    def test_of_batch_norm(self) -> None:
        x, scale = half(2, 3, 4, 4), torch.ones(3)
        args = (x, scale, scale, scale.clone(), scale.clone(), True, 0.1, 1e-5)
        predicted = predict_dtypes(ATEN.native_batch_norm.default, args, {}, device_type="cuda")
        assert predicted == [FP16, FP32, FP32]

    def test_results_have_them(self) -> None:
        x = half(2, 4)
        with rehearse("cuda"):
            assert [each.dtype for each in torch.native_layer_norm(x, [4], None, None, 1e-5)] == [FP16, FP32, FP32]
            assert x.sum().dtype is FP16
            assert x.sum(dtype=FP32).dtype is FP32
            assert torch._softmax(x, 1, half_to_float=True).dtype is FP32
            assert torch._softmax(x, 1, half_to_float=False).dtype is FP16


class TestForms:
    """In place, `out=`, lists, mixed dtypes, and numbers."""

    @pytest.mark.parametrize("dtype", HALVES, ids=str)
    @pytest.mark.parametrize(
        "run",
        [
            lambda x: x.exp_(),
            lambda x: x.t().exp_(),
            lambda x: x[:, 1:].mul_(0.3).add_(0.1),
            lambda x: x.addcmul_(x, x, value=0.3),
            lambda x: x.lerp_(x * 2, 0.3),
            lambda x: x.clamp_(-0.3, 0.7),
            lambda x: torch.exp(x, out=torch.empty(0, dtype=x.dtype)),
            lambda x: torch.mm(x, x, out=torch.empty_like(x)),
            lambda x: torch.stack(torch._foreach_exp([x, x * 2])),
            lambda x: torch.stack(torch._foreach_addcdiv([x, x], [x, x], [x.abs() + 1, x.abs() + 2], value=0.1)),
            lambda x: torch.where(x > 0, x.tanh(), 0.1),
            lambda x: torch.lerp(x, x.exp(), x.abs()),
        ],
    )
    def test_results_are_close_to_fp32_and_keep_their_dtype(self, run: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        x = half(4, 4, dtype=dtype)
        expected = run(x.float())
        with rehearse("cuda", dtype):
            result = run(x.clone())
        assert result.dtype is dtype
        assert torch.allclose(result.float(), expected, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)

    def test_what_is_given_with_fp32_returns_fp32(self) -> None:
        x, y = half(4, 4), torch.randn(4, 4)
        with rehearse("cuda"):
            assert torch.equal(torch.addcmul(y, x, x), torch.addcmul(y, x.float(), x.float()))
            assert torch.equal(x + y, x.float() + y)
            assert torch.equal(x * torch.tensor(0.1), (x.float() * 0.1).half())  # One without dimensions does not widen.
            assert torch.equal(x.abs().pow(2.5), x.abs().float().pow(2.5).half())

    def test_in_place_on_fp32_with_half(self) -> None:
        y, x = torch.zeros(4, 4), half(4, 4)
        with rehearse("cuda"):
            assert y.add_(x, alpha=0.3) is y
        assert torch.equal(y, torch.zeros(4, 4).add_(x.float(), alpha=0.3))

    def test_an_argument_that_is_written_to_and_read(self) -> None:
        x = half(4, 4)
        expected = (x.float() + x.float() @ x.float()).half()
        with rehearse("cuda"):
            assert x.addmm_(x, x) is x
        assert torch.equal(x, expected)

    def test_fp16_and_bf16_together(self) -> None:
        with rehearse("cuda"):
            assert (half(2) + half(2, dtype=BF16)).dtype is FP32
            assert torch.atan2(half(2), half(2, dtype=BF16)).dtype is FP32


class TestDerivatives:
    @pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own call of it
    def test_forward_mode(self) -> None:
        x = half(4)
        with rehearse("cuda"):
            out, tangent, *_ = torch.func.jvp(torch.exp, (x,), (torch.ones_like(x),))
        assert torch.equal(out, x.float().exp().half())
        assert tangent.dtype is FP16
        assert torch.equal(tangent, out)

    def test_gradients_of_each_example(self) -> None:
        weight, x = half(4), half(3, 4)
        with rehearse("cuda"):
            found = torch.func.vmap(torch.func.grad(lambda w, v: (w * v).exp().sum()), (None, 0))(weight, x)
            one_by_one = torch.stack([torch.func.grad(lambda w, v=each: (w * v).exp().sum())(weight) for each in x])
        assert found.dtype is FP16
        assert torch.equal(found, one_by_one)

    def test_of_derivatives(self) -> None:
        x = half(4).requires_grad_()
        with rehearse("cuda"):
            (first,) = torch.autograd.grad(F.silu(x).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), x)
        exact = x.detach().double().requires_grad_()
        (first,) = torch.autograd.grad(F.silu(exact).sum(), exact, create_graph=True)
        (expected,) = torch.autograd.grad(first.square().sum(), exact)
        assert second.dtype is FP16
        assert torch.allclose(second.double(), expected, rtol=4e-3, atol=4e-3)

    def test_without_gradients_and_in_inference_mode(self) -> None:
        layer = nn.Linear(4, 4).half()
        with rehearse("cuda"):
            expected = layer(half(2, 4)).detach()
            with torch.no_grad():
                assert torch.equal(layer(half(2, 4)), expected)
            with torch.inference_mode():
                assert torch.equal(layer(half(2, 4)), expected)


@torch.library.custom_op("halfstep_tests::double_it", mutates_args=())
def double_it(x: Tensor) -> Tensor:
    return x * 2


class TestOtherTensors:
    """What it does not know, it leaves alone."""

    @pytest.mark.parametrize(
        "run",
        [
            lambda x: x.nonzero(),
            lambda x: x.masked_select(x > 0),
            lambda x: x.unique(),
            lambda x: x[x > 0],
            lambda x: x.sort().values,
            lambda x: torch.bincount((x > 0).flatten().long()),
            lambda x: x.tolist(),
            lambda x: x.sum().item(),
            double_it,
        ],
    )
    def test_operations_whose_results_depend_on_values(self, run: Callable[[Tensor], Any]) -> None:
        x = torch.tensor([[1.0, -2.0], [0.0, 3.0]], dtype=FP16)
        expected = run(x)
        with rehearse("cuda"):
            result = run(x)
        assert type(result) is type(expected)
        assert torch.equal(result, expected) if isinstance(expected, Tensor) else result == expected

    def test_sparse_gradients(self) -> None:
        embedding, tokens = nn.Embedding(5, 3, sparse=True).half(), torch.tensor([1, 1, 2])
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.5)
        before = embedding.weight.detach().clone()
        with rehearse("cuda"):
            embedding(tokens).sum().backward()
            gradient = embedding.weight.grad
            assert gradient is not None
            assert gradient.is_sparse
            assert (gradient + gradient).coalesce().values().tolist() == [[4.0] * 3, [2.0] * 3]
            optimizer.step()
        assert torch.equal(embedding.weight[3:], before[3:])
        assert torch.allclose(embedding.weight[1], before[1] - 1, atol=2e-3)

    def test_fake_and_meta_tensors(self) -> None:
        with rehearse("cuda"):
            assert torch.empty(2, 3, dtype=FP16, device="meta").softmax(-1).dtype is FP16

    def test_complex_numbers(self) -> None:
        x = torch.complex(torch.ones(2), torch.ones(2))
        with rehearse("cuda"):
            assert torch.equal(x * x, torch.complex(torch.zeros(2), torch.full((2,), 2.0)))

    def test_nested_tensors(self) -> None:
        with rehearse("cuda"):
            nested = torch.nested.nested_tensor([half(2, 3), half(4, 3)], layout=torch.jagged)
            values = (nested * 2).values()
        assert torch.equal(values, torch.cat([half(2, 3), half(4, 3)]) * 2)

    @pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
    def test_quantized_tensors(self) -> None:
        with rehearse("cuda"):
            quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
            assert torch.allclose(quantized.dequantize(), torch.ones(2))
