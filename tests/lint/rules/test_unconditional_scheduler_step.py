"""What a schedule behind a step may ask, and what it may not leave out; the same holds for averages."""

from __future__ import annotations

import pytest

from halfstep.lint.rules.average_moved_on_skip import AverageMovedOnSkip
from halfstep.lint.rules.rule import AbstractRule
from halfstep.lint.rules.unconditional_scheduler_step import UnconditionalSchedulerStep
from tests.lint.judging import findings, fixed

BOTH = [
    pytest.param(UnconditionalSchedulerStep(), "scheduler.step()", id="scheduler"),
    pytest.param(AverageMovedOnSkip(), "ema.update(model)", id="average"),
]
LOOP = """\
import torch


def train(model, loader, optimizer, scheduler, ema, args, flag):
    scaler = torch.amp.GradScaler("cuda")
    for index, x in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        old = scaler.get_scale()
        taken = scaler.step(optimizer)
        scaler.update()
"""


def behind(*lines: str) -> str:
    """The loop with more lines behind the update."""
    return LOOP + "".join(f"        {line}\n" for line in lines)


@pytest.mark.parametrize(("rule", "move"), BOTH)
@pytest.mark.parametrize(
    "condition",
    [
        "scaler.get_scale() >= old",
        "not scaler.get_scale() < old",
        "index > 10 and old <= scaler.get_scale()",
        "not skipped",
        "taken is not None",
        "flag",
        "args.scheduler and flag",
        "was_stepped()",
        "torch.isfinite(loss)",
        "not scaler._found_inf_per_device(optimizer)",
    ],
)
def test_a_condition_that_may_be_about_skips_excuses(rule: AbstractRule, move: str, condition: str) -> None:
    assert findings(behind(f"if {condition}:", f"    {move}"), [rule]) == []


@pytest.mark.parametrize(("rule", "move"), BOTH)
@pytest.mark.parametrize(
    "condition",
    [
        "scheduler is not None",
        "scheduler",
        "ema",
        "args.average",
        "index % 10 == 0",
        "index < args.warmup",
        'args.kind == "cosine"',
        "isinstance(ema, list)",
    ],
)
def test_a_condition_about_other_things_does_not(rule: AbstractRule, move: str, condition: str) -> None:
    assert findings(behind(f"if {condition}:", f"    {move}"), [rule]) == [(15, rule.name)]


@pytest.mark.parametrize(("rule", "move"), BOTH)
def test_leaving_the_iteration_before_excuses(rule: AbstractRule, move: str) -> None:
    assert findings(behind("skipped = scaler.get_scale() < old", "if skipped:", "    continue", move), [rule]) == []
    assert findings(behind("if index % 10 == 0:", "    print(index)", move), [rule]) == [(16, rule.name)]


@pytest.mark.parametrize(("rule", "move"), BOTH)
@pytest.mark.parametrize("line", ["flag and {}", "{} if flag else None", "result = {}"])
def test_more_than_a_plain_call_is_left_alone(rule: AbstractRule, move: str, line: str) -> None:
    assert findings(behind(line.format(move)), [rule]) == []


@pytest.mark.parametrize(("rule", "move"), BOTH)
def test_a_scale_that_is_read_already_is_used(rule: AbstractRule, move: str) -> None:
    assert fixed(behind(move), [rule]) == behind("if scaler.get_scale() >= old:", f"    {move}")


@pytest.mark.parametrize(("rule", "move"), BOTH)
def test_the_new_name_is_not_taken(rule: AbstractRule, move: str) -> None:
    code = behind("scale = 1", move).replace("        old = scaler.get_scale()\n", "")
    assert "        scale_before = scaler.get_scale()\n        scaler.update()\n" in fixed(code, [rule])
    for name in ("scale_before", "scale_before_update"):
        code = code.replace("scale = 1", f"scale = {name} = 1") if name == "scale_before" else code.replace("= 1\n", f"= {name} = 1\n")
    assert findings(code, [rule])
    assert fixed(code, [rule]) == code


@pytest.mark.parametrize(("rule", "move"), BOTH)
@pytest.mark.parametrize("update", ["scaler.update(128.0)", "scaler.update(new_scale=128.0)", "done = scaler.update()"])
def test_without_a_plain_update_there_is_no_fix(rule: AbstractRule, move: str, update: str) -> None:
    code = behind(move).replace("scaler.update()", update)
    assert findings(code, [rule]) == [(14, rule.name)]
    assert fixed(code, [rule]) == code


def test_schedule_and_average_are_mended_together() -> None:
    rules = [rule for case in BOTH for rule in case.values[:1] if isinstance(rule, AbstractRule)]
    code = behind("scheduler.step()", "ema.update(model)").replace("        old = scaler.get_scale()\n", "")
    mended = fixed(code, rules)
    assert findings(mended, rules) == []
    assert mended.count("= scaler.get_scale()\n") == 1
    assert mended.count("if scaler.get_scale() >= scale:\n") == 2


def test_a_loop_over_optimizers_is_one_step() -> None:
    code = LOOP.replace("        taken = scaler.step(optimizer)\n", "        for one in optimizers:\n            scaler.step(one)\n")
    rule = UnconditionalSchedulerStep()
    assert findings(code + "        scheduler.step()\n", [rule]) == [(15, rule.name)]


def test_a_scaler_that_is_off_skips_nothing() -> None:
    code = behind("scheduler.step()").replace('GradScaler("cuda")', 'GradScaler("cuda", enabled=False)')
    assert findings(code, [UnconditionalSchedulerStep()]) == []


@pytest.mark.parametrize("name", ["loss_ema", "ema_loss", "acc_ema", "time_ema"])
def test_a_running_mean_of_numbers_is_no_average_of_weights(name: str) -> None:
    assert findings(behind(f"{name}.update(loss)"), [AverageMovedOnSkip()]) == []
