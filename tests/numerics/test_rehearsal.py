"""How a rehearsal begins and ends, and what it does to regions; what it computes is tested elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep import Policy
from halfstep.errors import ConfigurationError, HalfstepError, StepOrderError
from halfstep.numerics import Rehearsal, decide_operation, list_treatments, rehearse
from halfstep.numerics.rounding import roundings

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

WATCHED = ("softmax.int", "linear", "cat", "conv2d.padding", "binary_cross_entropy", "lstm.input", "dropout", "exp", "sum", "relu")


def region(dtype: torch.dtype = FP16, **options: Any) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype, **options)


def state() -> dict[str, Any]:
    """Everything that a rehearsal touches."""
    return {
        "kernels": [torch._C._dispatch_dump(f"aten::{name}") for name in WATCHED],
        "dtype": torch.get_autocast_dtype("cpu"),
        "clear": torch.clear_autocast_cache,
        "modes": _get_current_dispatch_mode_stack(),
        "target": roundings.target,
        "watched": roundings.watched,
        "softmax": softmax_dtype(),
    }


def softmax_dtype() -> torch.dtype:
    with region():
        return torch.ones(1, 2, dtype=FP16).softmax(-1).dtype


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = state()
    assert before["softmax"] is FP16
    yield
    assert state() == before


class TestBeginningAndEnd:
    def test_casts_follow_the_target_while_it_is_open_and_only_then(self) -> None:
        with rehearse("cuda"):
            assert softmax_dtype() is FP32
        assert softmax_dtype() is FP16

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_all_is_as_before_after_an_exception(self, error: type[BaseException]) -> None:
        with pytest.raises(error), rehearse("cuda"), region():
            raise error

    def test_all_is_as_before_when_it_cannot_begin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = 0
        original = decide_operation

        def fail_later(*args: Any, **kwargs: Any) -> Callable[[], None]:
            nonlocal made
            made += 1
            if made > 50:
                raise MemoryError
            return original(*args, **kwargs)

        monkeypatch.setattr("halfstep.numerics.rehearsal.decide_operation", fail_later)
        before = state()
        with pytest.raises(MemoryError), rehearse("cuda"):
            pass
        assert state() == before
        monkeypatch.undo()
        with rehearse("cuda"):  # Nothing stands in the way of the next one.
            assert softmax_dtype() is FP32

    @pytest.mark.parametrize("target", ["cuda", "xpu", "mtia", "maia", "cpu"])
    def test_every_target_begins_and_ends(self, target: str) -> None:
        with rehearse(target) as rehearsal:
            assert (rehearsal.target, roundings.target) == (target, target)
            assert softmax_dtype() is (FP16 if target == "cpu" else FP32)

    def test_it_is_part_of_the_public_face(self) -> None:
        assert halfstep.rehearse is rehearse
        assert isinstance(halfstep.rehearse(), Rehearsal)

    def test_a_second_one_inside_is_refused(self) -> None:
        with rehearse("cuda"):
            with pytest.raises(StepOrderError, match=r"Another rehearsal is open in this process\. Close it first"), rehearse("cpu"):
                pass
            assert softmax_dtype() is FP32

    def test_one_in_another_thread_is_refused(self) -> None:
        caught: list[BaseException] = []

        def other() -> None:
            try:
                with rehearse("cuda"):
                    pass
            except HalfstepError as error:
                caught.append(error)

        with rehearse("cuda"):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        assert len(caught) == 1
        assert isinstance(caught[0], StepOrderError)

    def test_one_is_used_once(self) -> None:
        once = rehearse("cuda")
        with once:
            pass
        with pytest.raises(StepOrderError, match=r"is used once. Call halfstep.rehearse\(\) again"), once:
            pass

    def test_regions_of_other_threads_are_left_alone(self) -> None:
        seen: list[torch.dtype] = []
        with rehearse("cuda"):
            thread = threading.Thread(target=lambda: seen.append(softmax_dtype()))
            thread.start()
            thread.join()
        assert seen == [FP16]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"target": "tpu"}, "The lists of autocast are known for cuda, cpu, xpu, mtia and maia, not for 'tpu'."),
            ({"target": "cdua"}, "Did you mean 'cuda'?"),
            ({"dtype": FP32}, r"rehearse\(dtype=torch.float32\): it takes torch.float16 or torch.bfloat16"),
            ({"dtype": "fp16"}, r"rehearse\(dtype='fp16'\): it takes torch.float16 or torch.bfloat16"),
            ({"tf32": 1}, r"rehearse\(tf32=1\) takes True or False"),
        ],
    )
    def test_what_is_not_allowed_is_refused_before_it_begins(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            rehearse(**arguments)


class TestRegions:
    @pytest.mark.parametrize("dtype", [FP16, BF16])
    def test_a_region_that_names_no_dtype_has_that_of_the_rehearsal(self, dtype: torch.dtype) -> None:
        with rehearse("cuda", dtype), torch.autocast("cpu"):
            assert F.linear(torch.ones(1, 2), torch.ones(2, 2)).dtype is dtype

    def test_a_region_that_names_one_has_that(self) -> None:
        with rehearse("cuda", FP16), region(BF16):
            assert F.linear(torch.ones(1, 2), torch.ones(2, 2)).dtype is BF16

    def test_outside_of_regions_nothing_is_cast(self) -> None:
        with rehearse("cuda"):
            assert F.linear(torch.ones(1, 2), torch.ones(2, 2)).dtype is FP32
            assert torch.ones(2, dtype=FP16).softmax(0).dtype is FP16
            assert F.binary_cross_entropy(torch.ones(2), torch.ones(2)).item() == 0

    def test_what_only_the_cpu_casts_is_left_alone(self) -> None:
        a, b = torch.ones(2, dtype=FP16), torch.ones(2)
        with region():
            assert F.avg_pool3d(a.view(1, 1, 2, 1, 1), 1).dtype is FP32
        with rehearse("cuda"), region():
            assert F.avg_pool3d(a.view(1, 1, 2, 1, 1), 1).dtype is FP16
            assert torch.cat([a, b]).dtype is FP32
            assert F.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3), padding="same").dtype is FP16  # Cast by what it is made of.

    def test_what_the_target_bans_raises_in_its_words(self) -> None:
        x = torch.full((2,), 0.5)
        with region():
            F.binary_cross_entropy(x, x)
        message = r"torch\.nn\.functional\.binary_cross_entropy and torch\.nn\.BCELoss are unsafe to autocast"
        with pytest.raises(RuntimeError, match=message), rehearse("cuda"), region():
            F.binary_cross_entropy(x, x)

    def test_operations_that_promote_take_the_widest_dtype(self) -> None:
        a, b = torch.ones(2, dtype=FP16), torch.ones(2)
        with rehearse("cuda"), region():
            assert torch.addcmul(a, a, b).dtype is FP32
            assert torch.addcmul(a, a, a).dtype is FP16
            with pytest.raises(RuntimeError, match="Unexpected floating ScalarType in at::autocast::prioritize"):
                torch.addcmul(a, a, a.bfloat16())

    def test_operations_that_are_told_a_dtype_keep_it(self) -> None:
        a = torch.ones(2, dtype=FP16)
        with rehearse("cuda"), region():
            assert a.sum().dtype is FP32
            assert a.sum(dtype=FP16).dtype is FP16
            assert a.softmax(0, dtype=FP16).dtype is FP16
            assert torch.softmax(a, 0, None).dtype is FP32
            assert torch.ones(2, dtype=torch.int64).sum().dtype is torch.int64
            assert a.double().sum().dtype is torch.float64

    def test_a_region_that_is_switched_off_casts_nothing(self) -> None:
        a = torch.ones(2, dtype=FP16)
        with rehearse("cuda"), region(), region(enabled=False):
            assert a.softmax(0).dtype is FP16

    @pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
    def test_recurrent_layers_run_lowered_as_in_cudnn(self, kind: Callable[..., nn.Module]) -> None:
        layer, x = kind(3, 4), torch.ones(2, 1, 3)
        with rehearse("cuda"), region():
            out = layer(x)[0]
        assert out.dtype is FP16
        assert all(weight.dtype is FP32 for weight in layer.parameters())


class Casts(TorchDispatchMode):
    """Counts casts to half precision."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made += func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is FP16
        return func(*args, **(kwargs or {}))


