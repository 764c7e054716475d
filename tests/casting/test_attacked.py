"""What went wrong once with modules, arguments and operations that models do have."""

from __future__ import annotations

import gc
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.nn.functional import softmax
from torch.utils.checkpoint import checkpoint

from halfstep import MixedPrecision, Policy
from halfstep.casting import watched_operations
from halfstep.casting.operations import _registered
from halfstep.errors import ConfigurationError

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=BF16)


def gradient_pairs(plain: list[Tensor | None], again: list[Tensor | None]) -> Iterator[tuple[Tensor, Tensor]]:
    """The gradients of two runs side by side; each run has one for every parameter."""
    for one, other in zip(plain, again, strict=True):
        assert one is not None
        assert other is not None
        yield one, other


class TestStatistics:
    """Batch and instance norm write to their running statistics, which neither the schema nor the tensor's version tells."""

    @pytest.mark.parametrize("compiled", [False, True])
    @pytest.mark.parametrize("text", ["pure bf16", "pure bf16; 0=fp32"])
    def test_a_pure_policy_keeps_them(self, text: str, compiled: bool, one_thread: None) -> None:
        torch.manual_seed(0)
        model, plain = nn.Sequential(nn.BatchNorm1d(4)), nn.BatchNorm1d(4)
        x = torch.randn(16, 4) * 3 + 5
        with Policy.parse(text).apply(model):
            run: Callable[[Tensor], Tensor] = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
            for _ in range(5):
                run(x)
                plain(x)
        norm: Any = model[0]
        assert norm.running_mean.dtype is FP32
        torch.testing.assert_close(norm.running_mean, plain.running_mean, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(norm.running_var, plain.running_var, rtol=2e-2, atol=2e-2)
        assert int(norm.num_batches_tracked) == 5

    @pytest.mark.parametrize("kind", [nn.BatchNorm1d, lambda n: nn.InstanceNorm1d(n, track_running_stats=True)])
    def test_an_operation_in_half_keeps_them(self, kind: Callable[[int], Any]) -> None:
        torch.manual_seed(0)
        norm, plain, x = kind(4), kind(4), torch.randn(16, 4, 6) * 3 + 5
        with Policy.parse("bf16; op:batch_norm=bf16; op:instance_norm=bf16").apply(norm), autocast():
            out = norm(x)
        plain(x)
        assert out.dtype is BF16
        torch.testing.assert_close(norm.running_mean, plain.running_mean, rtol=2e-2, atol=2e-2)

    def test_elements_that_nobody_wrote_to_are_not_rounded(self) -> None:
        class Table(nn.Module):
            table: Tensor

            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("table", torch.full((3,), 1 / 3))

            def forward(self, x: Tensor) -> Tensor:
                with torch.no_grad():
                    self.table[0] = 7
                return x * self.table

        model = Table()
        with Policy.parse("pure bf16").apply(model):
            model(torch.ones(3))
        assert model.table.tolist() == [7.0, torch.tensor(1 / 3).item(), torch.tensor(1 / 3).item()]


class TestCompositeOperations:
    """Some operations are made of others, which autocast casts."""

    def test_where_its_override_does_not_hold_it_is_as_autocast_has_it(self) -> None:
        class Product(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.einsum("ij,jk->ik", x, x)

        model, x = nn.Sequential(Product(), Product()), torch.randn(3, 3)
        with Policy.parse("bf16; op:einsum=fp32; 1=bf16").apply(model), autocast():
            assert model[0](x).dtype is FP32
            assert model[1](x).dtype is BF16

    def test_a_foreign_model_is_left_alone(self) -> None:
        model = nn.Linear(3, 3)
        MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16; op:einsum=fp32")
        with autocast():
            assert torch.einsum("ij,jk->ik", torch.ones(2, 2), torch.ones(2, 2)).dtype is BF16


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fp32; op:linear.default=bf16; op:linear=fp32", "AddmmBackward0"),
        ("fp32; op:linear=fp32; op:linear.default=bf16", "ToCopyBackward0"),
    ],
)
def test_in_an_fp32_region_the_later_word_on_an_overload_counts(text: str, expected: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with Policy.parse(text).apply(model):
        out = model(torch.ones(1, 2))
    assert out.grad_fn is not None
    assert out.grad_fn.name() == expected  # What is lowered in an fp32 region is cast back.


def test_a_call_that_says_its_dtype_is_left_alone() -> None:
    x = torch.tensor([0.1, 0.2, 0.3])
    with Policy.parse("bf16; op:softmax=fp16").apply(nn.Identity()), autocast():
        assert torch.equal(softmax(x, dim=0, dtype=FP32), x.softmax(0, dtype=FP32))
        assert softmax(x, dim=0, dtype=FP32).dtype is FP32
        assert softmax(x, dim=0).dtype is FP16
    assert torch.equal(softmax(x, dim=0, dtype=FP32), softmax(x, dim=0))


def test_a_class_that_is_in_no_model_is_an_error_with_wildcards_too() -> None:
    with pytest.raises(ConfigurationError, match=r"'class:\*Lineer\*=fp32' matches no module"):
        Policy.parse("bf16; class:*Lineer*=fp32").apply(nn.Linear(1, 1))


def test_the_class_of_all_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with Policy.parse("bf16").override(nn.Module, "fp32").apply(model), autocast():
        assert model(torch.ones(1, 2)).dtype is FP32


class TestHooks:
    """Some hooks compute a module's weights, so they run where the module does."""

    @pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
    @pytest.mark.parametrize("text", ["pure bf16; 0=fp32", "bf16; 0=fp32"])
    @pytest.mark.parametrize("normed", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm])
    def test_weights_are_computed_in_the_islands_precision(self, text: str, normed: Any) -> None:
        torch.manual_seed(0)
        model, x = nn.Sequential(normed(nn.Linear(4, 4)), nn.Linear(4, 4)).eval(), torch.randn(2, 4).bfloat16()
        with Policy.parse(text).apply(model), autocast():
            out = model[0](x)
        assert out.dtype is FP32
        assert torch.equal(out, model[0](x.float()))

    def test_those_of_the_whole_model_run_around_it(self) -> None:
        model, seen = nn.Sequential(nn.Linear(2, 2)), []
        model.register_forward_hook(lambda module, args, out: seen.append(torch.is_autocast_enabled("cpu")))
        model[0].register_forward_hook(lambda module, args, out: seen.append(torch.is_autocast_enabled("cpu")))
        with Policy.parse("bf16; 0=fp32").apply(model):
            model(torch.ones(1, 2))
        assert seen == [False, False]
        seen.clear()
        with Policy.parse("fp32; 0=bf16").apply(model):
            model(torch.ones(1, 2))
        assert seen == [True, False]


