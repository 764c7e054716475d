"""What tracing uses of torch's private names; a new torch that changes one of them fails here."""

from __future__ import annotations

import subprocess
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from halfstep._torch import backward_node
from halfstep._torch.tracing import (
    ACCUMULATION,
    ENGINE_CODE,
    OperationMode,
    compiles_module,
    has_schema,
    hold_storage,
    next_node_number,
    node_name,
    node_number,
    release_storages,
    storage_key,
    storage_keys,
    untraced,
)


class Wrapped(torch.Tensor):
    """A tensor that dispatches by itself, to the one that it wraps."""

    wrapped: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.size())
        made.wrapped = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return cls(func(*(each.wrapped if isinstance(each, Wrapped) else each for each in args)))


def test_the_mode_runs_each_operation_and_leaves_those_of_other_tensors_to_them() -> None:
    ran: list[str] = []
    passed: list[str] = []

    def run(func: Any, args: Any, kwargs: Any, frame: FrameType | None) -> Any:
        ran.append(str(func))
        return func(*args, **kwargs)

    x = Wrapped(torch.ones(2))
    with OperationMode(run, pass_by=lambda func, *given: passed.append(str(func))):
        nn.Parameter(torch.ones(2)).exp()
        y = x.sin()
    assert isinstance(y, Wrapped)
    assert ran == ["aten.ones.default", "aten.exp.default", "aten.detach.default", "aten.sin.default"]
    assert passed == ["aten.sin.default"]


def test_operations_on_stand_ins_go_to_the_modes_of_torch() -> None:
    passed: list[str] = []
    with FakeTensorMode() as fakes:
        x = fakes.from_tensor(torch.ones(3))
        mode = OperationMode(lambda *given: pytest.fail("ran"), pass_by=lambda func, *given: passed.append(str(func)))
        with mode:
            y = x.sin()
    assert type(y) is type(x)
    assert passed == ["aten.sin.default"]


def test_the_mode_does_not_load_the_compiler() -> None:
    code = (
        "import sys, torch; from halfstep._torch.tracing import OperationMode\n"
        "with OperationMode(lambda f, a, k, frame: f(*a, **k), pass_by=print): torch.ones(3).exp()\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_untraced_operations_meet_no_mode_no_autograd_and_no_autocast() -> None:
    seen: list[str] = []
    x = torch.ones(2, 2, requires_grad=True)

    def run(func: Any, args: Any, kwargs: Any, frame: FrameType | None) -> Any:
        seen.append(str(func))
        return func(*args, **kwargs)

    with OperationMode(run, pass_by=lambda *given: None), torch.autocast("cpu", dtype=torch.bfloat16):
        with untraced():
            product = x @ x
            torch.ne(x, 0, out=torch.empty(2, 2))
        assert seen == []
        assert (product.dtype, product.requires_grad) == (torch.float32, False)
        x @ x
    assert "aten.mm.default" in seen


def test_untraced_ends_after_an_exception() -> None:
    with pytest.raises(ValueError, match="stop"), untraced():
        raise ValueError("stop")
    with untraced():
        assert not torch.ones(1, requires_grad=True).exp().requires_grad
    assert torch.ones(1, requires_grad=True).exp().requires_grad


def test_nodes_are_numbered_by_their_thread_in_the_order_in_which_they_are_made() -> None:
    x = torch.ones(2, requires_grad=True)
    first = next_node_number()
    y = x.exp()
    assert next_node_number() == first + 1
    z = y.sin()
    assert [node_number(each.grad_fn) for each in (y, z)] == [first, first + 1]
    assert node_name(z.grad_fn) == "SinBackward0"
    accumulate = y.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert (node_number(accumulate), node_name(accumulate)) == (ACCUMULATION, "AccumulateGrad")
    assert accumulate.variable is x  # type: ignore[union-attr]


def test_the_node_that_runs_and_the_frame_of_the_engine_are_known_in_the_backward_pass() -> None:
    met: list[tuple[str, bool]] = []

    def engine(frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code is not ENGINE_CODE:
            frame = frame.f_back
        return frame is not None

    def hook(gradient: torch.Tensor) -> None:
        met.append((node_name(backward_node()), engine(sys._getframe())))

    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y.register_hook(hook)  # type: ignore[no-untyped-call]
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert met == [("ExpBackward0", True)]
    assert backward_node() is None
    assert not engine(sys._getframe())
    (gradient,) = torch.autograd.grad(x.exp().sum(), x)
    assert gradient.shape == (2,)


def test_memory_has_a_key_that_its_views_share_and_that_stays_taken_while_it_is_held() -> None:
    x = torch.ones(4)
    assert storage_key(x) == storage_key(x[1:]) == storage_key(x.view(2, 2).t())
    assert storage_key(x) != storage_key(x.clone())
    assert storage_key(x.to_sparse()) is None
    assert storage_keys([x, x.to_sparse(), x[:1]]) == [storage_key(x), None, storage_key(x)]
    held = []
    for _ in range(100):
        y = torch.ones(4)
        held.append(hold_storage(y))
        assert held[-1] == storage_key(y)
        del y
    assert len(set(held)) == 100
    release_storages(held)


def test_held_memory_is_freed() -> None:
    x = torch.ones(4)
    key = hold_storage(x)
    expired: Any = torch.UntypedStorage._expired
    assert not expired(key)
    del x
    assert expired(key)
    release_storages([key])


def test_operations_of_higher_order_have_no_schema() -> None:
    assert has_schema(torch.ops.aten.mul.Tensor)
    assert not has_schema(torch.ops.higher_order.cond)


def test_compiled_modules_are_found_unless_they_run_eagerly_anyway() -> None:
    plain, compiled = nn.Linear(2, 2), nn.Linear(2, 2)
    compiled.compile(backend="eager")
    assert not compiles_module(plain)
    assert compiles_module(nn.Sequential(compiled))
    assert compiles_module(torch.compile(plain, backend="eager"))  # type: ignore[arg-type]
    with torch.compiler.set_stance("force_eager"):
        assert not compiles_module(compiled)
