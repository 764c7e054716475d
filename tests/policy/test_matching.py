from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from halfstep import Policy
from halfstep.errors import ConfigurationError, InvalidTypeError
from halfstep.policy.application import chosen_decisions
from halfstep.policy.matching import check_all_match, decide, places
from halfstep.policy.overrides import class_names


class Base(nn.Module):
    """A class of the user's."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


class Derived(Base):
    """One that is derived from it."""


class Blocks(nn.Module):
    """Two blocks, with a norm in each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)) for _ in range(2)])
        self.head = Derived()


def effective(text: str, model: nn.Module) -> dict[str, str]:
    """The override, or nothing, that decides about each place."""
    policy = Policy.parse(text)
    decisions = decide(policy.overrides, places(model))
    return {each.place.path: "" if each.override is None else str(policy.overrides[each.override]) for each in decisions}


def about(text: str, model: nn.Module) -> list[str]:
    """The places that some override decides about."""
    return [path for path, override in effective(text, model).items() if override]


def test_places_are_in_order_and_each_is_before_those_inside() -> None:
    paths = [place.path for place in places(Blocks())]
    assert paths == ["", "blocks", "blocks.0", "blocks.0.0", "blocks.0.1", "blocks.1", "blocks.1.0", "blocks.1.1", "head"]


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("head", ["head"]),
        ("blocks.1", ["blocks.1", "blocks.1.0", "blocks.1.1"]),
        ("blocks.*.1", ["blocks.0.1", "blocks.1.1"]),
        ("*.1", ["blocks.0.1", "blocks.1", "blocks.1.0", "blocks.1.1"]),
        ("blocks.?.[!0]", ["blocks.0.1", "blocks.1.1"]),
        ("blocks", ["blocks", "blocks.0", "blocks.0.0", "blocks.0.1", "blocks.1", "blocks.1.0", "blocks.1.1"]),
        ("*", ["blocks", "blocks.0", "blocks.0.0", "blocks.0.1", "blocks.1", "blocks.1.0", "blocks.1.1", "head"]),
        ("torch.nn.LayerNorm", ["blocks.0.1", "blocks.1.1"]),
        ("class:LayerNorm", ["blocks.0.1", "blocks.1.1"]),
        ("torch.nn.modules.normalization.LayerNorm", ["blocks.0.1", "blocks.1.1"]),
        ("class:*Norm", ["blocks.0.1", "blocks.1.1"]),
        ("class:torch.nn.*Linear", ["blocks.0.0", "blocks.1.0"]),
        ("class:Derived", ["head"]),
        ("class:Base", ["head"]),
        (f"class:{Base.__module__}.Base", ["head"]),
    ],
)
def test_what_a_pattern_is_about(pattern: str, paths: list[str]) -> None:
    model = Blocks()
    assert about(f"bf16; {pattern}=fp32", model) == paths
    check_all_match(Policy.parse(f"bf16; {pattern}=fp32").overrides, places(model))


def test_a_class_itself_is_a_pattern() -> None:
    for kind in (Base, Derived, nn.LayerNorm, nn.Linear):
        policy = Policy().override(kind, "fp32")
        assert policy.overrides[0].matches(path="anything", module_class=kind)
        assert Policy.parse(str(policy)) == policy
    assert about(str(Policy().override(Base, "fp32")), Blocks()) == ["head"]


def test_names_of_a_class() -> None:
    assert class_names(Derived)[:4] == (f"{__name__}.Derived", "Derived", f"{__name__}.Base", "Base")
    assert class_names(nn.BatchNorm2d)[:3] == ("torch.nn.BatchNorm2d", "BatchNorm2d", "torch.nn.modules.batchnorm.BatchNorm2d")
    assert "torch.nn.modules.batchnorm._NormBase" in class_names(nn.BatchNorm2d)
    assert class_names(Base)[2:] == ("torch.nn.Module", "Module", "torch.nn.modules.module.Module")


def test_the_later_override_wins_wherever_it_stands() -> None:
    model = Blocks()
    assert effective("bf16; blocks=fp32; blocks.1=bf16", model)["blocks.1.0"] == "blocks.1=bf16"
    assert effective("bf16; blocks.1=bf16; blocks=fp32", model)["blocks.1.0"] == "blocks=fp32"
    found = effective("bf16; blocks=fp32; torch.nn.LayerNorm=fp16; blocks.1=bf16", model)
    assert [found[path] for path in ("blocks.0", "blocks.0.0", "blocks.0.1", "blocks.1", "blocks.1.1", "head")] == [
        "blocks=fp32",
        "blocks=fp32",
        "torch.nn.LayerNorm=fp16",
        "blocks.1=bf16",
        "blocks.1=bf16",
        "",
    ]
    assert effective("bf16; head=fp32; head=fp16; head=bf16", model)["head"] == "head=bf16"


