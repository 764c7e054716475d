"""Overrides of operations: exactly these run in another dtype, forward and backward, and nothing is left of it in the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from halfstep import Policy
from halfstep._torch import HeldSetting
from halfstep.casting import OperationTable, Registrations
from halfstep.casting.operations import in_force
from halfstep.policy import attach_policy
from tests.casting.mixers import Mixer, by_hand
from tests.casting.recordings import Graphs, Step, take_step

pytestmark = pytest.mark.usefixtures("one_thread")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


CASES: dict[str, tuple[torch.dtype, tuple[str, ...]]] = {
    "op:softmax=fp16": (FP16, ("softmax",)),
    "op:softmax.int=fp32": (FP32, ("softmax",)),
    "op:linear=fp32": (FP32, ("linear",)),
    "op:linear=fp16": (FP16, ("linear",)),
    "op:layer_norm=bf16": (BF16, ("layer_norm",)),
    "op:layer_norm=fp16; op:add=fp16": (FP16, ("layer_norm", "add")),
    "op:add=fp16": (FP16, ("add",)),
    "op:add.Tensor=fp32": (FP32, ("add",)),
    "op:gelu=fp32": (FP32, ("gelu",)),
    "op:softmax=fp16; op:linear=fp32; op:softmax=fp32; op:gelu=fp32": (FP32, ("softmax", "linear", "gelu")),
    "op:log_softmax=fp16; op:conv2d=fp32": (FP16, ()),
}


@pytest.mark.parametrize("text", CASES)
def test_exactly_these_operations_change(text: str) -> None:
    dtype, names = CASES[text]
    model, written = Mixer(), by_hand(dtype, *names)()
    written.load_state_dict(model.state_dict())
    inputs = torch.randn(4, 6)
    plain = take_step(model, inputs)
    with Policy.parse(f"bf16; {text}").apply(model):
        found = take_step(model, inputs)
    found.assert_equal(take_step(written, inputs))
    assert (found.calls == plain.calls) == (not names)
    take_step(model, inputs).assert_equal(plain)


@pytest.mark.parametrize(("text", "dtype"), [("op:softmax=fp16", FP16), ("op:softmax=fp32", FP32), ("op:softmax=bf16", BF16)])
def test_the_dtypes_that_a_dispatch_mode_sees(text: str, dtype: torch.dtype) -> None:
    model, inputs = Mixer(), torch.randn(4, 6)
    with Policy.parse(f"bf16; {text}").apply(model):
        calls = take_step(model, inputs).calls
    softmax = [call for call in calls if "softmax" in call.name]
    assert [call.name for call in softmax] == ["aten._softmax.default", "aten._softmax_backward_data.default"]
    assert {each for call in softmax for each in (*call.inputs, *call.outputs)} == {dtype}
    products = [call for call in calls if "mm" in call.name]
    assert len(products) == 3 + 3 * 2
    assert {each for call in products for each in (*call.inputs, *call.outputs)} == {BF16}


def test_a_table_that_names_nothing_of_it_leaves_the_cache_of_weights_as_it_is() -> None:
    """The second layer is used twice, and its weight is cast once: torch's own kernels run, not copies of what they do."""
    model, inputs = Mixer(), torch.randn(4, 6)
    plain = take_step(model, inputs)
    with Policy.parse("bf16; op:linear=fp32").override("op:linear", "bf16").apply(model):
        own = take_step(model, inputs)
    with Policy.parse("bf16; op:gelu=fp32").apply(model):
        gelu = take_step(model, inputs)
    table = OperationTable.of({"gelu": "fp32"}, base="bf16")
    registrations = Registrations([OperationTable.of({"linear": "fp32", "add": "fp16"}, base="bf16"), table], standing=table)
    take_step(model, inputs).assert_equal(gelu)
    registrations.remove()

    def weights_cast(step: Step) -> int:
        return sum(call.is_cast and not call.backward and call.inputs == (FP32,) for call in step.calls)

    assert weights_cast(own) == weights_cast(plain) + 2  # A kernel of the table casts weight and bias where they are used.
    registrations = Registrations([OperationTable.of({"linear": "fp32", "softmax": "fp16"}, base="bf16")], standing=None)
    take_step(model, inputs).assert_equal(plain)
    registrations.remove()