@pytest.mark.parametrize("make", [lambda: nn.Embedding(10, 4, sparse=True), lambda: nn.EmbeddingBag(10, 4, sparse=True, mode="sum")])
def test_sparse_gradients_stay_sparse(make: Callable[[], Any]) -> None:
    model = make()
    with Policy.parse("pure bf16").apply(model):
        model(torch.tensor([[1, 2]])).sum().backward()
    assert model.weight.grad.is_sparse
    assert model.weight.grad.dtype is FP32
    assert model.weight.grad.to_dense()[1].tolist() == [1.0] * 4


def test_lazy_modules_need_a_batch_before_a_pure_policy() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ConfigurationError, match=r"'0\.weight' has no shape yet.*Run one batch"):
        Policy.parse("pure bf16").apply(model)
    with Policy.parse("bf16; 0=fp32").apply(model), autocast():
        assert model(torch.ones(1, 2)).dtype is FP32
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("text", ["pure bf16", "pure bf16; 1=fp32", "bf16; 0=fp32; op:relu=fp32"])
def test_evaluation_in_inference_mode(text: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU()).eval()
    with Policy.parse(text).apply(model), torch.inference_mode():
        first = model(torch.ones(3, 2))
        assert torch.equal(model(torch.ones(3, 2)), first)


