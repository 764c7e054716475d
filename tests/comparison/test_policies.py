"""Policies beside the precisions: each a column of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep
from halfstep.errors import ConfigurationError, TaskError
from halfstep.hardware import native_precisions
from halfstep.policy import Policy
from halfstep.records import Comparison
from halfstep.task import Task
from tests.comparison.tasks import make_factory, square, vanishing_task


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


FACTORY = make_factory(model=two_layers)


def compare(*policies: Policy | str | Path, task: Any = FACTORY, **options: Any) -> Comparison:
    values: dict[str, Any] = {"precisions": ["fp32"], "steps": 2, "warmup": 1, "seeds": 2, "device": "cpu"}
    return halfstep.compare(task, policies=policies, **(values | options))


def test_each_policy_is_a_column_after_the_precisions(tmp_path: Path) -> None:
    file = Policy.parse("bf16; 0=fp32").save(tmp_path / "islands.toml")
    result = compare(file, "O1", Policy.parse("bf16; 2=fp32"), precisions=["bf16"])
    names = ["fp32", "bf16", "islands", "O1", "bf16; 2=fp32"]
    assert [run.precision for run in result.runs] == names
    assert [(verdict.precision, verdict.baseline) for verdict in result.verdicts] == [(name, "fp32") for name in names[1:]]
    assert {(run.steps, run.outcome) for run in result.runs} == {(4, "complete")}
    assert [effect.name for effect in result.policies] == names[2:]
    assert [effect.policy for effect in result.policies] == ["bf16; 0=fp32", "fp16", "bf16; 2=fp32"]
    assert [module.precision for module in result.policies[0].modules] == ["bf16", "fp32", "bf16", "bf16"]
    assert {effect.task for effect in result.policies} == {result.task}
    assert Comparison.from_json(result.to_json()) == result


@pytest.mark.parametrize(
    ("policy", "precision"),
    [
        ("fp32; 0=fp32", "fp32"),  # Whatever it names, all of it is fp32.
        ("bf16; *=fp32", "fp32"),
        ("fp32; *=bf16", "bf16"),
        ("bf16; 0=bf16", "bf16"),
    ],
)
def test_a_policy_that_says_the_same_as_a_precision_trains_the_same(policy: str, precision: str) -> None:
    # The model returns what its last layer does, so that the loss is computed in what that gives.
    def loss(model: Any, batch: Tensor) -> Tensor:
        out: Tensor = model(batch).float().square().mean()
        return out

    result = compare(policy, task=make_factory(loss, model=two_layers), precisions=["fp32", "bf16"])
    losses = {run.precision: run.losses for run in result.runs}
    assert losses[policy] == losses[precision]
    assert losses["fp32"] != losses["bf16"]


def test_a_policy_of_fp32_is_the_same_bit_for_bit_and_there_is_nothing_to_explain() -> None:
    (verdict,) = compare("fp32; 0=fp32").verdicts
    assert verdict.loss_parity == "same"
    assert "every loss is identical, bit for bit" in verdict.reason
    assert "because" not in verdict.reason


@pytest.mark.parametrize(
    ("policy", "scaled"), [("fp16; 0=fp32", True), ("fp32; 0=fp16", True), ("bf16; 0=fp32", False), ("O2", True), ("fp32; 0=fp32", False)]
)
def test_a_policy_that_computes_fp16_anywhere_scales_its_loss(policy: str, scaled: bool) -> None:
    assert (compare(policy, steps=1, seeds=1).runs[1].final_scale is not None) is scaled
    assert compare(policy, steps=1, seeds=1, loss_scale="none").runs[1].final_scale is None


def test_without_loss_scaling_fp16_loses_its_gradients_in_a_policy_too() -> None:
    options: dict[str, Any] = {"task": vanishing_task, "steps": 5}
    lost, kept = compare("fp16; 1=fp32", loss_scale="none", **options).runs[1], compare("fp16; 1=fp32", **options).runs[1]
    assert lost.final_loss is not None
    assert kept.final_loss is not None
    assert kept.final_loss < lost.final_loss


def test_an_emulated_precision_in_a_policy_is_named_as_such() -> None:
    if "fp16" in native_precisions(torch.device("cpu")):
        pytest.skip("this CPU computes fp16 in hardware")
    verdict = compare("fp16; 0=fp32", seeds=1).verdicts[0]
    assert "fp16; 0=fp32" in verdict.reason
    # On a busy machine two steps of so small a model may take any time: one that came out faster was not slowed down by emulation.
    is_faster = verdict.speedup is not None and verdict.speedup.median > 1
    assert is_faster or "times as fast" not in verdict.reason or "does not compute fp16 training in hardware" in verdict.reason


def test_an_operation_of_one_column_does_not_reach_the_others() -> None:
    seen: dict[str, set[torch.dtype]] = {}
    order = iter(range(1000))

    def task(seed: int) -> Task:
        number = next(order)

        def loss(model: Any, batch: Tensor) -> Tensor:
            seen.setdefault(f"{number}", set()).add(nn.functional.linear(batch, batch).dtype)
            return square(model, batch)

        return make_factory(loss, model=two_layers)(seed)

    compare("bf16; op:linear=fp32", precisions=["bf16"], task=task, seeds=1)
    # The first task is made for the table of the policy, and runs no step; then fp32, bf16 and the policy.
    assert seen == {"1": {torch.float32}, "2": {torch.bfloat16}, "3": {torch.float32}}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.bfloat16, "nothing stays registered"


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("bf16; 7=fp32", r"The policy 'bf16; 7=fp32' does not fit the task: 7=fp32\. It matches no module of this Sequential"),
        ("nowhere.toml", "Cannot read the policy nowhere.toml"),
        ("fp32", "would be the column 'fp32', like the precision"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(policy: str, message: str) -> None:
    def never(model: Any, batch: Tensor) -> Tensor:
        raise AssertionError("no step is run")

    with pytest.raises(ConfigurationError, match=message):
        compare(policy, task=make_factory(never, model=two_layers))


def test_a_policy_that_fails_is_noted_and_the_others_go_on() -> None:
    def loss(model: Any, batch: Tensor) -> Tensor:
        out: Tensor = model(batch)
        if torch.is_autocast_enabled("cpu"):
            raise ValueError("no half here")
        return out.square().mean()

    result = compare("bf16; 0=fp32", task=make_factory(loss, model=two_layers))
    assert [run.outcome for run in result.runs] == ["complete", "failed"]
    assert result.runs[1].note.startswith("bf16; 0=fp32 failed in step 1: ValueError: no half here")
    # And its policy is taken away: another one could not be applied otherwise.
    with pytest.raises(TaskError, match="fp32 failed in step 1: ZeroDivisionError"):
        compare("bf16; 0=fp32", task=make_factory(lambda model, batch: 1 / 0, model=two_layers))


def test_a_contender_that_leaves_takes_its_policy_along() -> None:
    made: list[Task] = []

    def task(seed: int) -> Task:
        made.append(make_factory(model=two_layers)(seed))
        return made[-1]

    compare("bf16; 0=fp32", task=task)
    assert len(made) == 1 + 2 * 2
    for each in made:
        Policy.parse("bf16; 0=fp32").apply(each.model).remove()


def test_one_model_for_all_is_refused_and_left_without_a_policy() -> None:
    model = two_layers()
    result = compare("bf16; 0=fp32", task=make_factory(model=lambda: model), seeds=1)
    assert "a model that it had returned before" in result.runs[1].note
    Policy.parse("bf16; 0=fp32").apply(model).remove()
