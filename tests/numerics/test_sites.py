"""Where operations are called, for every way in which a model can call them."""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep._torch.tracing import next_node_number, node_number
from halfstep.numerics.sites import NO_PLACE, CallSites, is_foreign, relative_file
from halfstep.numerics.tracing import Trace, trace
from halfstep.records.trace import UNKNOWN, OpRecord


class Calls(nn.Module):
    """A module whose forward pass is a function of itself and its input."""

    def __init__(self, function: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any) -> Tensor:
        y: Tensor = self.function(self, *args)
        return y


def apply(function: Any, x: Tensor) -> Tensor:
    y: Tensor = function.apply(x)
    return y


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        y: Tensor = 2 * x * grads[0]  # the line of the backward pass
        return y


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        y: Tensor = grads[0] * 1
        return y


def line_of(function: object, text: str) -> int:
    lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
    return next(first + place for place, line in enumerate(lines) if text in line)


def traced(model: nn.Module, *args: Any, named: bool = True) -> Trace:
    with trace(model if named else None) as seen:
        model(*args).sum().backward()
    return seen


def modules(seen: Trace, *, phase: str, op: str = "") -> Counter[str]:
    return Counter(each.site.module for each in seen.ops if each.phase == phase and op in each.op)


def named(seen: Trace, op: str) -> list[OpRecord]:
    return [each for each in seen.ops if each.op.startswith(f"aten.{op}")]


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def test_the_backward_pass_belongs_to_the_forward_operations() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 1)))
    seen = traced(model, torch.ones(2, 3))
    assert modules(seen, phase="forward", op="addmm") == {"0": 1, "1.1": 1}
    assert modules(seen, phase="backward", op="tanh_backward") == {"1.0": 1}
    assert modules(seen, phase="backward", op=".mm.") == {"1.1": 2, "0": 1}
    assert {each.node for each in named(seen, "tanh_backward")} == {"TanhBackward0"}
    accumulated = [each.site for each in seen.ops if each.node == "AccumulateGrad"]
    assert {site.module for site in accumulated} == {"0", "1.1"}
    assert {(site.file, site.line) for site in accumulated} == {(UNKNOWN, 0)}


def test_the_line_is_the_users_also_below_modules_of_torch() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)  # a layer
        return F.gelu(y)  # a function

    seen = traced(Calls(forward, layer=nn.Linear(3, 3)), torch.ones(2, 3))
    (linear,), (gelu,) = named(seen, "addmm"), named(seen, "gelu.")
    assert (linear.site.module, linear.site.line) == ("layer", line_of(forward, "a layer"))
    assert (gelu.site.module, gelu.site.line) == ("", line_of(forward, "a function"))
    assert Path(linear.site.file).name == "test_sites.py"
    (backward,) = named(seen, "gelu_backward")
    assert backward.site == gelu.site


def test_a_function_of_the_users_own_has_its_own_line_in_the_backward_pass() -> None:
    seen = traced(Calls(lambda self, x: apply(Square, self.layer(x)), layer=nn.Linear(3, 3)), torch.ones(2, 3))
    forward, *backward = named(seen, "mul.Tensor")
    assert (forward.phase, forward.site.module, forward.site.line) == ("forward", "", line_of(Square.forward, "x * x"))
    assert {(each.phase, each.node, each.site.module) for each in backward} == {("backward", "SquareBackward", "")}
    assert {each.site.line for each in backward} == {line_of(Square.backward, "the line")}


def test_a_function_without_operations_does_not_shift_what_follows() -> None:
    seen = traced(Calls(lambda self, x: self.b(apply(Identity, self.a(x))), a=nn.Linear(3, 3), b=nn.Linear(3, 1)), torch.ones(2, 3))
    assert modules(seen, phase="backward", op=".mm.") == {"b": 2, "a": 1}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("named_model", [True, False])