class TestWeightCache:
    def test_a_weight_is_cast_once_in_a_region(self) -> None:
        weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2, dtype=FP16)
        with rehearse("cuda"), Casts() as casts:
            with region():
                F.linear(x, weight)
                torch.mm(x, weight)
                torch.einsum("ij,jk->ik", x, weight)  # The CPU's own autocast does not cast this one.
            assert casts.made == 1
            with region():
                F.linear(x, weight)
            assert casts.made == 2

    def test_without_a_cache_it_is_cast_each_time(self) -> None:
        weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2, dtype=FP16)
        with rehearse("cuda"), Casts() as casts, region(cache_enabled=False):
            F.linear(x, weight)
            F.linear(x, weight)
        assert casts.made == 2

    def test_only_leaves_that_need_gradients_are_kept(self) -> None:
        x = torch.ones(1, 2, dtype=FP16)
        weights = [torch.ones(2, 2), nn.Parameter(torch.ones(2, 2)) * 1, nn.Parameter(torch.ones(4)).view(2, 2)]
        for weight in weights:
            with rehearse("cuda"), Casts() as casts, region():
                F.linear(x, weight)
                F.linear(x, weight)
            assert casts.made == 2

    def test_gradients_of_a_weight_that_is_used_twice_add_in_half(self) -> None:
        """1 + 2**-11 is 1 in fp16; two casts would add their gradients in fp32."""
        gradients = []
        for enabled in (True, False):
            weight = nn.Parameter(torch.zeros(1, 1))
            with rehearse("cuda"), region(cache_enabled=enabled):
                out = F.linear(torch.ones(1, 1), weight) + F.linear(torch.full((1, 1), 2.0**-11), weight)
                out.backward()  # type: ignore[no-untyped-call]
            assert weight.grad is not None
            gradients.append(weight.grad.item())
        assert gradients == [1.0, 1.0 + 2.0**-11]

    def test_a_pass_without_gradients_does_not_take_those_of_the_next(self) -> None:
        weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2)
        with rehearse("cuda"), region():
            with torch.no_grad():
                F.linear(x, weight)
            F.linear(x, weight).sum().backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None

    def test_casts_do_not_outlive_the_rehearsal_in_a_region_around_it(self) -> None:
        weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2)
        with region():
            with rehearse("cuda"):
                F.linear(x, weight)
            with torch.no_grad():
                weight.mul_(2)
            assert F.linear(x, weight)[0, 0].item() == 4

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpointed_code_runs_again_with_the_same_numerics(self, reentrant: bool) -> None:
        layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
        gradients = []
        for again in (False, True):
            layer.zero_grad()
            with rehearse("cuda"), region():
                out = checkpoint(layer, x, use_reentrant=reentrant) if again else layer(x)
                out.softmax(-1).square().sum().backward()
            assert layer.weight.grad is not None
            gradients.append(layer.weight.grad.clone())
        assert torch.equal(*gradients)


