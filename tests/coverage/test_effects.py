"""What a policy does to a task, measured, where it is known by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep.coverage import NamedPolicy, describe_policy, policy_effect
from halfstep.errors import ConfigurationError, InvalidTypeError, TaskError
from halfstep.policy import Policy
from halfstep.records import OverrideEffect, PolicyEffect
from halfstep.task import Task
from tests.coverage.tasks import encoder, factory, islands, softmaxes, square

# A step of `islands` under bf16: the input, two weights and two biases are cast, and the gradients of the latter four back.
PLAIN = 1 + 4 + 4


def effect(policy: str, model: Callable[[], nn.Module] = islands, **options: Any) -> PolicyEffect:
    return policy_effect(policy, factory(model), **options)


def only(found: PolicyEffect) -> OverrideEffect:
    (override,) = found.overrides
    return override


def check_bare(model: nn.Module) -> None:
    """Neither hooks nor a policy are left, on which another one could not be applied."""
    assert not any(module._forward_hooks for module in model.modules())
    Policy.parse("bf16; 1=fp32").apply(model).remove()


class TestCasts:
    @pytest.mark.parametrize(("precision", "scaling"), [("bf16", 0), ("fp16", 2)])
    def test_without_overrides(self, precision: str, scaling: int) -> None:
        found = effect(precision)
        # To be scaled, the loss is cast to fp32, and its gradient back.
        assert (found.casts, found.casts_without, found.overrides) == (PLAIN + scaling, PLAIN + scaling, ())
        # Forward: a batch of 80 numbers, and 2 * 72 in weights. Backward: those of the weights.
        assert found.cast_elements == 80 + 2 * 144 + scaling

    def test_fp32_casts_nothing(self) -> None:
        found = effect("fp32")
        assert (found.casts, found.cast_elements, found.casts_without) == (0, 0, 0)

    @pytest.mark.parametrize("index", [1, 2])
    def test_an_island_without_weights_casts_what_goes_in_and_what_comes_out_and_both_gradients(self, index: int) -> None:
        found = effect(f"bf16; {index}=fp32")
        assert only(found).casts == 4
        assert (found.casts, found.casts_without) == (PLAIN + 4, PLAIN)

    def test_two_islands_that_touch_cost_no_more_than_one(self) -> None:
        found = effect("bf16; 1=fp32; 2=fp32")
        assert (found.casts, found.casts_without) == (PLAIN + 4, PLAIN)
        # Without the one, the other still costs as much: so neither adds anything, and the sum is not what both add together.
        assert [each.casts for each in found.overrides] == [0, 0]

    def test_two_islands_apart_cost_twice_as_much(self) -> None:
        def apart() -> nn.Module:
            return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

        found = effect("bf16; 1=fp32; 3=fp32", apart)
        assert (found.casts_without, found.casts) == (PLAIN + 4, PLAIN + 4 + 8)
        assert [each.casts for each in found.overrides] == [4, 4]

    def test_an_island_with_weights_may_save_casts(self) -> None:
        found = effect("bf16; 3=fp32")
        # Its weight and bias are cast no more, nor their gradients; what goes in is, and its gradient.
        assert only(found).casts == 2 - 4
        assert found.casts == PLAIN - 2

    @pytest.mark.parametrize(
        ("override", "added"),
        [
            # The norms have the fp32 stream to read, and run in fp32 as it is.
            ("torch.nn.LayerNorm=fp32", 0),
            # Of each MLP: two weights, two biases and what it gets, with their gradients; and what it gives to the sum, whose gradient is
            # cast to bf16 if that was bf16.
            ("*.mlp=fp32", -2 * (2 * 5 + 1)),
            # Of each: what it gets and what the product after it gets, with their gradients.
            ("op:softmax=fp32", 2 * 4),
            # It gets bf16, which is cast to fp32, and its gradient back; its weight and bias are not, and what it gives to the sum is fp32.
            ("0.out=fp32", 2 * 1 - 2 * 2 - 1),
        ],
    )
    def test_a_transformer(self, override: str, added: int) -> None:
        found = effect(f"bf16; {override}", encoder)
        # In each block 4 layers with weight and bias, two of which get fp32: the norm's result and the stream; with their gradients. And
        # the gradients of what the two sums get from the layers in bf16.
        assert found.casts_without == 2 * (2 * (2 * 4 + 2) + 2)
        assert only(found).casts == added
        assert only(found).status == "effective"

    def test_an_operation_that_autocast_leaves_in_half(self) -> None:
        found = effect("bf16; op:tanh=fp32")
        # Both calls cast what they get: the first is given bf16, the second the fp32 result of the first; and the last layer casts it back.
        assert (only(found).casts, only(found).ran) == (4, 2)

    def test_a_step_without_an_override_draws_the_same_random_numbers(self) -> None:
        def dropped() -> nn.Module:
            return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))

        losses: list[float] = []

        def loss(model: Any, batch: Tensor) -> Tensor:
            out = square(model, batch)
            losses.append(out.item())
            return out

        before = torch.get_rng_state()
        policy_effect("fp32; 0=fp32; 2=fp32", factory(dropped, loss=loss), seed=7)
        assert len(losses) == 4
        assert len(set(losses)) == 1
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(1234)
        policy_effect("fp32", factory(dropped, loss=loss), seed=7)
        assert len(set(losses)) == 1, "whatever was drawn before"
        policy_effect("fp32", factory(dropped, loss=loss), seed=8)
        assert len(set(losses)) == 2

    def test_the_model_trains(self) -> None:
        seen: list[bool] = []

        def loss(model: Any, batch: Tensor) -> Tensor:
            seen.append(model.training)
            return square(model, batch)

        policy_effect("bf16; 1=fp32", factory(lambda: islands().eval(), loss=loss))
        assert seen == [True, True]


class TestCalls:
    def test_modules_are_counted_as_often_as_they_are_called(self) -> None:
        shared = nn.Linear(8, 8)
        found = effect("bf16; 0=fp32", lambda: nn.Sequential(shared, nn.ReLU(), shared))
        assert [(module.path, module.calls) for module in found.modules] == [("", 1), ("0", 2), ("1", 1)]
        assert only(found).ran == 1

    def test_a_checkpointed_module_runs_again(self) -> None:
        class Checkpointed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

            def forward(self, x: Tensor) -> Tensor:
                out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
                return out

        found = effect("bf16; inner=fp32", Checkpointed)
        # The last layer is left in the middle, when the last tensor that the backward pass needs is there.
        assert [module.calls for module in found.modules] == [1, 1, 2, 1]

    def test_a_module_that_is_never_called_says_so_and_what_to_override(self) -> None:
        found = effect("bf16; *.out_proj=fp32", lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
        override = only(found)
        assert (override.modules, override.ran, override.casts, override.status) == (1, 0, 0, "uncalled")
        assert override.note == (
            "Its module was not called in the step; self_attn, which it is in, was, and may use its weights by itself. Override that one."
        )
        assert found.findings == (override,)

    def test_several_that_are_never_called(self) -> None:
        class Idle(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.used, self.idle = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

            def forward(self, x: Tensor) -> Tensor:
                out: Tensor = self.used(x)
                return out

        found = effect("bf16; idle.*=fp32", Idle)
        assert (only(found).status, only(found).note) == ("uncalled", "None of its modules was called in the step.")

    @pytest.mark.parametrize(("policy", "ran", "status"), [("bf16; op:gelu=fp32", 0, "uncalled"), ("fp32; op:tanh=fp32", 0, "uncalled")])
    def test_an_operation_that_is_not_called_where_autocast_is_on(self, policy: str, ran: int, status: str) -> None:
        override = only(effect(policy))
        assert (override.ran, override.status, override.note) == (ran, status, "The operation was not called where autocast is on.")

    @pytest.mark.parametrize(
        ("policy", "ran"),
        [
            ("bf16; op:softmax=fp32", 3),
            ("bf16; op:softmax=fp32; 1=bf16", 2),
            ("bf16; op:softmax=fp32; 1=fp32", 2),
            ("bf16; 1=bf16; op:softmax=fp32", 3),
            ("bf16; op:softmax=fp32; 1=bf16; 2=bf16", 1),
            ("bf16; op:softmax=fp32; 1=bf16; op:softmax.int=fp32", 3),
        ],
    )
    def test_calls_of_an_operation_count_only_where_its_override_decides(self, policy: str, ran: int) -> None:
        found = effect(policy, softmaxes)
        assert [each.ran for each in found.overrides if each.override.startswith("op:")][-1] == ran

    @pytest.mark.parametrize("later", ["1.*=bf16", "1=fp16"])
    def test_an_operation_that_is_called_only_where_later_overrides_decide(self, later: str) -> None:
        def nested() -> nn.Module:
            return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Softmax(-1), nn.Softmax(-1)))

        override = effect(f"bf16; op:softmax=fp32; {later}", nested).overrides[0]
        assert (override.ran, override.status) == (0, "uncalled")
        assert override.note == (
            "The operation was called only in modules that later overrides are about. Put it after those to override it there, too."
        )


class TestFindings:
    def test_an_override_that_matches_nothing_is_no_error(self) -> None:
        found = effect("bf16; hed=fp32; 1=fp32")
        unmatched, island = found.overrides
        assert (unmatched.status, unmatched.ran, unmatched.casts) == ("unmatched", 0, 0)
        assert (island.status, island.casts) == ("effective", 4)
        assert found.findings == (unmatched,)
        assert found.policy == "bf16; hed=fp32; 1=fp32"

    def test_an_absent_class_is_no_finding(self) -> None:
        found = effect("O2")
        assert {each.status for each in found.overrides} == {"absent"}
        assert found.findings == ()
        assert (found.pure, found.default, found.casts) == (True, "fp16", found.casts_without)

    def test_what_needs_no_step_gets_none(self) -> None:
        steps: list[str] = []

        def note(done: int, total: int, what: str) -> None:
            steps.append(f"{done}/{total} {what}")

        effect("bf16; hed=fp32; torch.nn.BatchNorm1d=fp32; 1=fp32", progress=note)
        assert steps == ["0/1 the whole policy", "1/2 without any override"], "which is without its only island, too"
        steps.clear()
        effect("bf16; op:tanh=fp32", progress=note)
        assert steps == ["0/1 the whole policy", "1/3 without any override", "2/3 calls of operations"]


class TestTasks:
    def test_nothing_stays_behind(self) -> None:
        made: list[Task] = []

        def keep(seed: int) -> Task:
            made.append(factory(islands)(seed))
            return made[-1]

        policy_effect("bf16; 1=fp32; op:softmax=fp32", keep)
        assert len(made) == 5
        for task in made:
            check_bare(task.model)
            assert all(parameter.grad is None for parameter in task.model.parameters())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.ones(2, dtype=torch.bfloat16).softmax(0).dtype is torch.bfloat16

    def test_no_weight_changes(self) -> None:
        model = islands()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        policy_effect("bf16; 1=fp32", factory(lambda: model))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def test_an_optimizer_that_takes_a_closure(self) -> None:
        def task(seed: int) -> Task:
            model = islands()
            return Task(model=model, optimizer=torch.optim.LBFGS(model.parameters()), loss=square, batches=[torch.randn(2, 5, 8)])

        assert policy_effect("bf16", task).casts == PLAIN

    @pytest.mark.parametrize("policy", ["bf16; 1=fp32", "bf16; op:tanh=fp32"])
    def test_a_loss_that_fails_is_the_tasks_and_leaves_nothing_behind(self, policy: str) -> None:
        model = islands()

        def fail(model: Any, batch: Tensor) -> Tensor:
            model(batch)
            raise ValueError("bad batch")

        with pytest.raises(TaskError, match=rf"A step under the policy '{policy}' failed: ValueError: bad batch \(.*test_effects"):
            policy_effect(policy, factory(lambda: model, loss=fail))
        check_bare(model)

    def test_a_task_is_named(self) -> None:
        assert effect("bf16").task.endswith("task")
        with pytest.raises(TaskError, match="names no factory"):
            policy_effect("bf16", "nowhere")

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"seed": -1}, ConfigurationError, "from 0 to 2\\*\\*32 - 1, not -1"),
            ({"seed": 2**32}, ConfigurationError, "from 0 to 2\\*\\*32 - 1"),
            ({"seed": True}, InvalidTypeError, "A seed is a whole number, not True"),
            ({"seed": "0"}, InvalidTypeError, "A seed is a whole number, not '0'"),
            ({"device": "gpu"}, ConfigurationError, "Unknown device 'gpu'"),
        ],
    )
    def test_wrong_options(self, options: dict[str, Any], error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            effect("bf16", **options)

    def test_what_is_no_task(self) -> None:
        given: Any = 3
        with pytest.raises(InvalidTypeError, match=r"A task is named by a string, or is a factory .*, not a int"):
            policy_effect("bf16", given)


def test_a_description_says_the_same_without_a_step() -> None:
    def never(model: Any, batch: Tensor) -> Tensor:
        raise AssertionError("no step is run")

    described = describe_policy(NamedPolicy.of("bf16; 1=fp32"), factory(islands, loss=never))
    measured = effect("bf16; 1=fp32")
    assert (described.casts, described.casts_without, described.overrides[0].ran, described.modules[0].calls) == (None, None, None, None)
    assert [(module.path, module.precision, module.reason) for module in described.modules] == [
        (module.path, module.precision, module.reason) for module in measured.modules
    ]
    assert (described.name, described.policy) == ("bf16; 1=fp32", "bf16; 1=fp32")