def test_a_decision_is_direct_where_the_override_is_about_the_module_itself() -> None:
    decisions = decide(Policy.parse("bf16; blocks.0.1=fp16; blocks=fp32").overrides, places(Blocks()))
    direct = {each.place.path: each.direct for each in decisions if each.override is not None}
    assert direct == {"blocks": True} | dict.fromkeys(
        ["blocks.0", "blocks.0.0", "blocks.0.1", "blocks.1", "blocks.1.0", "blocks.1.1"], False
    )


class Twice(nn.Module):
    """One module in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.here = nn.Sequential(nn.Linear(2, 2))
        self.there = nn.Sequential(self.here[0])


def chosen(text: str, model: Twice) -> tuple[int | None, bool] | None:
    decision = dict(chosen_decisions(decide(Policy.parse(text).overrides, places(model))))[model.here[0]]
    return None if decision is None else (decision.override, decision.direct)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16; there.0=fp32", (0, True)),
        ("bf16; here.0=fp32", (0, True)),
        ("bf16; here.0=fp32; there.0=fp16", (1, True)),
        ("bf16; there.0=fp16; here.0=fp32", (1, True)),
        ("bf16; there.0=fp32; here=fp16", (0, True)),
        ("bf16; *e=fp32", (0, False)),
        ("bf16; there=fp32", None),
        ("bf16; here=fp32; there=fp32", None),
        ("bf16; class:Twice=fp32", (0, False)),
        ("bf16", (None, False)),
    ],
)
def test_a_shared_module(text: str, expected: tuple[int | None, bool] | None) -> None:
    assert chosen(text, Twice()) == expected


def test_a_shared_module_whose_parents_disagree_runs_as_what_calls_it() -> None:
    model = Twice()
    with Policy.parse("bf16; there=fp32").apply(model), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.here(torch.ones(1, 2)).dtype is torch.bfloat16
        assert model.there(torch.ones(1, 2)).dtype is torch.float32


def test_a_module_that_holds_itself_ends() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].parent = model
    assert [place.path for place in places(model)] == ["", "0"]


def test_children_that_are_none_are_passed_over() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model.register_module("nothing", None)
    assert [place.path for place in places(model)] == ["", "0"]


def test_paths_are_those_of_the_bare_model() -> None:
    model = Blocks()
    paths = [place.path for place in places(model)]
    assert [place.path for place in places(DataParallel(model))] == paths
    assert [place.path for place in places(cast("nn.Module", torch.compile(model, backend="eager")))] == paths


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("bf16; haed=fp32", r"The override 'haed=fp32' matches no module of this Blocks\. Did you mean 'head'\?"),
        ("bf16; block.0=fp32", r"'block\.0=fp32' matches no module of this Blocks\. Did you mean 'blocks\.0' or 'blocks\.\d(\.\d)?'"),
        ("bf16; xyz=fp32", r"matches no module of this Blocks\. Its modules are blocks, blocks\.0, .*blocks\.1\.1, head\."),
        ("bf16; LayerNorm=fp32", r"matches no module of this Blocks\. Did you mean the class 'class:torch\.nn\.LayerNorm'\?"),
        ("bf16; class:Derivd=fp32", r"The override 'class:Derivd=fp32' matches no module .*Derived"),
        ("bf16; torch.nn.LayerNrm=fp32", r"The override 'torch\.nn\.LayerNrm=fp32' matches no module .*'torch\.nn\.LayerNorm'"),
        ("bf16; class:Qqqqqqqqqqqq=fp32", r"Its classes are .*Blocks, torch\.nn\.ModuleList, "),
        ("bf16; head=fp32; head.*=fp16", r"The override 'head\.\*=fp16' matches no module"),
    ],
)
def test_an_override_about_nothing_is_refused(text: str, match: str) -> None:
    model = Blocks()
    with pytest.raises(ConfigurationError, match=match):
        Policy.parse(text).apply(model)
    assert all(type(module).__module__ != "halfstep" and "forward" not in vars(module) for module in model.modules())
    Policy.parse("bf16; head=fp32").apply(model).remove()  # Nothing was left applied.


def test_a_model_without_parts_has_no_modules_to_name() -> None:
    with pytest.raises(ConfigurationError, match=r"matches no module of this Linear\. Its modules are none\."):
        Policy.parse("bf16; head=fp32").apply(nn.Linear(1, 1))


def test_a_class_of_torch_may_be_missing() -> None:
    """A policy may be meant for many models."""
    for text in ("bf16; torch.nn.BatchNorm2d=fp32", "bf16; class:LSTM=fp32"):
        Policy.parse(text).apply(Blocks()).remove()


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match=r"A policy is applied to a torch\.nn\.Module, not to a function\."):
        Policy.parse("bf16").apply(lambda inputs: inputs)  # type: ignore[arg-type]


def test_auto_needs_a_device() -> None:
    with pytest.raises(ConfigurationError, match=r"The policy's default is auto, but the model has no parameters.*Name .* instead\."):
        Policy.parse("auto").apply(nn.ReLU())
    with Policy.parse("auto").apply(nn.Linear(1, 1)) as handle:
        assert handle.region.precision in ("fp32", "bf16", "fp16")