class TestContainers:
    """Lists and mappings that a module changes: a key-value cache, say."""

    def test_what_an_island_appends_is_kept(self) -> None:
        class Cached(nn.Linear):
            def forward(self, x: Tensor, cache: Any = None) -> Tensor:
                y = super().forward(x)
                cache.append(y)
                return y

        model = nn.Sequential(Cached(2, 2), Cached(2, 2))
        cache: list[Tensor] = []
        with Policy.parse("bf16; 1=fp32").apply(model), autocast():
            model[1](model[0](torch.ones(1, 2), cache), cache)
        assert [each.dtype for each in cache] == [BF16, FP32]

    @pytest.mark.parametrize("kind", [dict, UserDict])
    def test_what_it_puts_into_a_mapping_or_takes_out_is_kept(self, kind: Any) -> None:
        class Changes(nn.Module):
            def forward(self, given: Any) -> Tensor:
                given["sum"] = given["a"] + given["b"]
                del given["b"]
                result: Tensor = given["sum"]
                return result

        model = nn.Sequential(Changes())
        given = kind(a=torch.ones(1, dtype=BF16), b=torch.ones(1, dtype=BF16))
        kept = given["a"]
        with Policy.parse("bf16; 0=fp32").apply(model), autocast():
            assert model[0](given).dtype is FP32
        assert list(given) == ["a", "sum"]
        assert given["a"] is kept
        assert given["sum"].dtype is FP32

    def test_lists_and_tuples_of_ones_own(self) -> None:
        class Items(list[Any]):
            def __init__(self, items: Any, *, name: str) -> None:
                super().__init__(items)
                self.name = name

        class Pair(tuple[Any, ...]):
            def __new__(cls, *items: Any) -> Pair:
                return super().__new__(cls, items)

        class Passes(nn.Module):
            def forward(self, *given: Any) -> Any:
                return given

        model, half = nn.Sequential(Passes()), torch.ones(1, dtype=BF16)
        pair = Pair(half, half)
        pair.note = "kept"  # type: ignore[attr-defined]
        with Policy.parse("bf16; 0=fp32").apply(model), autocast():
            items, second, most = model[0](Items([half], name="n"), pair, torch.ones(2, 2, dtype=BF16).max(0))
        assert (type(items), items.name, items[0].dtype) == (Items, "n", FP32)
        assert (type(second), len(second), second[1].dtype, second.note) == (Pair, 2, FP32, "kept")
        assert (type(most), most.values.dtype, most.indices.dtype) == (torch.return_types.max, FP32, torch.int64)

    def test_a_frozen_dataclass(self) -> None:
        @dataclass(frozen=True)
        class Batch:
            x: Tensor
            name: str

        class Reads(nn.Module):
            def forward(self, batch: Batch) -> Tensor:
                return batch.x * 1

        model, batch = nn.Sequential(Reads()), Batch(torch.ones(1, dtype=BF16), "n")
        with Policy.parse("bf16; 0=fp32").apply(model):
            assert model[0](batch).dtype is FP32
        assert batch.x.dtype is BF16


def test_an_engine_that_is_dropped_with_its_model_leaves_no_registration() -> None:
    gc.collect()
    before = set(_registered)
    model = nn.Linear(2, 2)
    amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16; op:softmax=fp16; op:erfinv=fp32")
    assert ("aten::erfinv", "cpu") in _registered
    del model, amp
    gc.collect()
    assert set(_registered) == before


def test_calls_are_watched_with_whether_an_override_decides() -> None:
    seen: list[tuple[str, bool]] = []
    model, x = nn.Sequential(nn.Softmax(dim=-1), nn.Softmax(dim=-1)), torch.ones(1, 2)
    with Policy.parse("bf16; op:softmax=fp32; 1=bf16").apply(model):
        with watched_operations(lambda name, decided: seen.append((name, decided))), autocast():
            model(x)
        softmax(x, dim=-1)  # Where autocast is off, nobody looks.
        with autocast():
            softmax(x, dim=-1)
    assert seen == [("aten::softmax.int", True), ("aten::softmax.int", False)]


@pytest.mark.parametrize("text", ["bf16; op:to=fp32", "bf16; op:_to_copy=fp32", "bf16; op:view=fp32", "bf16; op:split=fp32"])
def test_conversions_and_views_cannot_be_cast(text: str) -> None:
    with pytest.raises(ConfigurationError, match="it cannot be cast"):
        Policy.parse(text)


def test_what_the_code_writes_to_a_weight_is_written_to_the_weight() -> None:
    class Clamps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight[0, 0] = 2
            return super().forward(x)

    model = Clamps(2, 1)
    kept = model.weight[0, 1].item()
    with Policy.parse("pure bf16").apply(model):
        model(torch.ones(1, 2))
    assert model.weight.tolist() == [[2.0, kept]]


def test_one_policy_does_not_reach_into_the_model_of_another() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    with Policy.parse("bf16; op:linear=fp32").apply(first), Policy.parse("bf16").apply(second), autocast():
        assert first(torch.ones(1, 2)).dtype is FP32
        assert second(torch.ones(1, 2)).dtype is BF16