class TestBesidePolicies:
    """A policy that overrides operations and a rehearsal decide on the same kernels."""

    def check(self, model: nn.Module, x: Tensor, *, dtype: torch.dtype, watched: bool) -> None:
        with region(), Casts() if watched else nullcontext():
            assert model(x).dtype is dtype

    @pytest.mark.parametrize("watched", [False, True])
    def test_the_override_decides_and_the_rest_is_rehearsed(self, watched: bool) -> None:
        model, x = nn.Sequential(nn.Softmax(-1)), torch.ones(1, 2, dtype=FP16)
        plain = nn.Softmax(-1)
        with rehearse("cuda"):
            handle = Policy.parse("fp16; op:softmax=fp16").apply(model)
            self.check(model, x, dtype=FP16, watched=watched)
            handle.remove()
            self.check(plain, x, dtype=FP32, watched=watched)
        self.check(plain, x, dtype=FP16, watched=watched)

    @pytest.mark.parametrize("watched", [False, True])
    @pytest.mark.parametrize("first", ["policy", "rehearsal"])
    def test_whichever_ends_first(self, first: str, watched: bool) -> None:
        model, x, plain = nn.Sequential(nn.Softmax(-1)), torch.ones(1, 2, dtype=FP16), nn.Softmax(-1)
        handle = Policy.parse("fp16; 0=fp16; op:softmax=bf16").apply(model)
        rehearsal = rehearse("cuda")
        rehearsal.__enter__()
        self.check(model, x, dtype=BF16, watched=watched)
        if first == "policy":
            handle.remove()
            self.check(plain, x, dtype=FP32, watched=watched)
            rehearsal.__exit__(None, None, None)
        else:
            rehearsal.__exit__(None, None, None)
            self.check(model, x, dtype=BF16, watched=watched)
            handle.remove()
        self.check(plain, x, dtype=FP16, watched=watched)

    def test_the_lists_of_the_cpu_are_its_own_whoever_decides(self) -> None:
        before = dict(list_treatments("cpu"))
        list_treatments.cache_clear()
        with Policy.parse("fp16; op:softmax=fp32; op:relu=fp32; op:linear=fp32").apply(nn.ReLU()), rehearse("cuda"):
            list_treatments.cache_clear()
            assert dict(list_treatments("cpu")) == before
        list_treatments.cache_clear()


def test_compiled_functions_run_eagerly_in_it() -> None:
    def function(x: Tensor) -> Tensor:
        return (x * x - x).softmax(-1)

    x = torch.tensor([[200.0, 100.0]], dtype=FP16)
    compiled = torch.compile(function, backend="eager")
    compiled(x)
    with rehearse("cuda"), region():
        assert torch.equal(compiled(x), function(x))
        assert compiled(x).dtype is FP32
    torch.compiler.reset()


def test_fp32_code_computes_the_same_bits() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    x, y = torch.randn(2, 1, 4, 4), torch.tensor([0, 2])
    gradients = []
    for inside in (False, True):
        model.zero_grad()
        with rehearse("cuda") if inside else nullcontext():
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        gradients.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
    assert len(gradients[0]) == 6
    assert all(map(torch.equal, *gradients))


def test_a_scaled_step_skips_as_on_the_target() -> None:
    """The product overflows in fp16 before it is scaled down; fp32 would be fine."""
    weight = nn.Parameter(torch.full((1, 1), 300.0))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with rehearse("cuda"):
        with region():
            loss = F.linear(torch.full((1, 1), 300.0), weight).square().mul(1e-6).sum()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
    assert loss.isinf()
    assert weight.item() == 300.0
    assert scaler.get_scale() == 1.0
