"""What a dispatch mode sees of a training step: each operation with its dtypes, and whether an island asked for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Call", "Graphs", "Step", "casts_between", "take_step", "to_sum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One operation.

    Attributes:
        name: Such as `aten.mm.default`.
        inputs: The dtypes of the floating-point tensors that go in.
        outputs: Those of the tensors that come out.
        backward: Whether autograd called it.
        inside: Whether the forward of a watched module called it, or the backward of what that called.
    """

    name: str
    inputs: tuple[torch.dtype, ...]
    outputs: tuple[torch.dtype, ...]
    backward: bool
    inside: bool = field(compare=False)

    @property
    def is_cast(self) -> bool:
        return self.name == "aten._to_copy.default"


def _dtypes(nest: Any) -> tuple[torch.dtype, ...]:
    return tuple(leaf.dtype for leaf in tree_leaves(nest) if isinstance(leaf, Tensor) and leaf.is_floating_point())


class Recorder(TorchDispatchMode):
    """Records operations; watched modules are those whose operations it marks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.depth = 0
        self.nodes: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        node: Any = torch._C._current_autograd_node()
        inside = node in self.nodes if node is not None else self.depth > 0
        inputs, outputs = _dtypes((args, kwargs)), _dtypes(result)
        self.calls.append(Call(name=str(func), inputs=inputs, outputs=outputs, backward=node is not None, inside=inside))
        return result

    @contextmanager
    def watching(self, modules: list[nn.Module]) -> Iterator[None]:
        """Marks what the forward of these modules calls, and autograd on its behalf."""
        handles = []
        for module in modules:
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.depth += 1

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        self.depth -= 1
        stop = {leaf.grad_fn for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        todo = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        while todo:
            node = todo.pop()
            if node is None or node in stop or node in self.nodes or type(node).__name__ == "AccumulateGrad":
                continue
            before = [each for each, _ in node.next_functions]
            if type(node).__name__ == "ToCopyBackward0" and before[0] in stop:
                continue  # The cast at the edge: autograd adds up what else comes to the input on its behalf.
            self.nodes.add(node)
            todo.extend(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a forward and a backward pass gave.

    Attributes:
        outputs: What the model returned.
        gradients: Of the inputs and parameters that have one, by name.
        calls: The operations.
    """

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    calls: list[Call]

    def inside(self, *, backward: bool) -> list[Call]:
        return [call for call in self.calls if call.inside and call.backward == backward]

    def assert_equal(self, other: Step) -> None:
        """Fails unless both did the same operations in the same dtypes, and came to the same bits."""
        assert self.calls == other.calls
        self.assert_same_values(other)

    def assert_same_values(self, other: Step) -> None:
        """Fails unless both came to the same bits."""
        assert [each.dtype for each in self.outputs] == [each.dtype for each in other.outputs]
        assert all(torch.equal(mine, own) for mine, own in zip(self.outputs, other.outputs, strict=True))
        assert list(self.gradients) == list(other.gradients)
        for name, gradient in self.gradients.items():
            assert gradient.dtype is other.gradients[name].dtype, name
            assert torch.equal(gradient, other.gradients[name]), name

    def assert_island_in(self, dtype: torch.dtype) -> None:
        """Fails unless what the watched modules computed, forward and backward, was all in one dtype, except for casts at their edges."""
        for backward in (False, True):
            calls = [call for call in self.inside(backward=backward) if not call.is_cast]
            assert any("mm" in call.name or "convolution" in call.name or "rnn" in call.name for call in calls), calls
            assert {each for call in calls for each in (*call.inputs, *call.outputs)} == {dtype}


def to_sum(result: Any) -> Tensor:
    """A loss of everything that a model returned: its halves in fp32, so that nothing overflows."""
    return torch.stack([leaf.float().square().mean() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]).sum()


def take_step(
    model: Callable[..., Any],
    *inputs: Any,
    dtype: torch.dtype | None = torch.bfloat16,
    watch: tuple[nn.Module, ...] = (),
    recorded: bool = True,
) -> Step:
    """A forward pass in an autocast region (with `None`, in none) and a backward pass; recorded, unless they are compiled."""
    inputs = tuple(each.clone().requires_grad_() if isinstance(each, Tensor) and each.is_floating_point() else each for each in inputs)
    if isinstance(model, nn.Module):
        model.zero_grad()
    recorder = Recorder()
    with recorder if recorded else nullcontext(), recorder.watching(list(watch)):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            result = model(*inputs)
            loss = to_sum(result)
        loss.backward()  # type: ignore[no-untyped-call]
    named: dict[str, Tensor] = {f"input {index}": each for index, each in enumerate(inputs) if isinstance(each, Tensor)}
    named |= dict(model.named_parameters()) if isinstance(model, nn.Module) else {}
    gradients = {name: tensor.grad.clone() for name, tensor in named.items() if tensor.grad is not None}
    return Step(
        outputs=[leaf.detach() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)], gradients=gradients, calls=recorder.calls
    )


class Graphs:
    """A backend of `torch.compile` that runs graphs as they are and keeps their operations, forward and backward."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.count = 0
        self.backend = aot_autograd(fw_compiler=self._forward, bw_compiler=self._backward)

    def _forward(self, graph: GraphModule, _: Any) -> Any:
        return self._keep(graph, backward=False)

    def _backward(self, graph: GraphModule, _: Any) -> Any:
        return self._keep(graph, backward=True)

    def _keep(self, graph: GraphModule, *, backward: bool) -> Any:
        self.count += 1
        for node in graph.graph.nodes:
            if node.op == "call_function":
                inputs = _dtypes([each.meta.get("val") for each in node.all_input_nodes])
                outputs = _dtypes(node.meta.get("val"))
                self.calls.append(Call(name=str(node.target), inputs=inputs, outputs=outputs, backward=backward, inside=False))
        return make_boxed_func(graph.forward)


def casts_between(calls: list[Call], source: torch.dtype, target: torch.dtype) -> int:
    """How many operations cast from one dtype to another."""
    return sum(call.is_cast and call.inputs == (source,) and call.outputs == (target,) for call in calls)
