"""The private names of torch that casting stands on: each test fails loudly when a new torch changes one."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep._torch import (
    FreshTraces,
    HeldSetting,
    Overload,
    aten_operations,
    autocast_kernel,
    functional_overloads,
    has_autocast_kernel,
    is_being_traced,
    is_in_backward,
    kept_out_of_graphs,
    own_modules,
    own_parameters,
    register_autocast_kernel,
    set_class,
    without_autocast,
    wrapped_module,
)
from halfstep.errors import HalfstepError

BF16 = torch.bfloat16


def test_the_operations_of_aten() -> None:
    assert {"softmax", "linear", "add", "add_"} <= aten_operations()
    assert "halfstep" not in aten_operations()


@pytest.mark.parametrize(
    ("operation", "names"),
    [
        ("softmax", ["aten::softmax.int"]),
        ("softmax.int", ["aten::softmax.int"]),
        ("softmax.int_out", []),
        ("linear", ["aten::linear"]),
        ("add_", []),
        ("no_such_operation", []),
        ("einsum", ["aten::einsum"]),  # torch.ops.aten lists an overload of it that the dispatcher does not have.
    ],
)
def test_overloads_that_write_to_nothing(operation: str, names: list[str]) -> None:
    assert [each.name for each in functional_overloads(operation)] == names


def test_every_such_overload_is_one_that_a_kernel_can_be_registered_for() -> None:
    overloads = [each for operation in sorted(aten_operations()) for each in functional_overloads(operation)]
    assert len(overloads) > 1000
    for each in overloads:
        assert Overload.named(each.name) == each
        assert isinstance(torch._C._dispatch_has_kernel_for_dispatch_key(each.name, "AutocastCPU"), bool)


@pytest.mark.parametrize(
    ("name", "device_type", "there"), [("linear", "cpu", True), ("linear", "cuda", True), ("add.Tensor", "cpu", False)]
)
def test_the_kernels_of_autocast(name: str, device_type: str, there: bool) -> None:
    assert has_autocast_kernel(Overload.named(f"aten::{name}"), device_type=device_type) == there
    assert callable(autocast_kernel(Overload.named(f"aten::{name}"), device_type=device_type))


def test_a_kernel_takes_the_place_of_torchs_and_can_call_it() -> None:
    overload = Overload.named("aten::linear")
    original = autocast_kernel(overload, device_type="cpu")
    calls: list[torch.dtype] = []

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(args[0].dtype)
        if len(calls) == 1:
            return original(keyset, *args, **kwargs)
        with without_autocast("cpu"):
            return overload.call(*args, **kwargs)

    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    take_back = register_autocast_kernel(overload, kernel, device_type="cpu")
    try:
        with torch.autocast("cpu", dtype=BF16):
            first, second = layer(x), layer(x)
        layer(x)  # Outside of autocast nothing is called.
    finally:
        take_back()
    with torch.autocast("cpu", dtype=BF16):
        third = layer(x)
    assert (first.dtype, second.dtype, third.dtype) == (BF16, torch.float32, BF16)
    assert calls == [torch.float32] * 2


def test_torchs_kernel_keeps_its_cache_of_weights_when_it_is_called_so() -> None:
    overload = Overload.named("aten::linear")
    original = autocast_kernel(overload, device_type="cpu")
    weight, x = torch.full((1, 1), 1.0, requires_grad=True), torch.full((1, 1), 1.0)

    def gradient() -> Tensor:
        weight.grad = torch.zeros_like(weight)
        with torch.autocast("cpu", dtype=BF16):
            # In bf16, 256 + 1 is 256: the cache makes one copy of the weight, in which the gradients of both uses are added.
            loss = nn.functional.linear(x, weight).float() * 256 + nn.functional.linear(x, weight).float()
        loss.sum().backward()  # type: ignore[no-untyped-call]
        return weight.grad

    plain = gradient()
    take_back = register_autocast_kernel(overload, original, device_type="cpu")
    try:
        assert torch.equal(gradient(), plain)
    finally:
        take_back()
    assert plain.item() == 256


def test_traced_graphs_are_not_taken_from_disk_while_one_is_open() -> None:
    config: Any = torch._functorch.config
    before = config.enable_autograd_cache
    outer, inner = FreshTraces(), FreshTraces()
    assert config.enable_autograd_cache is False
    outer.close()
    assert config.enable_autograd_cache is False
    inner.close()
    assert config.enable_autograd_cache is before


def test_compiled_code_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setitem(sys.modules, "torch._dynamo", sys.modules.get("torch._dynamo", torch))
    monkeypatch.setattr(torch.compiler, "reset", lambda: calls.append(1))
    FreshTraces().close()
    assert len(calls) == 2


def test_the_class_of_a_module_is_set_past_a_property() -> None:
    class Other(nn.Linear):
        __class__ = property(lambda self: nn.Linear)

    layer = nn.Linear(1, 1)
    set_class(layer, Other)
    assert type(layer) is Other
    assert layer.__class__ is nn.Linear
    set_class(layer, nn.Linear)
    assert type(copy.deepcopy(layer)) is nn.Linear


def test_modules_of_a_module_with_those_that_are_there_twice_or_none() -> None:
    inner = nn.ReLU()
    module = nn.Sequential(inner, inner)
    module.register_module("none", None)
    assert {**own_modules(module)} == {"0": inner, "1": inner, "none": None}


def test_what_wrappers_wrap() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # noqa: PLC0415 - slow to import

    inner = nn.Linear(1, 1)
    assert wrapped_module(inner) is None
    assert wrapped_module(nn.Sequential(inner)) is None
    for wrapper, name in (
        (torch.compile(inner, backend="eager"), "_orig_mod"),
        (checkpoint_wrapper(inner), "_checkpoint_wrapped_module"),
        (nn.DataParallel(inner, device_ids=[]), "module"),
    ):
        module: Any = wrapper
        assert wrapped_module(module) == (name, inner)


def test_parameters_of_a_module_with_those_that_are_none() -> None:
    inner = nn.Linear(1, 1, bias=False)
    assert {**own_parameters(inner)} == {"weight": inner.weight, "bias": None}
    assert {**own_parameters(nn.Sequential(inner))} == {}


def test_a_setting_is_held_until_all_have_let_go_of_it() -> None:
    config: Any = torch._functorch.config
    before = config.backward_pass_autocast
    assert before != "off"
    outer, inner = HeldSetting("backward_pass_autocast", "off"), HeldSetting("backward_pass_autocast", "off")
    outer.close()
    outer.close()
    assert config.backward_pass_autocast == "off"
    inner.close()
    assert config.backward_pass_autocast == before
    HeldSetting("no_such_setting", 1).close()
    assert not hasattr(config, "no_such_setting")


def test_a_backward_pass_is_noticed_where_checkpointed_code_runs_again() -> None:
    seen: list[bool] = []

    def run(x: Tensor) -> Tensor:
        seen.append(is_in_backward())
        return x.sin().cos()

    for reentrant in (True, False):
        seen.clear()
        checkpoint(run, torch.ones(2, requires_grad=True), use_reentrant=reentrant).sum().backward()
        assert seen == [False, True]
    assert not is_in_backward()


def test_the_tracer_is_noticed_by_what_it_runs_itself() -> None:
    seen: list[bool] = []

    class Watched(nn.Linear):
        @property
        def __class__(self) -> Any:
            seen.append(is_being_traced())
            return type(self)

        @__class__.setter
        def __class__(self, kind: Any) -> None:
            """Nobody sets it."""

        def scaled(self, x: Tensor) -> Tensor:
            return x * 2

        def forward(self, x: Tensor) -> Tensor:
            return self.scaled(x)

    layer = Watched(2, 2)
    assert layer.__class__ is Watched
    assert seen == [False]
    torch.compile(layer, backend="eager", fullgraph=True)(torch.ones(1, 2))
    assert True in seen
    assert not is_being_traced()


def test_a_function_is_kept_out_of_graphs() -> None:
    compiling: list[bool] = []

    @kept_out_of_graphs
    def aside(x: Tensor) -> Tensor:
        compiling.append(torch.compiler.is_compiling())
        return x + 1

    def run(x: Tensor) -> Tensor:
        return aside(x * 2) * 3

    found = torch.compile(run, backend="eager")(torch.ones(1))
    assert found.tolist() == [9.0]
    assert compiling == [False]
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.compiler\.disable"):
        torch.compile(run, backend="eager", fullgraph=True)(torch.ones(1))
    assert kept_out_of_graphs(len) is len


def test_a_torch_that_gives_no_kernels_away_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.library, "get_kernel")
    with pytest.raises(HalfstepError, match=r"needs torch\.library\.get_kernel, .* override the module"):
        autocast_kernel(Overload.named("aten::linear"), device_type="cpu")
