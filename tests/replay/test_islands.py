"""Which part of a model to run in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfstep.numerics import trace
from halfstep.policy import Policy
from halfstep.policy.matching import decide, places
from halfstep.records import UNKNOWN
from halfstep.replay.islands import Islands
from tests.replay.operations import operation

FP16 = Policy.parse("fp16")


def block() -> nn.Module:
    return nn.ModuleDict({"attention": nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1)), "norm": nn.LayerNorm(2)})


def encoder() -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList([block(), block()]), "head": nn.Linear(2, 2)})


def islands(model: nn.Module | None = None, *, policy: Policy = FP16) -> Islands:
    return Islands(encoder() if model is None else model, policy=policy)


def cover(made: Islands, *modules: str, op: str = "aten.mul.Tensor", policy: str = "fp16") -> str:
    """What covers operations of some modules, as text; each is one that a policy takes."""
    text = Islands.text(made.cover([operation(op, module=module) for module in modules]))
    if text:
        parsed = Policy.parse(f"{policy}; {text}")
        assert str(parsed) == f"{policy}; {text}"
    return text


class TestModules:
    def test_the_smallest_module_comes_first(self) -> None:
        assert cover(islands(), "layers.0.attention.0") == "layers.0.attention.0=fp32"

    def test_then_the_modules_around_it(self) -> None:
        made = islands()
        found = [cover(made, "layers.0.attention.0") for _ in range(5)]
        assert found[:4] == ["layers.0.attention.0=fp32", "layers.0.attention=fp32", "layers.0=fp32", "layers=fp32"]
        assert found[4] == "layers=fp32; op:mul=fp32", "the model as a whole is no island"

    def test_another_module_is_covered_with_what_both_are_in(self) -> None:
        made = islands()
        assert cover(made, "layers.0.attention.0") == "layers.0.attention.0=fp32"
        assert cover(made, "layers.0.norm") == "layers.0=fp32"
        assert cover(made, "layers.1.norm") == "layers=fp32"

    def test_without_a_module_around_both_it_is_added(self) -> None:
        made = islands()
        assert cover(made, "layers.0.norm") == "layers.0.norm=fp32"
        assert cover(made, "head") == "layers.0.norm=fp32; head=fp32"

    def test_a_module_within_an_island_enlarges_that_one(self) -> None:
        made = islands()
        cover(made, "layers.0.norm")
        cover(made, "head")
        assert cover(made, "layers.0.norm") == "head=fp32; layers.0=fp32"

    def test_several_operations_are_covered_together_and_enlarge_nothing(self) -> None:
        made = islands()
        assert cover(made, "layers.0.attention.0", "layers.0.attention.1") == "layers.0.attention=fp32"
        assert cover(made, "layers.0.attention.0", "layers.0.attention") == "", "they are covered already"
        assert cover(made, "layers.0.attention.0", "layers.0.norm", "head") == "layers.0=fp32; head=fp32"

    def test_names_that_begin_alike_are_not_within_each_other(self) -> None:
        model = nn.ModuleDict({name: nn.Linear(1, 1) for name in ("head", "head2", "head_b")})
        made = islands(model)
        assert cover(made, "head") == "head=fp32"
        assert cover(made, "head2") == "head=fp32; head2=fp32"

    @pytest.mark.parametrize("name", ["0", "a/b", "a-b", "a:b", "class", "a_b", "UPPER", "a,b", "a'b"])
    def test_odd_names_are_texts_of_a_policy(self, name: str) -> None:
        made = islands(nn.ModuleDict({name: nn.Sequential(nn.Linear(1, 1), nn.ReLU())}))
        assert [cover(made, f"{name}.0") for _ in range(2)] == [f"{name}.0=fp32", f"{name}=fp32"]

    @pytest.mark.parametrize("name", ["a b", "\u00e4", "a=b", "a;b", 'a"b', "a\nb", " a", "op:mul", "#", "fp32", "pure"])
    def test_odder_names_are_quoted_and_match_their_modules_alone(self, name: str) -> None:
        assert matched(name) == [name]

    @pytest.mark.parametrize("name", ["a*b", "a[0]", "a?", "[!a]"])
    def test_names_that_are_patterns_match_their_modules_alone(self, name: str) -> None:
        assert matched(name) == [name]


def matched(name: str) -> list[str]:
    """The modules that the island of one is about, among others with names like it, when its text is read back."""
    model = nn.ModuleDict({each: nn.Linear(1, 1) for each in (name, "aab", "a0", "ax", "ab")})
    policy = Policy.parse(f"fp16; {cover(islands(model), name)}")
    return [each.place.path for each in decide(policy.overrides, places(model)) if each.override is not None]


class TestOperations:
    @pytest.mark.parametrize("module", ["", UNKNOWN, "gone"])
    def test_what_belongs_to_no_module_is_covered_by_name(self, module: str) -> None:
        assert cover(islands(), module) == "op:mul=fp32"

    @pytest.mark.parametrize(
        ("op", "text"),
        [
            ("aten.mul_.Tensor", "op:mul=fp32"),
            ("aten._softmax.default", "op:softmax=fp32"),
            ("aten._log_softmax.default", "op:log_softmax=fp32"),
            ("aten.bmm.default", "op:matmul=fp32; op:bmm=fp32; op:baddbmm=fp32"),
            ("aten.mm.default", "op:matmul=fp32; op:mm=fp32; op:linear=fp32"),
            ("aten.addmm.default", "op:linear=fp32; op:addmm=fp32"),
            ("aten.mv.default", "op:matmul=fp32; op:mv=fp32"),
            ("aten.dot.default", "op:matmul=fp32; op:dot=fp32"),
            ("aten.exp.default", "op:exp=fp32"),
            ("aten._softmax_backward_data.default", "op:softmax=fp32"),
            ("aten.sigmoid_backward.default", "op:sigmoid=fp32"),
        ],
    )
    def test_it_is_called_as_code_calls_it(self, op: str, text: str) -> None:
        assert cover(islands(), "", op=op) == text

    @pytest.mark.parametrize("op", ["aten.convolution.default", "aten.mkldnn_convolution.default", "aten.convolution_backward.default"])
    def test_a_convolution_is_any(self, op: str) -> None:
        text = cover(islands(), "", op=op)
        assert text.startswith("op:conv1d=fp32; op:conv2d=fp32; op:conv3d=fp32")

    @pytest.mark.parametrize(
        "op", ["aten._to_copy.default", "aten.full.default", "aten.zeros.default", "aten.randn.default", "aten.copy_.default"]
    )
    def test_what_makes_values_out_of_nothing_is_not_covered(self, op: str) -> None:
        assert cover(islands(), "", op=op) == ""

    @pytest.mark.parametrize("op", ["mine.function.default", "aten.no_such_thing.default", "custom"])
    def test_an_operation_that_no_policy_names_is_not_covered(self, op: str) -> None:
        assert cover(islands(), "", op=op) == ""

    def test_each_is_named_once(self) -> None:
        made = islands()
        assert cover(made, "", op="aten.mul.Tensor") == "op:mul=fp32"
        assert cover(made, "", op="aten.mul.Scalar") == ""
        assert cover(made, "", op="aten.exp.default") == "op:mul=fp32; op:exp=fp32"

    def test_modules_come_before_operations(self) -> None:
        made = islands()
        cover(made, "")
        assert cover(made, "head") == "head=fp32; op:mul=fp32"

    @pytest.mark.parametrize("text", ["pure fp16", "pure bf16"])
    def test_a_pure_policy_has_none(self, text: str) -> None:
        made = islands(policy=Policy.parse(text))
        assert cover(made, "", policy=text) == ""
        assert [cover(made, "head", policy=text) for _ in range(2)] == ["head=fp32", ""]


def test_what_was_given_before_is_not_given_again() -> None:
    made = islands()
    assert made.cover([operation(module="head", op="aten.full.default")])
    assert made.cover([operation(module="head", op="aten.full.default")]) == ()
    assert made.cover([]) == ()


def test_overrides_name_the_modules_of_a_traced_model() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"first": nn.Linear(2, 2), "then": nn.Sequential(nn.Linear(2, 2), nn.Tanh())})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.parts["then"](self.parts["first"](x)) * 3
            return y

    model = Net()
    with trace(model) as seen:
        model(torch.ones(1, 2)).sum().backward()
    texts = {op.op: cover(islands(model), op.site.module, op=op.op) for op in seen.ops if op.absmax is not None}
    assert texts["aten.tanh.default"] == "parts.then.1=fp32"
    assert texts["aten.tanh_backward.default"] == "parts.then.1=fp32"
    assert texts["aten.mul.Tensor"] == "op:mul=fp32"
