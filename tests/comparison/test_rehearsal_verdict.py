"""What is said of a precision whose numerics alone are known."""

from __future__ import annotations

from typing import Any

import pytest

from halfstep.comparison.parity import Parity
from halfstep.comparison.verdict import conclude_rehearsal, judge_rehearsal
from halfstep.records import LossParity, Verdict


def verdict(precision: str = "bf16", judgement: LossParity = "same", **changes: Any) -> Verdict:
    parity = Parity(judgement=judgement, why="it differs by 0.01")
    return judge_rehearsal(precision=precision, baseline="fp32", target="cuda", parity=parity, **changes)


@pytest.mark.parametrize(
    ("judgement", "said"),
    [
        ("same", "bf16 trains as fp32 does on cuda (rehearsed on this CPU); the loss is the same: it differs by 0.01"),
        ("better", "bf16 trains better than fp32 on cuda (rehearsed on this CPU); the loss is better: it differs by 0.01"),
        ("worse", "bf16 trains worse than fp32 on cuda (rehearsed on this CPU); the loss is worse: it differs by 0.01"),
        (
            "inconclusive",
            "bf16 is not proven to train as fp32 does on cuda (rehearsed on this CPU); the loss is inconclusive: it differs by 0.01",
        ),
    ],
)
def test_the_reason_says_what_is_known(judgement: LossParity, said: str) -> None:
    judged = verdict(judgement=judgement)
    assert judged.reason == f"{said}; time and memory were not measured."
    assert (judged.loss_parity, judged.speedup, judged.memory_ratio) == (judgement, None, None)


def test_skipped_steps_are_counted() -> None:
    assert "0.01; 7 of 42 steps were skipped; time and" in verdict(skipped=7, steps=42).reason
    assert "skipped" not in verdict(skipped=0, steps=42).reason


def test_a_failure_is_no_judgement_of_the_loss() -> None:
    reason = verdict(judgement="inconclusive", failure="It broke.", skipped=1, steps=3).reason
    assert reason == (
        "bf16 did not run to the end on cuda (rehearsed on this CPU): it broke; 1 of 3 steps were skipped; time and memory were not "
        "measured."
    )


def test_the_conclusion_groups_what_is_alike() -> None:
    verdicts = [
        verdict("broken", "inconclusive"),
        verdict("fp16", "worse"),
        verdict("bf16"),
        verdict("O1", "inconclusive"),
        verdict("O2", "better"),
        verdict("islands"),
        verdict("fp32; head=bf16"),
    ]
    said = conclude_rehearsal(verdicts, failed=[True, *[False] * 6], baseline="fp32", target="xpu")
    assert said == (
        "bf16, islands and fp32; head=bf16 train as fp32 does on xpu (rehearsed on this CPU); O2 trains better than fp32; fp16 trains "
        "worse than fp32; O1 is not proven to train as fp32 does; broken did not run to the end; time and memory were not measured."
    )


@pytest.mark.parametrize(
    ("judgement", "said"),
    [
        ("same", "train as fp32 does"),
        ("better", "train better than fp32"),
        ("worse", "train worse than fp32"),
        ("inconclusive", "are not proven to train as fp32 does"),
    ],
)
def test_several_that_are_alike(judgement: LossParity, said: str) -> None:
    verdicts = [verdict("bf16", judgement), verdict("fp16", judgement)]
    conclusion = conclude_rehearsal(verdicts, failed=[False, False], baseline="fp32", target="cuda")
    assert conclusion == f"bf16 and fp16 {said} on cuda (rehearsed on this CPU); time and memory were not measured."


def test_with_nothing_to_compare() -> None:
    assert conclude_rehearsal([], failed=[], baseline="fp32", target="cuda") == "Nothing was compared with fp32."
    itself = conclude_rehearsal([verdict("fp32")], failed=[False], baseline="fp32", target="cuda")
    assert itself.startswith("fp32 was compared with itself: fp32 trains as fp32 does on cuda (rehearsed on this CPU)")
