"""Pure regions: everything in half, with weights that stay stored in fp32."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from halfstep import MixedPrecision, Policy

BF16 = torch.bfloat16


class Dtypes(TorchDispatchMode):
    """The floating-point dtypes that operations return, by the name of the operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor) and each.is_floating_point():
                self.seen.setdefault(func._schema.name.removeprefix("aten::"), set()).add(each.dtype)
        return result


def gradients(model: nn.Module, run: Callable[[], Tensor]) -> list[Tensor]:
    model.zero_grad()
    run().float().square().mean().backward()  # type: ignore[no-untyped-call]
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def by_hand(model: nn.Module, *inputs: Any) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of a copy of a model that is stored in half."""
    half = copy.deepcopy(model).bfloat16()
    out: list[Tensor] = []

    def run() -> Tensor:
        out.append(half(*(x.bfloat16() if x.is_floating_point() else x for x in inputs)).float())
        return out[-1]

    return out[0] if out else run(), [gradient.float() for gradient in gradients(half, run)]


class Mlp(nn.Module):
    """Layers, a buffer, a parameter that is added, and one layer's weight used by another."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6))
        self.more = nn.ParameterList([nn.Parameter(torch.randn(6, 6)) for _ in range(2)])
        self.shift = nn.Parameter(torch.randn(6))
        self.register_buffer("scale", torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x) * self.scale + self.shift
        for weight in self.more:
            x = linear(x, weight)
        tied: nn.Linear = self.layers[0]  # type: ignore[assignment]
        return torch.softmax(linear(x, tied.weight), dim=-1)


class Rnn(nn.Module):
    def __init__(self, kind: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(4, 5, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rnn(x)[0]
        return out


class Attention(nn.Module):
    """Its output projection is never called: attention takes its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attn(x, x, x)[0]
        return out


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (Mlp, (3, 6)),
    "attention": (Attention, (2, 3, 8)),
    "gru": (lambda: Rnn(nn.GRU), (2, 3, 4)),
    "lstm": (lambda: Rnn(nn.LSTM), (2, 3, 4)),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.ConvTranspose2d(3, 1, 2)), (2, 2, 5, 5)),
}


@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_a_model_in_half_computes(name: str, one_thread: None) -> None:
    make, shape = CASES[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    expected, expected_gradients = by_hand(model, x)
    with Policy.parse("pure bf16").apply(model):
        out = model(x)
        found = gradients(model, lambda: model(x))
    assert out.dtype is torch.float32
    assert torch.equal(out, expected)
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    for one, other in zip(found, expected_gradients, strict=True):
        assert one.dtype is torch.float32
        # A weight that is used twice has its gradients summed in half by a model in half, in fp32 here or in half as well.
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_every_operation_runs_in_half_forward_and_backward(name: str, one_thread: None) -> None:
    make, shape = CASES[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    with Policy.parse("pure bf16").apply(model), Dtypes() as dtypes:
        out = model(x)
        out.backward(torch.ones_like(out))
    # Casts there are, and memory that is only taken or shared; the sums that a kernel keeps besides, as norms do, are in fp32 on their own.
    aside = {"_to_copy", "where", "copy_", "detach", "ones_like", "empty_like", "clone", "zeros", "alias"}
    aside |= {"native_layer_norm", "native_group_norm"}
    wrong = {op: kinds for op, kinds in dtypes.seen.items() if kinds != {BF16} and op not in aside}
    allowed = {"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"}
    assert set(wrong) <= allowed, wrong


def test_norms_can_be_islands_in_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    with Policy.parse("pure bf16; torch.nn.LayerNorm=fp32").apply(model), Dtypes() as dtypes:
        model(torch.randn(2, 4)).sum().backward()
    assert dtypes.seen["native_layer_norm"] == {torch.float32}
    assert dtypes.seen["native_layer_norm_backward"] == {torch.float32}
    assert dtypes.seen["addmm"] == {BF16}


class Statistics(nn.Module):
    """A buffer that is written to in place, and one that is assigned anew."""

    count: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("mean", torch.zeros(2))
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count.add_(1)
            self.mean = 0.5 * self.mean + 0.5 * x.mean(dim=0)
        return x * self.weight + self.count


def test_what_the_code_writes_into_buffers_is_kept_in_their_own_dtype() -> None:
    model = Statistics()
    buffer = model.count
    with Policy.parse("pure bf16").apply(model):
        model(torch.full((3, 2), 2.0))
        out = model(torch.full((3, 2), 2.0))
    assert model.count is buffer
    assert (model.count.dtype, model.count.tolist()) == (torch.float32, [2.0, 2.0])
    assert (model.mean.dtype, model.mean.tolist()) == (torch.float32, [1.5, 1.5])
    assert out.tolist() == [[4.0, 4.0]] * 3


def test_a_weight_is_cast_once_in_a_forward_pass_and_again_after_it_changed() -> None:
    layer = nn.Linear(2, 2)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.layer(x)
            first = self.layer.weight
            assert first.requires_grad
            assert self.layer.weight is first
            result: Tensor = self.layer(self.layer(x))
            return result

    model = Twice()
    with Policy.parse("pure bf16").apply(model):
        before = model(torch.ones(1, 2))
        before.sum().backward()
        assert layer.weight.grad is not None
        with torch.no_grad():
            layer.weight.mul_(2)
        assert not torch.equal(model(torch.ones(1, 2)), before)


@contextmanager
def _own_loop(model: nn.Module) -> Iterator[Callable[[Tensor], None]]:
    with Policy.parse("pure bf16").apply(model):
        yield lambda x: model(x).square().mean().backward()


@contextmanager
def _engine(model: nn.Module) -> Iterator[Callable[[Tensor], None]]:
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.0), Policy.parse("pure bf16"))

    def run(x: Tensor) -> None:
        with amp.autocast():
            loss = model(x).square().mean()
        amp.backward(loss)

    yield run


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool | None, bare: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
        self.shift = nn.Parameter(torch.randn(4))
        self.reentrant, self.bare = reentrant, bare

    def forward(self, x: Tensor) -> Tensor:
        run = self._bare if self.bare else self.block
        x = x * self.shift
        result: Tensor = run(x) if self.reentrant is None else checkpoint(run, x, use_reentrant=self.reentrant)
        return result

    def _bare(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.block(torch.sigmoid(x)) + self.shift)


@pytest.mark.parametrize(("loop", "bare"), [(_own_loop, False), (_engine, False), (_engine, True)])
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_checkpointed_runs_again_as_it_ran(loop: Any, bare: bool, reentrant: bool) -> None:
    found = []
    for kind in (None, reentrant):
        torch.manual_seed(0)
        model = Checkpointed(reentrant=kind, bare=bare)
        with loop(model) as run:
            run(torch.randn(3, 4))
        found.append([parameter.grad for parameter in model.parameters()])
    for plain, again in zip(*found, strict=True):
        assert plain is not None
        assert again is not None
        torch.testing.assert_close(again, plain, rtol=1e-2, atol=1e-4)


def test_it_compiles_without_a_break() -> None:
    torch.manual_seed(0)
    model, x = Mlp(), torch.randn(3, 6)
    with Policy.parse("pure bf16; layers.2=fp32").apply(model):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-2, atol=1e-2)
        plain, traced = gradients(model, lambda: model(x)), gradients(model, lambda: compiled(x))
    for one, other in zip(plain, traced, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=1e-3)
