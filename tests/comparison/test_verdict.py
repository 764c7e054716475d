from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.comparison.parity import Parity
from halfstep.comparison.verdict import Evidence, conclude, expected_gain, explain, judge
from halfstep.hardware import StepProfile
from halfstep.records import Interval, LossParity, Verdict

FASTER = Interval(median=1.84, low=1.75, high=1.9)
EQUAL = Interval(median=1.01, low=0.97, high=1.05)
SLOWER = Interval(median=0.8, low=0.75, high=0.9)
FAR_SLOWER = Interval(median=0.1, low=0.09, high=0.11)

SAME = Parity(judgement="same", why="it differs by +0.01 on average, where fp32 itself varies by 0.2 from seed to seed")


def profile(**changes: Any) -> StepProfile:
    """A step that is spent in large matrix products."""
    values: dict[str, Any] = {
        "peak_bytes": 1 << 20,
        "lowered_share": 0.8,
        "cast_share": 0.05,
        "total_us": 1e5,
        "operations": 100,
        "mean_operation_us": 1000.0,
        "slowest": "mm",
        "slowest_share": 0.3,
    }
    return StepProfile(**(values | changes))


def evidence(**changes: Any) -> Evidence:
    values: dict[str, Any] = {"device": "cuda", "native": True, "gain": 4.0, "baseline": profile(), "profile": profile(), "note": ""}
    return Evidence(**(values | changes))


def reason(speedup: Interval | None, *, parity: Parity = SAME, memory_ratio: float | None = None, **changes: Any) -> str:
    return judge(
        precision="bf16", baseline="fp32", speedup=speedup, memory_ratio=memory_ratio, parity=parity, evidence=evidence(**changes)
    ).reason


class TestExplain:
    def test_fp32_needs_no_explanation(self) -> None:
        assert explain("fp32", speedup=EQUAL, evidence=evidence(native=False)) == ""

    @pytest.mark.parametrize(("device", "place"), [("cpu", "this CPU"), ("cuda", "this GPU")])
    @pytest.mark.parametrize("speedup", [None, SLOWER, EQUAL])
    def test_emulation(self, device: str, place: str, speedup: Interval | None) -> None:
        said = explain("fp16", speedup=speedup, evidence=evidence(native=False, device=device))
        assert said == f"{place} does not compute fp16 training in hardware, so torch emulates it"

    def test_the_operation_that_emulation_spends_its_time_in(self) -> None:
        slow = profile(slowest="mkldnn_convolution_backward", slowest_share=0.93)
        said = explain("fp16", speedup=SLOWER, evidence=evidence(native=False, profile=slow))
        assert said.endswith("emulates it; 93 % of the step goes into mkldnn_convolution_backward")

    def test_emulation_does_not_explain_a_gain(self) -> None:
        assert "emulates" not in explain("bf16", speedup=FASTER, evidence=evidence(native=False))

    @pytest.mark.parametrize("missing", [{"baseline": None}, {"gain": None}])
    def test_without_a_profile_or_a_gain_nothing_is_made_up(self, missing: dict[str, None]) -> None:
        assert explain("bf16", speedup=SLOWER, evidence=evidence(**missing)) == ""

    def test_without_a_speedup_nothing_is_explained(self) -> None:
        assert explain("bf16", speedup=None, evidence=evidence()) == ""

    @pytest.mark.parametrize(
        ("device", "mean_us", "small"), [("cpu", 29.0, True), ("cpu", 31.0, False), ("cuda", 14.0, True), ("cuda", 16.0, False)]
    )
    def test_small_operations(self, device: str, mean_us: float, small: bool) -> None:
        said = explain("bf16", speedup=SLOWER, evidence=evidence(device=device, baseline=profile(mean_operation_us=mean_us, operations=70)))
        assert ("their overhead counts more than their arithmetic" in said) == small
        assert said.startswith(f"the 70 operations of a step take {mean_us:.0f} µs on average") == small

    def test_small_operations_do_not_explain_a_gain(self) -> None:
        assert "overhead" not in explain("bf16", speedup=FASTER, evidence=evidence(baseline=profile(mean_operation_us=1.0)))

    def test_casts(self) -> None:
        assert (
            explain("bf16", speedup=SLOWER, evidence=evidence(profile=profile(cast_share=0.16)))
            == "casts between precisions take 16 % of its step"
        )
        assert explain("bf16", speedup=SLOWER, evidence=evidence(profile=profile(cast_share=0.15, slowest_share=0.1))) == ""
        assert "casts" not in explain("bf16", speedup=FASTER, evidence=evidence(profile=profile(cast_share=0.9)))

    def test_little_of_the_step_is_lowered(self) -> None:
        said = explain("bf16", speedup=EQUAL, evidence=evidence(baseline=profile(lowered_share=0.2)))
        assert said == (
            "only 20 % of the fp32 step is spent in operations that autocast lowers and this GPU multiplies bf16 matrices 4.0 times as "
            "fast as fp32 ones, so 1.2x is the most to expect"
        )

    def test_the_device_gains_little(self) -> None:
        said = explain("bf16", speedup=EQUAL, evidence=evidence(gain=1.2))
        assert said == (
            "80 % of the fp32 step is spent in operations that autocast lowers and this GPU multiplies bf16 matrices only 1.2 times as "
            "fast as fp32 ones, so 1.2x is the most to expect"
        )

    def test_the_device_gains_nothing(self) -> None:
        assert explain("bf16", speedup=SLOWER, evidence=evidence(gain=0.9)).endswith("so there is nothing to gain")

    def test_a_gain_within_what_can_be_expected(self) -> None:
        said = explain("bf16", speedup=FASTER, evidence=evidence())
        assert said == (
            "80 % of the fp32 step is spent in operations that autocast lowers, and this GPU multiplies bf16 matrices 4.0 times as "
            "fast as fp32 ones"
        )

    def test_a_gain_beyond_what_can_be_expected_is_not_explained_by_the_bound(self) -> None:
        said = explain("bf16", speedup=FASTER, evidence=evidence(gain=1.2))
        assert said == "80 % of the fp32 step is spent in operations that autocast lowers"
        assert explain("bf16", speedup=FASTER, evidence=evidence(baseline=profile(lowered_share=0.1))) == ""

    def test_one_slow_operation(self) -> None:
        slow = profile(slowest="_scaled_dot_product_flash_attention_for_cpu_backward", slowest_share=0.46)
        said = explain("bf16", speedup=EQUAL, evidence=evidence(profile=slow))
        assert said == "46 % of its step goes into _scaled_dot_product_flash_attention_for_cpu_backward alone"
        assert "alone" not in explain("bf16", speedup=FASTER, evidence=evidence(profile=slow))

    def test_what_nothing_measured_explains_has_no_explanation(self) -> None:
        assert explain("bf16", speedup=EQUAL, evidence=evidence(profile=profile(slowest_share=0.3))) == ""
        assert explain("bf16", speedup=EQUAL, evidence=evidence(profile=None)) == ""