def dispatched() -> dict[str, tuple[str, ...]]:
    """What the dispatcher knows of the operations that these tests override."""
    names = ("linear", "softmax.int", "add.Tensor", "gelu", "layer_norm", "matmul", "conv2d")
    return {name: (torch._C._dispatch_dump(f"aten::{name}"), torch._C._dispatch_dump_table(f"aten::{name}")) for name in names}


def has_kernel(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


@pytest.mark.parametrize("text", ["bf16; op:linear=fp32; op:gelu=fp32", "fp32; op:add=bf16", "bf16; a=fp32; op:softmax=fp16; a=bf16"])
def test_the_dispatcher_is_as_before(text: str) -> None:
    model = nn.ModuleDict({"a": Mixer()})
    before = dispatched()
    assert not has_kernel("gelu", "AutocastCPU")
    handle = Policy.parse(text).apply(model)
    assert dispatched() != before
    assert has_kernel("gelu", "AutocastCPU") == has_kernel("gelu", "AutocastCUDA") == ("gelu" in text)
    handle.remove()
    handle.remove()
    assert dispatched() == before
    assert not has_kernel("gelu", "AutocastCPU")


def test_a_policy_that_is_refused_registers_nothing() -> None:
    before = dispatched()
    model = Mixer()
    with Policy.parse("bf16").apply(model):
        with pytest.raises(Exception, match="already"):
            Policy.parse("bf16; op:linear=fp32").apply(model)
        assert dispatched() == before


def test_two_policies_on_two_models() -> None:
    one, other, inputs = Mixer(), Mixer(), torch.randn(4, 6)
    before = dispatched()
    steps = []
    for model, text in ((one, "bf16; op:softmax=fp16; op:gelu=fp32"), (other, "bf16; op:softmax=bf16; op:linear=fp32")):
        with Policy.parse(text).apply(model):
            steps.append(take_step(model, inputs))
    first = Policy.parse("bf16; op:softmax=fp16; op:gelu=fp32").apply(one)
    second = Policy.parse("bf16; op:softmax=bf16; op:linear=fp32").apply(other)
    take_step(one, inputs).assert_equal(steps[0])
    take_step(other, inputs).assert_equal(steps[1])
    take_step(one, inputs).assert_equal(steps[0])
    first.remove()  # Not in the order of a stack.
    take_step(other, inputs).assert_equal(steps[1])
    assert take_step(one, inputs).calls != steps[0].calls  # The other one's holds wherever no model says otherwise.
    second.remove()
    assert dispatched() == before


def test_an_operation_outside_of_the_model() -> None:
    values = torch.ones(2, dtype=BF16)
    with Policy.parse("bf16; op:softmax=fp16").apply(Mixer()):
        with torch.autocast("cpu", dtype=BF16):
            assert values.softmax(0).dtype is FP16
        assert values.softmax(0).dtype is BF16  # Autocast is off: nothing is cast.
        assert torch.ones(2).softmax(0).dtype is FP32


def test_an_engine_has_its_table_in_its_own_regions_only() -> None:
    model, inputs = Mixer(), torch.randn(4, 6)
    plain = take_step(model, inputs)
    everywhere = Policy.parse("bf16; op:softmax=fp16")
    with everywhere.apply(model):
        expected = take_step(model, inputs)
    with attach_policy(everywhere, model, everywhere=False) as handle:
        take_step(model, inputs).assert_equal(plain)
        with in_force(handle.region.operations):
            take_step(model, inputs).assert_equal(expected)
        take_step(model, inputs).assert_equal(plain)


class Nested(nn.Module):
    """A model with a part that has an override of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Mixer()
        self.rest = Mixer()

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.rest(self.part(inputs))
        return result


def softmaxes(text: str) -> list[torch.dtype]:
    """The dtypes of the softmax in the part and in the rest, forward and then backward."""
    model = Nested()
    with Policy.parse(text).apply(model):
        calls = take_step(model, torch.randn(4, 6)).calls
    return [call.outputs[0] for call in calls if "softmax" in call.name]


@pytest.mark.parametrize(
    ("text", "part", "rest"),
    [
        ("bf16; op:softmax=fp16", FP16, FP16),
        ("bf16; op:softmax=fp16; part=fp32", FP32, FP16),
        ("bf16; part=fp32; op:softmax=fp16", FP16, FP16),
        ("bf16; part=fp32; op:softmax=bf16; part=fp32", FP32, BF16),
        ("fp32; part=bf16; op:softmax=fp16", FP16, FP16),
        ("fp32; op:softmax=fp16; part=bf16", BF16, FP16),
        ("fp32; op:softmax=bf16", BF16, BF16),
    ],
)
def test_an_operation_in_a_module_runs_as_the_later_override_says(text: str, part: torch.dtype, rest: torch.dtype) -> None:
    assert softmaxes(text) == [part, rest, rest, part]


def test_in_an_fp32_region_nothing_else_is_lowered() -> None:
    model, inputs = Mixer(), torch.randn(4, 6)
    with Policy.parse("fp32; op:gelu=bf16").apply(model):
        found = take_step(model, inputs, dtype=None)
    gelu = [call for call in found.calls if "gelu" in call.name]
    assert {each for call in gelu for each in call.outputs} == {BF16}
    others = [call for call in found.calls if "gelu" not in call.name and not call.is_cast]
    assert {each for call in others for each in (*call.inputs, *call.outputs)} == {FP32}

    class Written(Mixer):
        def gelu(self, values: Tensor) -> Tensor:
            return F.gelu(values.bfloat16()).float()

    written = Written()
    written.load_state_dict(model.state_dict())
    found.assert_same_values(take_step(written, inputs, dtype=None))


def test_in_an_fp32_region_the_result_of_an_operation_is_fp32() -> None:
    """What follows need not be one that autocast casts."""
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Tanh())
    with Policy.parse("fp32; op:gelu=bf16").apply(model):
        calls = take_step(model, torch.randn(4, 6), dtype=None).calls
    assert [call.inputs for call in calls if call.name == "aten.gelu.default"] == [(BF16,)]
    assert [call.inputs for call in calls if call.name == "aten.tanh.default"] == [(FP32,)]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_what_is_computed_again_is_computed_alike(reentrant: bool) -> None:
    class Recomputed(nn.Module):
        def __init__(self, inner: type[Mixer]) -> None:
            super().__init__()
            self.inner = inner()

        def forward(self, inputs: Tensor) -> Tensor:
            result: Tensor = checkpoint(self.inner, inputs, use_reentrant=reentrant)
            return result

    model, written = Recomputed(Mixer), Recomputed(by_hand(FP16, "softmax"))
    written.load_state_dict(model.state_dict())
    inputs = torch.randn(4, 6)
    with Policy.parse("bf16; op:softmax=fp16").apply(model):
        found = take_step(model, inputs)
    found.assert_equal(take_step(written, inputs))
    assert [call.outputs for call in found.calls if call.name == "aten._softmax.default"] == [(FP16,), (FP16,)]


def _compiled_step(model: nn.Module, inputs: Tensor) -> tuple[Step, Graphs]:
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs.backend, fullgraph=True)
    return take_step(compiled, inputs, recorded=False), graphs


@pytest.mark.parametrize("text", ["op:softmax=fp16", "op:linear=fp32", "op:gelu=fp32"])
def test_compiled(text: str) -> None:
    dtype, names = CASES[text]
    model, written, inputs = Mixer(), by_hand(dtype, *names)(), torch.randn(4, 6)
    written.load_state_dict(model.state_dict())
    torch.compiler.reset()
    # By default the compiler traces backward passes with the autocast of the forward pass on, which lowers those of fp32 operations.
    setting = HeldSetting("backward_pass_autocast", "off")
    expected, hand = _compiled_step(written, inputs)
    setting.close()
    plain, plain_graphs = _compiled_step(model, inputs)
    with Policy.parse(f"bf16; {text}").apply(model):
        found, graphs = _compiled_step(model, inputs)
    after, graphs_after = _compiled_step(model, inputs)
    assert graphs.count == 2
    assert graphs.calls == hand.calls
    found.assert_same_values(expected)
    assert graphs_after.calls == plain_graphs.calls != graphs.calls
    after.assert_same_values(plain)


def test_compiled_code_is_forgotten_when_the_table_changes() -> None:
    """What was compiled holds the casts of then, and nothing about another model tells that these have changed."""
    model, inputs = Mixer(), torch.randn(4, 6)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    plain = take_step(compiled, inputs, recorded=False)
    with Policy.parse("bf16; op:linear=fp32").apply(Mixer()):
        applied = take_step(compiled, inputs, recorded=False)
    again = take_step(compiled, inputs, recorded=False)
    with pytest.raises(AssertionError):
        applied.assert_same_values(plain)
    again.assert_same_values(plain)


@contextmanager
def on_fake_cuda(dtype: torch.dtype) -> Iterator[None]:
    """Autocast of CUDA tensors that have a shape and a dtype, and no numbers."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        with FakeTensorMode(), torch.no_grad():
            yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
        torch.clear_autocast_cache()


def cuda_dtypes() -> dict[str, torch.dtype]:
    with on_fake_cuda(FP16):
        values, weight = torch.ones(2, 3, device="cuda"), torch.ones(4, 3, device="cuda")
        hidden = F.linear(values, weight)
        assert hidden.device.type == "cuda"
        return {
            "linear": hidden.dtype,
            "softmax": torch.softmax(hidden, -1).dtype,
            "gelu": F.gelu(hidden).dtype,
            "add": (hidden + hidden).dtype,
            "layer_norm": F.layer_norm(hidden, (4,)).dtype,
        }


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("op:softmax=fp16", {"softmax": FP16}),
        ("op:gelu=fp32", {"gelu": FP32}),
        ("op:linear=fp32", {"linear": FP32, "gelu": FP32, "add": FP32}),
        ("op:linear=bf16; op:add=fp32; op:layer_norm=bf16", {"linear": BF16, "gelu": BF16, "add": FP32, "layer_norm": BF16}),
    ],
)
def test_the_same_registration_holds_for_cuda(text: str, changed: dict[str, torch.dtype]) -> None:
    plain = cuda_dtypes()
    assert plain == {"linear": FP16, "softmax": FP32, "gelu": FP16, "add": FP16, "layer_norm": FP32}
    with Policy.parse(f"fp16; {text}").apply(Mixer()):
        assert cuda_dtypes() == plain | changed
    assert cuda_dtypes() == plain


def test_backward_threads_see_the_table() -> None:
    """A checkpoint runs its forward again on the thread of the backward pass."""
    seen = []
    with Policy.parse("bf16; op:softmax=fp16").apply(Mixer()):

        def other() -> None:
            with torch.autocast("cpu", dtype=BF16):
                seen.append(torch.ones(2).softmax(0).dtype)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [FP16]


def test_an_exception_in_a_region_leaves_no_table() -> None:
    model = Mixer()
    fails: Callable[..., Any] = model.norm.register_forward_pre_hook(lambda *_: 1 / 0)  # type: ignore[assignment]
    with attach_policy(Policy.parse("bf16; norm=fp32; op:softmax=fp16"), model, everywhere=False) as handle:
        with pytest.raises(ZeroDivisionError), in_force(handle.region.operations), torch.autocast("cpu", dtype=BF16):
            model(torch.ones(1, 6))
        fails.remove()  # type: ignore[attr-defined]
        with torch.autocast("cpu", dtype=BF16):
            assert torch.ones(2).softmax(0).dtype is FP32
