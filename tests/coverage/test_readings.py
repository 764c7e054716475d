"""What a policy says of a model, before anything runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfstep.coverage.readings import Reading, decided_overloads, distinct_modules, read
from halfstep.hardware import native_precisions
from halfstep.policy import Override, Policy
from halfstep.records import ModulePrecision
from tests.coverage.tasks import Shared, encoder, islands

CPU = torch.device("cpu")


def reading(text: str, model: nn.Module) -> Reading:
    return read(Policy.parse(text), model, device=CPU)


def modules(text: str, model: nn.Module) -> dict[str, ModulePrecision]:
    return {module.path: module for module in reading(text, model).modules}


class TestModules:
    def test_each_module_has_its_precision_and_the_override_that_decides(self) -> None:
        found = modules("bf16; 0=fp32; 0.mlp=fp16; 1.*=fp32", encoder())
        assert {path: (module.precision, module.reason, module.direct) for path, module in found.items() if path in ("", "0", "1")} == {
            "": ("bf16", "default", False),
            "0": ("fp32", "0=fp32", True),
            "1": ("bf16", "default", False),
        }
        # What is in a module that an override is about runs as that one.
        assert (found["0.qkv"].precision, found["0.qkv"].reason, found["0.qkv"].direct) == ("fp32", "0=fp32", False)
        assert (found["0.mlp.2"].precision, found["0.mlp.2"].reason, found["0.mlp.2"].direct) == ("fp16", "0.mlp=fp16", False)
        assert (found["1.mlp.2"].precision, found["1.mlp.2"].direct) == ("fp32", True)
        assert (found["1.mlp.2"].kind, found["1.mlp.2"].calls) == ("Linear", None)

    def test_parameters_are_a_modules_own_and_a_shared_one_counts_once(self) -> None:
        found = modules("bf16", Shared())
        counted = {path: module.parameters for path, module in found.items()}
        assert counted == {"": 0, "a": 0, "a.0": 72, "a.1": 0, "b": 0, "b.1": 0, "tied": 0}

    def test_a_shared_module_whose_places_do_not_agree_runs_as_its_caller(self) -> None:
        model = Shared()
        found = modules("bf16; a=fp32", model)
        assert (found["a.0"].precision, found["a.0"].reason) == ("caller", "shared by places that do not agree")
        assert (found["a.1"].precision, found["b.1"].precision) == ("fp32", "bf16")
        # What is said of it directly is said of it, wherever it is called.
        assert modules("bf16; b.0=fp32", model)["a.0"].precision == "fp32"
        # In a pure policy every module has a region of its own.
        assert modules("pure bf16; a=fp32", model)["a.0"].precision == "bf16"

    def test_auto_is_what_it_means_here(self) -> None:
        found = reading("auto; 1=fp32", islands())
        assert found.modules[0].precision == native_precisions(CPU)[0] == found.policy.default

    def test_the_modules_stand_in_the_order_in_which_calls_are_counted(self) -> None:
        model = Shared()
        names = {id(module): path for path, module in model.named_modules()}
        assert [names[id(module)] for module in distinct_modules(model)] == [module.path for module in reading("bf16", model).modules]


class TestOverrides:
    def test_what_an_override_decides_about_is_counted(self) -> None:
        block, second = reading("bf16; 0=fp32; torch.nn.LayerNorm=fp32", encoder()).overrides
        # The block, its two layers, its MLP of three and itself, but not its norm, on which the later override has the last word.
        assert (block.modules, block.parameters) == (7, 8 * 24 + 24 + 72 + 8 * 16 + 16 + 16 * 8 + 8)
        assert (second.modules, second.parameters) == (2, 2 * 16)
        assert {(each.status, each.note, each.ran, each.casts) for each in (block, second)} == {("effective", "", None, None)}

    @pytest.mark.parametrize(
        ("override", "hint"),
        [
            ("0.mpl=fp32", "Did you mean '0.mlp'"),
            ("Block=fp32", "Did you mean the class 'class:tests.coverage.tasks.Block'?"),
            ("zzz=fp32", "Its modules are 0, 0.norm, 0.qkv,"),
        ],
    )
    def test_one_that_matches_nothing_is_left_out_and_says_what_is_near(self, override: str, hint: str) -> None:
        found = reading(f"bf16; {override}; 1.mlp=fp32", encoder())
        assert (found.overrides[0].status, found.overrides[0].modules) == ("unmatched", 0)
        assert found.overrides[0].note.startswith("It matches no module of this Sequential, so the policy cannot be applied as it is. ")
        assert hint in found.overrides[0].note
        assert str(found.policy) == "bf16; 1.mlp=fp32"
        assert found.kept == (1,)
        assert {decider for decider in found.deciders if decider is not None} == {1}, "by the index in the policy that was given"

    def test_a_class_with_wildcards_that_matches_nothing_is_unmatched(self) -> None:
        assert reading("bf16; class:X*=fp32; 0=fp32", encoder()).overrides[0].status == "unmatched"

    def test_a_class_of_torch_that_the_model_does_not_have_is_absent(self) -> None:
        found = reading("bf16; torch.nn.BatchNorm2d=fp32; 0=fp32", encoder())
        assert found.overrides[0].status == "absent"
        assert found.overrides[0].note == "The model has no module of this class. That is no fault: a policy may serve many models."
        assert found.kept == (1,)

    @pytest.mark.parametrize(
        ("text", "statuses"),
        [
            ("bf16; 0.mlp=fp32; 0=fp16", ["overruled", "effective"]),
            ("bf16; 0=fp16; 0.mlp=fp32", ["effective", "effective"]),
            ("bf16; op:softmax=fp32; op:softmax=fp16", ["overruled", "effective"]),
            ("bf16; op:softmax=fp16; op:softmax.int=fp32", ["overruled", "effective"]),
            ("bf16; op:softmax=fp32; op:linear=fp32", ["effective", "effective"]),
        ],
    )
    def test_one_that_later_ones_overrule(self, text: str, statuses: list[str]) -> None:
        found = reading(text, encoder()).overrides
        assert [each.status for each in found] == statuses
        assert all("later overrides are about" in each.note for each in found if each.status == "overruled")


def test_an_operation_is_decided_by_the_last_override_about_it() -> None:
    overrides = [Override.of("op:softmax", "fp32"), Override.of("head", "fp32"), Override.of("op:softmax", "fp16")]
    assert [sorted(decided_overloads(overrides, index)) for index in range(3)] == [[], [], ["aten::softmax.int"]]