class TestExpectedGain:
    @given(st.floats(0, 1), st.floats(1, 1e3))
    def test_it_lies_between_nothing_and_the_gain(self, share: float, gain: float) -> None:
        assert 1 - 1e-9 <= expected_gain(share=share, gain=gain) <= gain * (1 + 1e-9)

    @given(st.floats(0, 1), st.floats(0, 1), st.floats(1, 1e3))
    def test_a_larger_share_gains_no_less(self, share: float, other: float, gain: float) -> None:
        low, high = sorted([share, other])
        assert expected_gain(share=low, gain=gain) <= expected_gain(share=high, gain=gain) * (1 + 1e-9)

    @given(st.floats(0.01, 100))
    def test_no_share_gains_nothing_and_the_whole_gains_all(self, gain: float) -> None:
        assert expected_gain(share=0, gain=gain) == 1
        assert expected_gain(share=1, gain=gain) == pytest.approx(gain)


class TestJudge:
    def test_faster(self) -> None:
        assert reason(FASTER).startswith("bf16 is 1.84 times as fast as fp32 (95 % interval 1.75 to 1.90), because 80 %")

    def test_as_fast_as_can_be_told(self) -> None:
        said = "no difference in speed between bf16 and fp32 shows: 1.01 times as fast (95 % interval 0.97 to 1.05);"
        assert reason(EQUAL).startswith(said)

    def test_losses_that_are_all_those_of_fp32(self) -> None:
        said = explain("bf16", speedup=EQUAL, evidence=evidence(identical=True))
        assert said == "autocast lowers nothing that matters to the loss: each one is that of fp32, bit for bit"

    def test_skips_are_told(self) -> None:
        assert "; 3 of 42 steps were skipped; the loss is " in reason(EQUAL, skipped=3, steps=42)
        assert "skipped" not in reason(EQUAL, skipped=0, steps=42)

    @pytest.mark.parametrize(
        ("low", "high", "said"),
        [(1.0, 1.2, "no difference in speed"), (0.8, 1.0, "no difference in speed"), (1.01, 1.2, "is 1.10 times as fast")],
    )
    def test_an_interval_that_touches_one_proves_nothing(self, low: float, high: float, said: str) -> None:
        assert said in reason(Interval(median=1.1, low=low, high=high))

    def test_slower(self) -> None:
        assert reason(SLOWER).startswith("bf16 is slower than fp32: 0.80 times as fast (95 % interval 0.75 to 0.90)")

    def test_far_slower(self) -> None:
        assert reason(FAR_SLOWER).startswith("bf16 is 10 times slower than fp32 (95 % interval 0.09 to 0.11)")

    @pytest.mark.parametrize(
        ("rounds", "said"),
        [
            (1, "(a single pair of steps, 1.75 to 1.90)"),
            (5, "(range of only 5 pairs of steps, 1.75 to 1.90)"),
            (6, "(95 % interval 1.75 to 1.90)"),
            (None, "(95 % interval 1.75 to 1.90)"),
        ],
    )
    def test_too_few_rounds_are_no_95_percent(self, rounds: int | None, said: str) -> None:
        assert said in reason(FASTER, rounds=rounds)

    def test_memory(self) -> None:
        assert "; peak memory is 0.56 times that of fp32; " in reason(FASTER, memory_ratio=0.5625)
        assert "memory" not in reason(FASTER)

    @pytest.mark.parametrize(
        ("judgement", "words"), [("same", "the same"), ("better", "better"), ("worse", "worse"), ("inconclusive", "inconclusive")]
    )
    def test_the_loss(self, judgement: LossParity, words: str) -> None:
        verdict = judge(
            precision="bf16",
            baseline="fp32",
            speedup=FASTER,
            memory_ratio=0.5,
            parity=Parity(judgement=judgement, why="it is what it is"),
            evidence=evidence(),
        )
        assert verdict.loss_parity == judgement
        assert verdict.reason.endswith(f"; the loss is {words}: it is what it is.")
        assert (verdict.precision, verdict.baseline, verdict.speedup, verdict.memory_ratio) == ("bf16", "fp32", FASTER, 0.5)

    def test_not_measured(self) -> None:
        assert reason(None, gain=None).startswith("bf16 was not measured; the loss is")

    def test_stopped_before_it_was_measured(self) -> None:
        said = reason(None, native=False, gain=None, note="It was stopped after 10.1 s in one step; fp32 needs 1.2 s.")
        assert said.startswith(
            "bf16 was not measured (it was stopped after 10.1 s in one step; fp32 needs 1.2 s), because this GPU does not compute"
        )

    def test_stopped_after_some_steps(self) -> None:
        said = reason(FAR_SLOWER, native=False, gain=None, note="It ran 3 measured steps only, since each takes 10 times as long.")
        assert "(95 % interval 0.09 to 0.11) (it ran 3 measured steps only, since each takes 10 times as long), because" in said

    def test_an_error_is_not_blamed_on_emulation(self) -> None:
        said = reason(
            None, native=False, gain=None, failed=True, note="bf16 failed in step 1: RuntimeError: no kernel (task.py:3, in loss)"
        )
        assert said.startswith(
            "bf16 did not run to the end (bf16 failed in step 1: RuntimeError: no kernel (task.py:3, in loss)); the loss is"
        )
        assert "emulates" not in said

    @pytest.mark.parametrize(
        ("note", "clause"), [("OutOfMemoryError came.", "OutOfMemoryError came"), ("The end.", "the end"), ("Over", "over")]
    )
    def test_a_name_at_the_start_of_a_note_keeps_its_capitals(self, note: str, clause: str) -> None:
        assert f"({clause})" in reason(None, failed=True, note=note)