def test_what_checkpointing_computes_again_is_forward(reentrant: bool, named_model: bool) -> None:
    def block(self: Any, x: Tensor) -> Tensor:
        y: Tensor = self.b(F.relu(self.a(x))).tanh()
        return y

    model = Calls(lambda self, x: checkpoint(block, self, x, use_reentrant=reentrant), a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    seen = traced(model, torch.ones(2, 3, requires_grad=True), named=named_model)
    assert modules(seen, phase="forward", op="addmm") == {"a": 2, "b": 2}
    assert {each.node for each in named(seen, "addmm")} == {""}
    assert modules(seen, phase="backward", op=".mm.") == {"a": 2, "b": 2}
    assert len(named(seen, "relu")) == 2
    assert {each.site.module for each in named(seen, "relu")} <= {"", UNKNOWN}
    assert {each.phase for each in named(seen, "tanh_backward")} == {"backward"}


def test_gradients_of_gradients_have_the_site_of_the_first_pass() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    with trace(model) as seen:
        x = torch.ones(3, 2, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (gradient.norm() - 1).pow(2).backward()  # the penalty
    assert modules(seen, phase="backward", op="tanh_backward") == {"1": 3}
    assert {each.node for each in named(seen, "tanh_backward")} == {"TanhBackward0", "TanhBackwardBackward0"}
    (norm,) = named(seen, "linalg_vector_norm")
    function = test_gradients_of_gradients_have_the_site_of_the_first_pass
    assert (norm.phase, norm.site.module, norm.site.line) == ("forward", UNKNOWN, line_of(function, "the penalty"))
    assert {each.site.module for each in seen.ops if each.phase == "backward" and each.op == "aten.mm.default"} == {"0", "2"}


def test_a_hook_on_a_gradient_is_backward_and_has_its_own_line() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        y.register_hook(lambda gradient: gradient * 3)  # type: ignore[no-untyped-call]
        return y.exp()

    seen = traced(Calls(forward, layer=nn.Linear(3, 3)), torch.ones(2, 3))
    (hooked,) = [each for each in named(seen, "mul.Tensor") if each.site.line == line_of(forward, "gradient * 3")]
    assert (hooked.phase, hooked.site.module, hooked.node) == ("backward", "layer", "AddmmBackward0")


def test_writes_in_place_to_views_belong_to_their_lines() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        y[:, 0].mul_(2)  # the first write
        y[0].add_(1)  # the second write
        return y.relu_()  # the third write

    seen = traced(Calls(forward, layer=nn.Linear(3, 3)), torch.ones(2, 3))
    slices = Counter(each.site.line for each in seen.ops if each.node == "CopySlices")
    assert set(slices) == {line_of(forward, "the first write"), line_of(forward, "the second write")}
    (relu,) = named(seen, "threshold_backward")
    assert relu.site.line == line_of(forward, "the third write")


def test_an_in_place_operation_whose_input_is_kept_has_its_own_site() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        y = y * 2
        z: Tensor = self.b(x)
        return z.add_(1).mul_(y)  # both

    seen = traced(Calls(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 3)), torch.ones(2, 3))
    multiplied = [each for each in seen.ops if each.node == "MulBackward0" and each.site.line == line_of(forward, "both")]
    assert {each.site.module for each in multiplied} == {""}
    assert len(multiplied) == 2


def test_a_shared_module_has_the_path_through_which_it_is_called() -> None:
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict({"one": nn.Sequential(shared), "two": nn.Sequential(nn.Tanh(), shared)})
    whole = Calls(lambda self, x: self.parts["two"](self.parts["one"](x)), parts=model)
    seen = traced(whole, torch.ones(2, 3))
    assert modules(seen, phase="forward", op="addmm") == {"parts.one.0": 1, "parts.two.1": 1}
    assert modules(seen, phase="backward", op=".mm.") == {"parts.one.0": 1, "parts.two.1": 2}


def test_a_module_of_another_branch_has_the_first_of_its_paths() -> None:
    embedding = nn.Linear(3, 3)
    branch = Calls(lambda self, x: embedding(x) * 2)
    model = Calls(lambda self, x: self.branch(self.embedding(x)), embedding=embedding, branch=branch)
    seen = traced(model, torch.ones(2, 3))
    assert modules(seen, phase="forward", op="addmm") == {"embedding": 2}
    assert modules(seen, phase="forward", op="mul") == {"branch": 1}


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x) * 2
        return y


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y


