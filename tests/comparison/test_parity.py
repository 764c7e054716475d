from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.comparison.parity import final_loss, first_loss, judge_losses

NAN, INF = float("nan"), float("inf")

# Three seeds that learn from 4 to about 1, and end a quarter apart.
BASELINE = [[4.0, 2.0, 1.0], [4.0, 2.0, 1.125], [4.0, 2.0, 1.25]]


def shifted(*by: float) -> list[list[float]]:
    """The baseline with another end for each seed."""
    return [[*seed[:-1], seed[-1] + shift] for seed, shift in zip(BASELINE, by, strict=True)]


class TestJudgement:
    def test_identical_losses_are_the_same(self) -> None:
        parity = judge_losses(BASELINE, [tuple(seed) for seed in BASELINE])
        assert (parity.judgement, parity.why) == ("same", "every loss is identical, bit for bit")

    def test_within_the_spread_is_the_same(self) -> None:
        parity = judge_losses(BASELINE, shifted(0.125, 0.0625, 0.125))
        assert parity.judgement == "same"
        assert parity.why == "it differs by +0.1 on average, where fp32 itself varies by 0.25 from seed to seed"

    @pytest.mark.parametrize(
        ("shift", "judgement"),
        [
            (0.125, "same"),
            (0.1250001, "inconclusive"),
            (0.25, "inconclusive"),
            (0.2500001, "worse"),
            (-0.125, "same"),
            (-0.1250001, "inconclusive"),
            (-0.25, "inconclusive"),
            (-0.2500001, "better"),
        ],
    )
    def test_half_the_spread_and_the_spread_are_the_boundaries(self, shift: float, judgement: str) -> None:
        assert judge_losses(BASELINE, shifted(shift, shift, shift)).judgement == judgement

    def test_within_the_spread_seeds_that_disagree_are_the_same(self) -> None:
        assert judge_losses(BASELINE, shifted(0.375, 0.375, -0.125)).judgement == "same"

    @pytest.mark.parametrize(("sign", "direction"), [(1, "higher"), (-1, "lower")])
    def test_one_direction_for_all_seeds_is_said(self, sign: int, direction: str) -> None:
        parity = judge_losses(BASELINE, shifted(sign * 0.25, sign * 0.125, sign * 0.1875))
        assert parity.why.startswith(f"it is {direction} for every seed, by ")
        assert parity.why.endswith("; run more seeds")

    def test_the_reason_names_the_direction(self) -> None:
        assert judge_losses(BASELINE, shifted(1.0, 1.0, 1.0)).why.startswith("it is higher by +1 on average")
        assert judge_losses(BASELINE, shifted(-0.5, -0.5, -0.5)).why.startswith("it is lower by -0.5 on average")

    def test_seeds_that_disagree_on_the_direction_prove_nothing(self) -> None:
        parity = judge_losses(BASELINE, shifted(3.0, 3.0, -0.125))
        assert parity.judgement == "inconclusive"
        assert parity.why.endswith("but not in the same direction for all seeds")

    @pytest.mark.parametrize(("shift", "judgement"), [(0.0399, "same"), (0.0401, "worse"), (-0.0399, "same"), (-0.0401, "better")])
    def test_a_hundredth_of_what_was_learned_is_negligible(self, shift: float, judgement: str) -> None:
        # 1 % of the 4 that were learned is 0.04; the seeds themselves are closer together than that.
        baseline = [[5.0, 1.0], [5.0, 1.0 + 2**-20]]
        assert judge_losses(baseline, [[5.0, seed[1] + shift] for seed in baseline]).judgement == judgement

    def test_a_spread_that_hides_everything_is_said(self) -> None:
        parity = judge_losses([[2.0, 1.0], [2.0, 2.0]], [[2.0, 1.0], [2.0, 2.125]])
        assert parity.judgement == "inconclusive"
        assert parity.why == "fp32 itself varies by 1 from seed to seed and learned only 0.5; run more steps"

    def test_a_spread_of_half_of_what_was_learned_is_just_enough(self) -> None:
        # Learned 2 - 1.5 = 0.5 on average; the ends are 0.25 apart.
        assert judge_losses([[2.0, 1.375], [2.0, 1.625]], [[2.0, 1.375], [2.0, 1.75]]).judgement == "same"

    def test_a_baseline_that_does_not_learn_proves_nothing(self) -> None:
        parity = judge_losses([[2.0, 2.0], [2.0, 2.5]], [[2.0, 2.0], [2.0, 2.25]])
        assert parity.judgement == "inconclusive"
        assert "learned only 0; run more steps" in parity.why

    def test_what_breaks_beside_a_baseline_that_does_not_learn_is_worse(self) -> None:
        assert judge_losses([[2.0, 2.0], [2.0, 2.5]], [[2.0, 90.0], [2.0, 95.0]]).judgement == "worse"

    @pytest.mark.parametrize("shift", [0.0, 0.5, -0.5, 100.0])
    def test_one_seed_shows_no_spread(self, shift: float) -> None:
        parity = judge_losses([[2.0, 1.5, 1.0]], [[2.0, 1.25, 1.0 + shift]])
        assert parity.judgement == "inconclusive"
        assert parity.why == f"it differs by {shift:+.2g}, and one seed shows no spread to judge that by"