class TestCompiled:
    """What the compiler traces is what eager mode does."""

    @staticmethod
    def products(model: nn.Module, x: Tensor, *, region: Any) -> tuple[list[str], list[str]]:
        """The dtypes of the matrix products in the forward and in the backward graph, in order."""
        graphs: list[list[str]] = []

        def capture(graph: Any, inputs: Any) -> Any:
            products = [node for node in graph.graph.nodes if "mm" in str(node.target)]
            graphs.append([str(node.meta["val"].dtype).removeprefix("torch.") for node in products])
            return make_boxed_func(graph.forward)

        torch.compiler.reset()
        compiled = torch.compile(model, backend=aot_autograd(fw_compiler=capture), fullgraph=True)
        with region:
            out = compiled(x)
        out.float().sum().backward()
        forward, backward = graphs
        return forward, backward

    def test_the_backward_pass_of_an_island_is_the_islands(self) -> None:
        model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(2, 3)
        with Policy.parse("bf16; 1=fp32").apply(model):
            forward, backward = self.products(model, x, region=autocast())
        assert forward == ["bfloat16", "float32"]
        assert sorted(backward) == ["bfloat16", "float32", "float32"]

    def test_so_it_is_in_an_engine(self) -> None:
        model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(2, 3)
        amp = MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16; 1=fp32")
        forward, backward = self.products(model, x, region=amp.autocast())
        assert (forward, sorted(backward)) == (["bfloat16", "float32"], ["bfloat16", "float32", "float32"])

    @pytest.mark.parametrize(
        "text",
        ["bf16; 0=fp32; op:gelu=bf16", "bf16; op:linear=fp32; 1=bf16", "fp32; 0=bf16; op:softmax=bf16", "bf16; 0=fp32; op:softmax=fp32"],
    )
    # The compiler looks at what it is given after a break.
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
    def test_operations_run_as_in_eager_mode(self, text: str) -> None:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Softmax(dim=-1)), torch.randn(2, 3)
        with Policy.parse(text).apply(model):
            compiled = torch.compile(model, backend="aot_eager")
            with autocast():
                expected, found = model(x), compiled(x)
        assert torch.equal(found, expected)

    def test_methods_with_defaults_hooks_and_assigned_buffers_break_no_graph(self) -> None:
        class Scaled(nn.Module):
            mean: Tensor

            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 4)
                self.register_buffer("mean", torch.zeros(4))

            def scaled(self, x: Tensor, scale: float = 2.0, *, mask: Tensor | None = None) -> Tensor:
                return self.layer(x) * scale if mask is None else x

            def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
                self.mean = self.mean * 0.5 + x.detach().float().mean(0)
                return self.scaled(x) if bias is None else x

        for text in ("bf16; 0=fp32", "pure bf16", "fp32; 1=bf16", "bf16; 1=fp16", "pure bf16; 1=fp32"):
            model: Any = nn.Sequential(Scaled(), Scaled())
            model[0].register_forward_hook(lambda module, args, result: None)
            with Policy.parse(text).apply(model), autocast():
                torch.compiler.reset()
                compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
                assert compiled(torch.ones(2, 4)).dtype is model(torch.ones(2, 4)).dtype  # type: ignore[no-untyped-call]
            assert model[0].mean.tolist() == [1.5] * 4


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("text", ["pure bf16", "pure bf16; block.1=fp32"])
def test_pure_code_that_is_checkpointed_runs_again_as_it_ran(text: str, reentrant: bool) -> None:
    """Also a bare function, in a loop without an engine, and for gradients that are taken by hand."""

    class Net(nn.Module):
        def __init__(self, *, checkpointed: bool) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
            self.shift = nn.Parameter(torch.randn(4))
            self.checkpointed = checkpointed

        def bare(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.block(torch.sigmoid(x)) + self.shift)

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.shift
            result: Tensor = checkpoint(self.bare, x, use_reentrant=reentrant) if self.checkpointed else self.bare(x)
            return result

    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model, x = Net(checkpointed=checkpointed), torch.randn(3, 4)
        with Policy.parse(text).apply(model):
            model(x).square().mean().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for plain, again in gradient_pairs(*found):
        torch.testing.assert_close(again, plain, rtol=1e-2, atol=1e-5)