def test_without_a_model_paths_begin_at_the_outermost_module_and_with_several_at_its_class() -> None:
    generator, critic, other = Generator(), Critic(), Critic()
    with trace() as alone:
        generator(torch.ones(3, 2))
    assert modules(alone, phase="forward", op="addmm") == {"net.0": 1}
    assert modules(alone, phase="forward", op="mul") == {"": 1}
    with trace() as both:
        (critic(generator(torch.ones(3, 2))).sum() + other(torch.ones(3, 2)).sum()).backward()
    assert modules(both, phase="forward", op="addmm") == {"Generator.net.0": 1, "Critic.net": 1, "Critic#2.net": 1}
    assert modules(both, phase="forward", op="mul") == {"Generator": 1}
    assert modules(both, phase="backward", op=".mm.") == {"Generator.net.0": 1, "Critic.net": 2, "Critic#2.net": 1}


def test_with_a_model_only_what_lies_outside_of_it_has_a_class() -> None:
    generator, critic = Generator(), Critic()
    with trace(generator) as seen:
        critic(generator(torch.ones(3, 2)))
    assert modules(seen, phase="forward", op="addmm") == {"net.0": 1, "Critic.net": 1}


def test_a_model_inside_of_another_one_keeps_its_own_paths() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    outer = Calls(lambda self, x: self.head(self.model(x)), model=model, head=nn.Linear(3, 1))
    with trace(model) as seen:
        outer(torch.ones(2, 3))
    assert modules(seen, phase="forward", op="addmm") == {"0": 1, "Calls.head": 1}


def test_a_part_that_is_called_by_itself_first_has_the_path_of_the_whole() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    with trace() as seen:
        model[0](torch.ones(1, 3))
        model(torch.ones(1, 3))
    assert modules(seen, phase="forward", op="addmm") == {"0": 2, "1": 1}


def test_wrappers_leave_no_trace_in_paths() -> None:
    inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    wrapped = nn.DataParallel(inner)
    for seen in (traced(wrapped, torch.ones(2, 3)), traced(wrapped, torch.ones(2, 3), named=False)):
        assert modules(seen, phase="forward", op="addmm") == {"0": 1}
        assert modules(seen, phase="forward", op="relu") == {"1": 1}
    with trace(inner) as seen:
        wrapped(torch.ones(2, 3))
    assert modules(seen, phase="forward", op="addmm") == {"0": 1}


def test_modules_that_an_exception_left_are_forgotten() -> None:
    def fail(self: Any, x: Tensor) -> Tensor:
        raise ValueError("stop")

    model = Calls(lambda self, x: self.good(x), good=nn.Linear(3, 3), bad=Calls(fail))
    with trace(model) as seen:
        with pytest.raises(ValueError, match="stop"):
            model.get_submodule("bad")(torch.ones(1, 3))
        torch.ones(1).exp()
        model(torch.ones(1, 3))
    assert modules(seen, phase="forward", op="exp") == {UNKNOWN: 1}
    assert modules(seen, phase="forward", op="addmm") == {"good": 1}


def test_nodes_of_another_thread_are_not_taken_for_those_of_this_one() -> None:
    sites = CallSites(None)
    met: list[tuple[str, int]] = []
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y.register_hook(lambda gradient: met.append(sites.current([gradient], None)[2]))  # type: ignore[no-untyped-call]
    sites.open()
    try:
        sites._calls[node_number(y.grad_fn)] = ("", NO_PLACE, ("train.py", 12))
        y.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]

        def make_nodes() -> None:
            while next_node_number() <= node_number(y.grad_fn):
                z = x.exp()
                sites.current([z], None)

        other = threading.Thread(target=make_nodes)
        other.start()
        other.join()
        y.sum().backward()  # type: ignore[no-untyped-call]
    finally:
        sites.close()
    assert met == [("train.py", 12), (UNKNOWN, 0)]


def test_files_of_python_torch_halfstep_and_packages_are_foreign() -> None:
    for file in (inspect.__file__, torch.__file__, pytest.__file__, inspect.getfile(trace), "<frozen runpy>", "<string>"):
        assert is_foreign(file), file
    for file in (__file__, "examples/train.py", "<stdin>", "/home/me/halfstep/train.py"):
        assert not is_foreign(file), file


def test_files_are_named_relative_to_the_folder_that_they_lie_in() -> None:
    folder = Path("/home/me")
    assert relative_file("/home/me/a/train.py", folder=folder) == str(Path("a/train.py"))
    assert relative_file("/home/you/train.py", folder=folder) == "/home/you/train.py"
    assert relative_file("train.py", folder=folder) == "train.py"
    assert relative_file(UNKNOWN, folder=folder) == UNKNOWN