class TestFactoryThatIgnoresItsSeed:
    LOSSES = ([4.0, 2.0], [4.0, 2.0], [4.0, 2.0])

    @pytest.mark.parametrize("shift", [0.5, 1.0, -1.0])
    def test_a_difference_cannot_be_judged(self, shift: float) -> None:
        parity = judge_losses(self.LOSSES, [[4.0, 2.0 + shift]] * 3)
        assert parity.judgement == "inconclusive"
        assert "let the factory use its seed" in parity.why

    def test_a_negligible_difference_is_the_same(self) -> None:
        assert judge_losses(self.LOSSES, [[4.0, 2.015625]] * 3).judgement == "same"

    @pytest.mark.parametrize(("shift", "judgement"), [(1.25, "worse"), (-1.25, "better")])
    def test_a_disaster_is_seen_all_the_same(self, shift: float, judgement: str) -> None:
        assert judge_losses(self.LOSSES, [[4.0, 2.0 + shift]] * 3).judgement == judgement

    def test_nothing_learned_and_nothing_varied_proves_nothing(self) -> None:
        assert judge_losses([[2.0, 2.0]] * 2, [[2.0, 2.0 + 2**-20]] * 2).judgement == "inconclusive"


class TestLossesThatAreNotFinite:
    @pytest.mark.parametrize("broken", [NAN, INF, -INF])
    def test_in_the_precision_alone_it_is_worse(self, broken: float) -> None:
        parity = judge_losses(BASELINE, shifted(0.0, broken, broken))
        assert (parity.judgement, parity.why) == ("worse", "it is not finite at the end, for 2 of 3 seeds")

    def test_one_seed_is_enough_to_see_that(self) -> None:
        assert judge_losses([[2.0, 1.0]], [[2.0, NAN]]).judgement == "worse"

    @pytest.mark.parametrize("broken", [NAN, INF, -INF])
    def test_in_the_baseline_nothing_can_be_said(self, broken: float) -> None:
        parity = judge_losses(shifted(0.0, broken, 0.0), BASELINE)
        assert (parity.judgement, parity.why) == ("inconclusive", "the baseline itself ends with a loss that is not finite")

    def test_at_the_beginning_of_the_baseline_what_it_learned_is_unknown(self) -> None:
        parity = judge_losses([[INF, 1.0], [2.0, 1.1]], [[INF, 1.0], [2.0, 90.0]])
        assert (parity.judgement, parity.why) == ("inconclusive", "the baseline itself begins with a loss that is not finite")

    def test_in_the_middle_they_do_not_matter(self) -> None:
        assert judge_losses(BASELINE, [[4.0, NAN, seed[-1] + 0.0625] for seed in BASELINE]).judgement == "same"

    def test_infinities_of_both_signs_are_no_error(self) -> None:
        # The last fifth of ten steps is two, and their mean is neither infinity.
        broken = [[1.0] * 8 + [INF, -INF]] * 2
        assert judge_losses([[1.0] * 10] * 2, broken).judgement == "worse"
        assert math.isnan(final_loss(broken) or 0.0)
        assert math.isnan(first_loss([[INF], [-INF]]) or 0.0)


class TestIncompleteRuns:
    @pytest.mark.parametrize(
        "other",
        [[], [[]], [[4.0, 2.0, 1.0]], [[4.0, 2.0, 1.0], [4.0, 2.0, 1.125], [4.0, 2.0]], [[4.0, 2.0, 1.0]] * 4],
    )
    def test_not_all_steps_prove_nothing(self, other: list[list[float]]) -> None:
        parity = judge_losses(BASELINE, other)
        assert (parity.judgement, parity.why) == ("inconclusive", "it did not run all steps")

    @pytest.mark.parametrize("nothing", [[], [[]], [[], [1.0]]])
    def test_no_losses_on_either_side_are_not_identical_losses(self, nothing: list[list[float]]) -> None:
        assert judge_losses(nothing, nothing).judgement == "inconclusive"


class TestFinalLoss:
    def test_it_is_the_mean_of_the_last_fifth(self) -> None:
        assert final_loss([[9.0] * 12 + [1.0, 2.0, 3.0]]) == 2.0

    @pytest.mark.parametrize("steps", range(1, 10))
    def test_of_few_steps_the_last_one_counts(self, steps: int) -> None:
        assert final_loss([[9.0] * (steps - 1) + [1.0]]) == 1.0

    def test_a_seed_that_was_cut_short_does_not_count(self) -> None:
        assert final_loss([[4.0, 2.0, 1.0], [4.0, 2.0, 2.0], [4.0]]) == 1.5

    def test_nothing_ran(self) -> None:
        assert final_loss([]) is None
        assert final_loss([[]]) is None
        assert first_loss([]) is None
        assert first_loss([[]]) is None

    def test_the_first_loss_is_the_mean_over_seeds(self) -> None:
        assert first_loss([[1.0, 8.0], [2.0]]) == 1.5


losses = st.lists(st.lists(st.floats(), max_size=12), max_size=4)
MIRROR = {"worse": "better", "better": "worse", "same": "same", "inconclusive": "inconclusive"}


@given(losses, losses)
def test_judging_never_raises(baseline: list[list[float]], other: list[list[float]]) -> None:
    assert judge_losses(baseline, other).judgement in MIRROR
    final_loss(baseline)
    first_loss(baseline)


# Whole numbers and steps too few for a mean: nothing is rounded, so a difference and its mirror image are exactly that.
@given(st.lists(st.tuples(*[st.integers(-64, 64)] * 3), min_size=1, max_size=4))
def test_what_is_better_one_way_is_worse_the_other_way(seeds: list[tuple[int, int, int]]) -> None:
    baseline = [[float(first), float(last)] for first, last, _ in seeds]
    up = [[float(first), float(last + by)] for first, last, by in seeds]
    down = [[float(first), float(last - by)] for first, last, by in seeds]
    assert judge_losses(baseline, down).judgement == MIRROR[judge_losses(baseline, up).judgement]
