from __future__ import annotations

from halfstep.report.contenders import contenders
from tests import samples


def test_the_baseline_has_no_verdict() -> None:
    comparison = samples.comparison(verdicts=(samples.verdict("fp32"), samples.verdict("bf16"), samples.verdict("fp16")))
    assert [one.verdict.precision if one.verdict else None for one in contenders(comparison)] == [None, "bf16", "fp16"]


def test_a_precision_that_appears_again_is_numbered_and_keeps_its_own_verdict() -> None:
    first, second = samples.verdict("fp32", reason="The first."), samples.verdict("fp32", reason="The second.")
    comparison = samples.comparison(
        runs=(samples.run("fp32"), samples.run("fp32"), samples.run("bf16"), samples.run("fp32")),
        verdicts=(first, samples.verdict("bf16"), second),
    )
    found = contenders(comparison)
    assert [one.label for one in found] == ["fp32", "fp32 (2)", "bf16", "fp32 (3)"]
    assert [one.verdict for one in found] == [None, first, samples.verdict("bf16"), second]


def test_a_missing_verdict_is_none() -> None:
    assert [one.verdict for one in contenders(samples.comparison(verdicts=()))] == [None, None, None]