intervals = (
    st.lists(st.floats(0.01, 50), min_size=3, max_size=3).map(sorted).map(lambda ends: Interval(low=ends[0], median=ends[1], high=ends[2]))
)
shares = st.floats(0, 1)
profiles = st.builds(
    profile,
    lowered_share=shares,
    cast_share=shares,
    slowest_share=shares,
    mean_operation_us=st.floats(0.1, 1e4),
    operations=st.integers(1, 5000),
)


@given(
    st.none() | intervals,
    st.none() | st.floats(0.01, 10),
    st.builds(
        Evidence,
        device=st.sampled_from(["cpu", "cuda"]),
        native=st.booleans(),
        gain=st.none() | st.floats(0.05, 30),
        baseline=st.none() | profiles,
        profile=st.none() | profiles,
        note=st.sampled_from(["", "It was stopped.", "The factory 'task' failed with seed 0: ValueError: no message"]),
        failed=st.booleans(),
        rounds=st.none() | st.integers(1, 40),
    ),
    st.sampled_from(["same", "better", "worse", "inconclusive"]),
)
def test_every_reason_is_one_clean_sentence(
    speedup: Interval | None, memory_ratio: float | None, found: Evidence, judgement: LossParity
) -> None:
    parity = Parity(judgement=judgement, why=SAME.why)
    said = judge(precision="fp16", baseline="fp32", speedup=speedup, memory_ratio=memory_ratio, parity=parity, evidence=found).reason
    assert said.endswith(".")
    assert not re.search(r"  |\.\.|\bnan\b|\binf\b|None|\( | \)|\(\)|,,|;;| ,| ;|\.;|\.\)", said), said
    assert said.count("(") == said.count(")")