class TestBuffersOfPureModels:
    def test_one_that_is_registered_anew_is_seen(self) -> None:
        class Table(nn.Module):
            table: Tensor | None

            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("table", torch.ones(2))

            def forward(self, x: Tensor) -> Tensor:
                assert self.table is not None
                if len(self.table) < len(x):
                    self.register_buffer("table", torch.full((len(x),), 2.0))
                result: Tensor = x * self.table
                self.table = None
                assert self.table is None
                return result

        model = Table()
        with Policy.parse("pure bf16").apply(model):
            assert model(torch.ones(4)).tolist() == [2.0] * 4
        assert model.table is None

    def test_what_is_written_to_the_buffer_itself_stays(self) -> None:
        class Halves(nn.Module):
            level: Tensor

            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("level", torch.ones(2))

            def forward(self, x: Tensor) -> Tensor:
                result: Tensor = x * self.level
                with torch.no_grad():
                    for buffer in self.buffers():
                        buffer.mul_(0.5)
                return result

        model = Halves()
        with Policy.parse("pure bf16").apply(model):
            model(torch.ones(2))
            assert model(torch.ones(2)).tolist() == [0.5, 0.5]
        assert model.level.tolist() == [0.25, 0.25]

    def test_one_that_is_only_read_is_not_written_to(self) -> None:
        class Reads(nn.Module):
            level: Tensor

            def __init__(self, level: Tensor) -> None:
                super().__init__()
                self.register_buffer("level", level)
                self.weight = nn.Parameter(torch.ones(2))

            def forward(self, x: Tensor) -> Tensor:
                return x * self.weight * self.level.to_dense()

        for level in (torch.full((2,), 1 / 3), torch.ones(1).expand(2), torch.ones(2).to_sparse()):
            model = Reads(level)
            with Policy.parse("pure bf16").apply(model):
                before = level._version
                loss = (model(torch.ones(2)) * model.level.to_dense()).sum() + model(torch.ones(2)).sum()
                loss.backward()
            assert level._version == before
            assert model.weight.grad is not None


def test_a_backward_hook_sees_the_weight_itself() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    seen: list[Any] = []
    model[1].register_full_backward_hook(lambda module, mine, gradients: seen.append(module.weight))
    with Policy.parse("pure bf16").apply(model):
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert seen == [model[1].weight]
    assert seen[0] is model[1].weight


def test_a_model_that_is_called_in_a_backward_pass_returns_what_it_returns_elsewhere() -> None:
    model, x, seen = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2, requires_grad=True), []

    def call(gradient: Tensor) -> None:
        with torch.enable_grad():
            seen.append(model(torch.ones(1, 2)).dtype)

    y = x * 2
    y.register_hook(call)  # type: ignore[no-untyped-call]
    with Policy.parse("pure bf16").apply(model):
        y.sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [FP32]


def test_containers_that_are_changed_by_another_name_or_passed_twice() -> None:
    half = torch.ones(1, dtype=BF16)
    outside: dict[str, Tensor] = {"a": half, "gone": half}

    class Changes(nn.Module):
        def forward(self, given: dict[str, Tensor], first: list[Tensor], second: list[Tensor]) -> None:
            outside["by another name"] = half
            given["b"] = given["a"] * 2
            del given["gone"]
            first.append(half)
            assert second[-1] is half

    model, items = nn.Sequential(Changes()), [half]
    with Policy.parse("bf16; 0=fp32").apply(model):
        model[0](outside, items, items)
    assert sorted(outside) == ["a", "b", "by another name"]
    assert outside["a"] is half
    assert outside["b"].dtype is FP32
    assert [each is half for each in items] == [True, True]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("text", ["pure bf16; b=fp32", "pure bf16; b=fp16"])
def test_what_a_module_of_another_precision_checkpoints_runs_again_as_it_ran(text: str, reentrant: bool) -> None:
    class Inner(nn.Module):
        def __init__(self, *, checkpointed: bool) -> None:
            super().__init__()
            self.layer, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
            self.checkpointed = checkpointed

        def inner(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.layer(x * 2) @ self.weight)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(self.inner, x, use_reentrant=reentrant) if self.checkpointed else self.inner(x)
            return result

    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model, x = nn.Sequential(), torch.randn(3, 4)
        model.add_module("a", nn.Linear(4, 4))
        model.add_module("b", Inner(checkpointed=checkpointed))
        with Policy.parse(text).apply(model):
            model(x).square().mean().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for plain, again in gradient_pairs(*found):
        assert torch.equal(again, plain)


def test_statistics_of_a_part_are_read_as_they_are_now() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x: Tensor) -> Tensor:
            before = self.norm.running_mean
            self.norm(x)
            after = self.norm.running_mean
            assert before is not None
            assert after is not None
            return after - before

    for text in ("pure bf16", "pure bf16; norm=fp32"):
        model = Reads()
        with Policy.parse(text).apply(model):
            assert model(torch.full((4, 2), 10.0)).tolist() == [1.0, 1.0]
