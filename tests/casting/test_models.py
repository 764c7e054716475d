"""Islands against the same islands written by hand: the same operations in the same dtypes, forward and backward, and the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep import Policy
from halfstep._torch import HeldSetting
from tests.casting.models import (
    Chain,
    Checkpointed,
    CheckpointedByHand,
    Cubed,
    CubedByHand,
    LanguageModel,
    LanguageModelByHand,
    Residuals,
    ResidualsByHand,
    Shared,
    SharedByHand,
    Translator,
    TranslatorByHand,
    UNet,
    UNetByHand,
    off,
)
from tests.casting.recordings import Graphs, Step, casts_between, take_step

pytestmark = pytest.mark.usefixtures("one_thread")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def tokens(length: int = 5) -> Tensor:
    return torch.randint(0, 11, (3, length))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str, tuple[str, ...], tuple[Tensor, ...]]] = {
    "transformer": (
        Translator,
        TranslatorByHand,
        "core.decoder.layers.*.multihead_attn=fp32",
        ("core.decoder.layers.0.multihead_attn", "core.decoder.layers.1.multihead_attn"),
        (tokens(4), tokens()),
    ),
    "resnet": (Residuals, ResidualsByHand, "blocks.1=fp32", ("blocks.1",), (torch.randn(4, 3, 6, 6),)),
    "unet": (UNet, UNetByHand, "across=fp32; up=fp32", ("across", "up"), (torch.randn(2, 3, 6, 6),)),
    "lstm": (LanguageModel, LanguageModelByHand, "torch.nn.LSTM=fp32", ("lstm",), (tokens(),)),
    "shared": (Shared, SharedByHand, "again=fp32; tied=fp32", ("first", "tied"), (torch.randn(4, 6),)),
    "function": (Cubed, CubedByHand, "cube=fp32", ("cube",), (torch.randn(4, 6),)),
}


def pair(made: Callable[[], nn.Module], by_hand: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Both versions of a model, with the same weights."""
    model, written = made(), by_hand()
    written.load_state_dict(model.state_dict())
    return model, written


def watched(model: nn.Module, paths: tuple[str, ...]) -> tuple[nn.Module, ...]:
    return tuple(model.get_submodule(path) for path in paths)


@pytest.mark.parametrize("outside", [BF16, None], ids=["in autocast", "by itself"])
@pytest.mark.parametrize("name", CASES)
def test_an_island_is_the_one_that_is_written_by_hand(name: str, outside: torch.dtype | None) -> None:
    made, by_hand, overrides, paths, inputs = CASES[name]
    model, written = pair(made, by_hand)
    if outside is None:  # The policy enters the region by itself, and casts to fp32 at its end.
        expected = take_step(lambda *given: _in_region(written, *given), *inputs, dtype=None)
    else:
        expected = take_step(written, *inputs, watch=watched(written, () if name == "resnet" else paths))
    with Policy.parse(f"bf16; {overrides}").apply(model):
        found = take_step(model, *inputs, dtype=outside, watch=watched(model, paths))
    assert found.calls == expected.calls
    found.assert_island_in(FP32)
    if outside is not None:
        found.assert_same_values(expected)
    else:
        assert all(each.dtype is FP32 for each in found.outputs)
        assert all(torch.equal(mine, own) for mine, own in zip(found.outputs, expected.outputs, strict=True))
    assert any(BF16 in call.outputs for call in found.calls if not call.inside)


def _in_region(written: nn.Module, *given: Tensor) -> Any:
    with torch.autocast("cpu", dtype=BF16):
        result = written(*given)
    return torch.utils._pytree.tree_map(lambda each: each.float(), result)


@pytest.mark.parametrize("name", CASES)
def test_without_the_policy_the_island_runs_in_half(name: str) -> None:
    """The other side: what the tests above see is the policy's doing."""
    made, _, overrides, paths, inputs = CASES[name]
    model = made()
    plain = take_step(model, *inputs, watch=watched(model, paths))
    handle = Policy.parse(f"bf16; {overrides}").apply(model)
    applied = take_step(model, *inputs, watch=watched(model, paths))
    handle.remove()
    if name != "function":  # Its Function takes what comes.
        with pytest.raises(AssertionError):
            plain.assert_island_in(FP32)
    assert plain.calls != applied.calls
    if name == "resnet":  # Its statistics went on.
        assert take_step(model, *inputs).calls == plain.calls
    else:
        take_step(model, *inputs).assert_equal(plain)


class _WithinIsland(Checkpointed):
    """The middle, a module, holds the checkpoint."""

    class Middle(nn.Module):
        def __init__(self, layers: nn.Sequential, *, reentrant: bool) -> None:
            super().__init__()
            self.layers = layers
            self.reentrant = reentrant

        def forward(self, inputs: Tensor) -> Tensor:
            result: Tensor = checkpoint(self.layers, inputs, use_reentrant=self.reentrant)
            return result

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__(reentrant=reentrant)
        inner: Any = self.middle
        self.middle: Any = self.Middle(inner, reentrant=reentrant)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.last(self.middle(self.first(inputs)))
        return result