def verdict(precision: str, speedup: Interval | None, parity: LossParity, memory_ratio: float | None = 1.0) -> Verdict:
    return Verdict(
        precision=precision,
        baseline="fp32",
        speedup=speedup,
        memory_ratio=memory_ratio,
        loss_parity=parity,
        reason=f"{precision}'s reason.",
    )


def concluded(*verdicts: Verdict, whys: tuple[str, ...] = ()) -> str:
    return conclude(verdicts, whys=whys or ("it is native",) * len(verdicts), baseline="fp32")


class TestConclude:
    def test_nothing_was_compared(self) -> None:
        assert concluded() == "Nothing was compared with fp32."

    @pytest.mark.parametrize("parity", ["same", "inconclusive"])
    def test_the_baseline_with_itself(self, parity: LossParity) -> None:
        assert concluded(verdict("fp32", EQUAL, parity)) == "fp32 was compared with itself: fp32's reason."

    @pytest.mark.parametrize(("parity", "loss"), [("same", "the same loss"), ("better", "a better loss")])
    def test_the_fastest_that_trains_as_well_is_used(self, parity: LossParity, loss: str) -> None:
        faster_yet = Interval(median=2.5, low=2.0, high=3.0)
        verdicts = (verdict("bf16", FASTER, parity), verdict("fp16", faster_yet, parity, 0.7))
        expected = f"Use fp16: it reaches {loss} 2.5 times as fast as fp32 in 0.70 times the memory, because of fp16."
        assert concluded(*verdicts, whys=("of bf16", "of fp16")) == expected
        assert concluded(*verdicts[::-1], whys=("of fp16", "of bf16")) == expected

    def test_what_is_not_known_is_not_said(self) -> None:
        said = concluded(verdict("bf16", FASTER, "same", None), whys=("",))
        assert said == "Use bf16: it reaches the same loss 1.8 times as fast as fp32."

    def test_a_small_gain_is_not_rounded_away(self) -> None:
        slightly = Interval(median=1.03, low=1.01, high=1.05)
        assert " 1.03 times as fast" in concluded(verdict("bf16", slightly, "same"))

    @pytest.mark.parametrize("parity", ["worse", "inconclusive"])
    def test_a_slower_one_that_is_sound_beats_a_faster_one_that_is_not(self, parity: LossParity) -> None:
        faster_yet = Interval(median=2.5, low=2.0, high=3.0)
        assert concluded(verdict("bf16", FASTER, "same"), verdict("fp16", faster_yet, parity)).startswith("Use bf16: ")

    def test_what_is_faster_but_not_proven(self) -> None:
        faster_yet = Interval(median=2.5, low=2.0, high=3.0)
        said = concluded(verdict("fp16", faster_yet, "worse"), verdict("bf16", FASTER, "inconclusive"))
        assert said == "bf16 looks promising, but is not proven; run more steps or seeds: bf16's reason."

    @pytest.mark.parametrize(
        ("speedup", "ratio", "parity", "used"),
        [
            (EQUAL, 0.9, "same", True),
            (EQUAL, 0.96, "same", False),
            (SLOWER, 0.5, "same", False),
            (EQUAL, 0.5, "worse", False),
            (None, 0.5, "same", False),
            (EQUAL, None, "same", False),
        ],
    )
    def test_what_saves_memory(self, speedup: Interval | None, ratio: float | None, parity: LossParity, used: bool) -> None:
        said = concluded(verdict("bf16", speedup, parity, ratio), whys=("its operations are small",))
        saves = (
            "Use bf16 for its memory, not for its speed: it reaches the same loss in 0.90 times the memory, "
            "but is no faster than fp32, because its operations are small."
        )
        assert said == (saves if used else "Stay with fp32: bf16's reason.")

    def test_what_trains_worse_is_the_reason_to_stay(self) -> None:
        assert concluded(verdict("bf16", EQUAL, "same"), verdict("fp16", FASTER, "worse")) == "Stay with fp32: fp16's reason."

    def test_a_second_run_of_the_baseline_is_not_recommended(self) -> None:
        assert concluded(verdict("fp32", FASTER, "same"), verdict("bf16", SLOWER, "same")) == "Stay with fp32: bf16's reason."