class _WithinIslandByHand(_WithinIsland):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        with off():
            hidden = self.middle(hidden.float())
        result: Tensor = self.last(hidden)
        return result


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("within", ["the checkpoint", "the island"])
def test_checkpoints(within: str, reentrant: bool) -> None:
    kinds: tuple[type[Checkpointed], type[Checkpointed]] = (
        (Checkpointed, CheckpointedByHand) if within == "the checkpoint" else (_WithinIsland, _WithinIslandByHand)
    )
    model, written = pair(*(lambda kind=kind: kind(reentrant=reentrant) for kind in kinds))
    inputs = torch.randn(4, 6)
    expected = take_step(written, inputs)
    policy = Policy.parse("bf16; middle.2=fp32" if within == "the checkpoint" else "bf16; middle=fp32")
    with policy.apply(model):
        found = take_step(model, inputs)
    found.assert_equal(expected)
    again = [call for call in found.calls if call.name == "aten.addmm.default" and call.backward]
    # A checkpoint that is not reentrant stops when it has computed what it needs, and that is before the last layer.
    halves, wholes = {"the checkpoint": (1, 1), "the island": (0, 2)}[within]
    assert sum(call.outputs == (BF16,) for call in again) == halves
    assert sum(call.outputs == (FP32,) for call in again) == wholes - (not reentrant)


def _nested_by_hand(model: Chain, inputs: Tensor) -> Tensor:
    with off():
        hidden = model.a[0](inputs.float())
        with torch.autocast("cpu", dtype=BF16):
            hidden = model.a[1](hidden)
        hidden = hidden.float()
    result: Tensor = model.b(hidden)
    return result


def _adjacent_by_hand(model: Chain, inputs: Tensor) -> Tensor:
    hidden = model.a[0](inputs)
    with off():
        hidden = model.a[1](hidden.float())
    with off():
        hidden = model.b[0](hidden)
    result: Tensor = model.b[1](hidden)
    return result


def _fp16_by_hand(model: Chain, inputs: Tensor) -> Tensor:
    hidden = model.a[0](inputs)
    with torch.autocast("cpu", dtype=FP16, cache_enabled=False):
        hidden = model.a[1](hidden)
    result: Tensor = model.b(hidden)
    return result


def _container_by_hand(model: Chain, inputs: Tensor) -> Tensor:
    hidden = model.a(inputs)
    with off():
        result: Tensor = model.b(hidden.float())
    return result


CHAINS: dict[str, Callable[[Chain, Tensor], Tensor]] = {
    "bf16; a=fp32; a.1=bf16": _nested_by_hand,
    "bf16; a.1=fp32; b.0=fp32": _adjacent_by_hand,
    "bf16; a.1=fp16": _fp16_by_hand,
    "bf16; b=fp32": _container_by_hand,
    "bf16; b.*=bf16; b=fp32": _container_by_hand,
    "bf16; b=bf16; b=fp32": _container_by_hand,
}


class _Written(nn.Module):
    """A chain whose forward is a function."""

    def __init__(self, chain: Chain, function: Callable[[Chain, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = copy.deepcopy(chain.a), copy.deepcopy(chain.b)
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(self, inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", CHAINS)
def test_islands_in_a_chain(text: str) -> None:
    model, inputs = Chain(), torch.randn(4, 6)
    expected = take_step(_Written(model, CHAINS[text]), inputs)
    with Policy.parse(text).apply(model):
        found = take_step(model, inputs)
    found.assert_equal(expected)


def test_adjacent_islands_share_no_cast() -> None:
    model, inputs = Chain(), torch.randn(4, 6)

    def casts(text: str) -> int:
        with Policy.parse(text).apply(model):
            calls = take_step(model, inputs).calls
        return casts_between(calls, BF16, FP32) + casts_between(calls, FP32, BF16)

    one, other, both = (casts(f"bf16; {each}") for each in ("a.1=fp32", "b.0=fp32", "a.1=fp32; b.0=fp32"))
    none = casts("bf16")
    # An island casts its input and its result, and their gradients; two side by side are one for that matter.
    assert one == other
    added = [each - none + _casts_of_weights(count) for each, count in ((one, 1), (both, 2))]
    assert added == [4, 4]


def _casts_of_weights(layers: int) -> int:
    """How many casts of weights, biases and their gradients so many layers make in half, and none in fp32."""
    return layers * 4


def test_a_half_island_in_an_fp32_model_gives_back_fp32() -> None:
    model, inputs = Chain(), torch.randn(4, 6)

    def by_hand(model: Chain, inputs: Tensor) -> Tensor:
        hidden = model.a[0](inputs)
        with torch.autocast("cpu", dtype=BF16):
            hidden = model.a[1](hidden)
        result: Tensor = model.b(hidden.float())
        return result

    expected = take_step(_Written(model, by_hand), inputs, dtype=None)
    with Policy.parse("fp32; a.1=bf16").apply(model):
        found = take_step(model, inputs, dtype=None, watch=(model.a[1],))
        within = take_step(model, inputs)  # An fp32 policy in a region of bf16: the model has the last word.
    found.assert_equal(expected)
    assert {call.outputs for call in found.inside(backward=False) if call.name == "aten.addmm.default"} == {(BF16,)}
    assert within.outputs[0].dtype is FP32
    assert torch.equal(within.outputs[0], found.outputs[0])


class _Tied(nn.Module):
    """The layer inside of `a.b` and the first one have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(6, 6)
        self.a = nn.Sequential(nn.Sequential(nn.Linear(6, 6)))
        self.a.get_submodule("0.0").weight = self.c.weight

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.a(self.c(inputs))
        return result


@pytest.mark.parametrize("text", ["bf16; a=fp32; a.0=fp16", "bf16; a.0=fp16", "fp32; c=bf16; a.0=fp16", "fp32; c=fp16; a=bf16; a.0=fp16"])
def test_a_weight_that_two_precisions_share(text: str) -> None:
    """Autocast keeps the copies that it makes of weights, and would take that of the region around."""
    model, inputs = _Tied(), torch.randn(4, 6)
    with Policy.parse(text).apply(model):
        found = take_step(model, inputs, watch=(model.a[0],))
    found.assert_island_in(FP16)


# The compiler itself makes an instance of the class of an autograd Function.
tolerant = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@tolerant
@pytest.mark.parametrize("name", [name for name in CASES if name != "lstm"])
def test_compiled(name: str) -> None:
    """The compiler finds no reason to break the graph, and traces what it traces of the model that is written by hand."""
    made, by_hand, overrides, _, inputs = CASES[name]
    model, written = pair(made, by_hand)
    # By default the compiler traces backward passes with the autocast of the forward pass on, which lowers those of islands.
    setting = HeldSetting("backward_pass_autocast", "off")
    expected, hand = _compiled_step(written, inputs)
    setting.close()
    with Policy.parse(f"bf16; {overrides}").apply(model):
        found, graphs = _compiled_step(model, inputs)
    assert graphs.count == 2  # One forward, one backward.
    assert graphs.calls == hand.calls
    assert {dtype for call in graphs.calls for dtype in call.outputs} == {FP32, BF16}
    found.assert_same_values(expected)


# The compiler looks at what it is given after a break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_an_lstm_that_is_compiled() -> None:
    """The compiler leaves a model with an LSTM to eager mode, with a policy or without."""
    made, by_hand, overrides, _, inputs = CASES["lstm"]
    model, written = pair(made, by_hand)
    expected = take_step(written, *inputs)
    with Policy.parse(f"bf16; {overrides}").apply(model):
        found, _ = _compiled_step(model, inputs, fullgraph=False)
    assert [each.dtype for each in found.outputs] == [each.dtype for each in expected.outputs]
    assert all(torch.equal(mine, own) for mine, own in zip(found.outputs, expected.outputs, strict=True))
    assert all(torch.equal(mine, own) for mine, own in zip(found.gradients.values(), expected.gradients.values(), strict=True))


def _compiled_step(model: nn.Module, inputs: tuple[Tensor, ...], *, fullgraph: bool = True) -> tuple[Step, Graphs]:
    torch.compiler.reset()
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs.backend, fullgraph=fullgraph)
    return take_step(compiled, *inputs, recorded=False), graphs


# Loading the compiler warns of what torch itself still uses.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_by_inductor() -> None:
    """Within the rounding of bf16: its kernels are fused, so they round in other places than those of the eager model."""
    model, inputs = Chain(), torch.randn(4, 6)
    expected = take_step(_Written(model, _container_by_hand), inputs, recorded=False)
    with Policy.parse("bf16; b=fp32").apply(model):
        found = take_step(torch.compile(model, fullgraph=True), inputs, recorded=False)
    torch.testing.assert_close(found.outputs, expected.outputs, rtol=0.02, atol=0.02)  # And of the same dtype.
    torch.testing.assert_close([*found.gradients.values()], [*expected.gradients.values()], rtol=0.02, atol=0.02)
    assert found.outputs[0].dtype is FP32


def test_a_compiled_model_takes_a_policy_and_gives_it_back() -> None:
    """What is compiled already is compiled anew, since the class of the island is another."""
    model, inputs = Chain(), torch.randn(4, 6)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            result: Tensor = compiled(inputs)
        return result

    before = forward()
    with Policy.parse("bf16; b=fp32").apply(compiled):
        applied = forward()
    after = forward()
    assert (before.dtype, applied.dtype, after.dtype) == (BF16, FP32, BF16)
    assert torch.equal(before, after)
