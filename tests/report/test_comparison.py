# ruff: noqa: RUF001
from __future__ import annotations

import math
import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from halfstep.records import Comparison, Interval, LossParity
from halfstep.report import Card, Document, Section, comparison_document, print_document, render_html
from tests import samples


def section(document: Document, title: str) -> Section:
    return next(one for one in document.sections if one.title == title)


def summary(comparison: Comparison) -> dict[str, tuple[str, ...]]:
    (table,) = section(comparison_document(comparison), "Summary").tables
    return {row[0]: row[1:] for row in table.rows}


def cards(comparison: Comparison) -> tuple[Card, ...]:
    return section(comparison_document(comparison), "Verdicts").cards


def test_the_sections_go_from_the_verdict_to_the_circumstances() -> None:
    document = comparison_document(samples.comparison())
    assert [one.title for one in document.sections] == [
        "Verdicts",
        "Summary",
        "Loss",
        "Step time",
        "Peak memory",
        "Machine and settings",
    ]
    assert document.title == "examples/digits.py:task"
    assert document.conclusion.startswith("Train in bf16")
    assert document.subtitle == "fp32 vs bf16 vs fp16 · NVIDIA H200 · 3 seeds of 60 measured steps"
    assert document.notices == ()


def test_the_summary_shows_what_was_measured() -> None:
    fp32 = samples.run(
        "fp32",
        step_time_ms=Interval(median=41.616, low=41.49, high=41.9),
        samples_per_s=1537.9,
        peak_memory_mib=943.6,
        first_loss=2.3251,
        final_loss=0.42701,
    )
    fp16 = samples.run("fp16", step_time_ms=Interval(median=22.36, low=22.27, high=22.444), peak_memory_mib=471.8, final_scale=16777216.0)
    verdict = samples.verdict("fp16", speedup=Interval(median=1.861, low=1.85, high=1.879), memory_ratio=0.5, loss_parity="worse")
    rows = summary(samples.comparison(runs=(fp32, fp16), verdicts=(verdict,)))
    assert rows["Step time (ms)"] == ("41.62", "22.36")
    assert rows["95 % of step time"] == ("[41.49, 41.90]", "[22.27, 22.44]")
    assert rows["Samples/s"][0] == "1538"
    assert rows["Speed-up"] == ("baseline", "1.86×")
    assert rows["95 % of speed-up"] == ("–", "[1.85, 1.88]")
    assert rows["Peak memory (MiB)"] == ("943.6", "471.8")
    assert rows["Peak memory ratio"] == ("baseline", "0.500×")
    assert rows["First loss"][0] == "2.325"
    assert rows["Final loss"][0] == "0.4270"
    assert rows["Loss parity"] == ("baseline", "worse")
    assert rows["Skipped steps"] == ("0", "7")
    assert rows["Final scale"] == ("–", "16777216")
    assert rows["Measured steps"] == ("180", "180")


@pytest.mark.parametrize(("factor", "row", "text"), [(0.001, "Step time (µs)", "41.6"), (100.0, "Step time (s)", "4.16")])
def test_step_times_choose_their_unit(factor: float, row: str, text: str) -> None:
    runs = tuple(
        samples.run(precision, step_time_ms=Interval(median=41.6 * factor, low=41 * factor, high=42 * factor))
        for precision in ("fp32", "bf16")
    )
    assert summary(samples.comparison(runs=runs))[row][0].startswith(text)


def test_large_memories_are_shown_in_gib() -> None:
    runs = (samples.run("fp32", peak_memory_mib=20480.0), samples.run("bf16", peak_memory_mib=10240.0))
    comparison = samples.comparison(runs=runs, verdicts=(samples.verdict("bf16", memory_ratio=0.5),))
    assert summary(comparison)["Peak memory (GiB)"] == ("20.00", "10.00")
    assert cards(comparison)[0].facts[1].detail == "10.00 of 20.00 GiB"


def test_what_was_not_measured_is_an_en_dash_and_its_reason_is_given() -> None:
    comparison = samples.emulated_comparison()
    rows = summary(comparison)
    missing = {name for name, texts in rows.items() if texts[2] == "–"}
    assert missing == set(rows) - {"Loss parity", "Skipped steps", "Measured steps"}
    assert [fact.value for fact in cards(comparison)[1].facts] == ["–", "–", "inconclusive"]
    (note,) = section(comparison_document(comparison), "Incomplete runs").items
    assert note.label == "fp16"
    assert "48 times as long" in note.text


def test_numbers_that_are_not_finite_are_named() -> None:
    broken = samples.run(
        "fp16",
        step_time_ms=Interval(median=math.nan, low=math.nan, high=math.inf),
        samples_per_s=math.inf,
        peak_memory_mib=math.nan,
        first_loss=math.inf,
        final_loss=math.nan,
        final_scale=math.nan,
        losses=((2.0, math.nan), (math.inf, -math.inf), ()),
        skipped_at=((2, 99), (1,), ()),
        step_times_ms=(math.nan,),
    )
    verdict = samples.verdict("fp16", speedup=Interval(median=math.nan, low=math.nan, high=math.nan), memory_ratio=math.nan)
    rows = summary(samples.comparison(runs=(samples.run("fp32"), broken), verdicts=(verdict,)))
    assert rows["95 % of step time"][1] == "[NaN, inf]"
    for row, text in {"Samples/s": "inf", "First loss": "inf", "Final loss": "NaN", "Final scale": "NaN", "Speed-up": "NaN×"}.items():
        assert rows[row][1] in {text, text.removesuffix("×")}


def test_nothing_at_all_still_makes_a_document() -> None:
    document = comparison_document(samples.comparison(runs=(), verdicts=(), interrupted=True))
    assert [one.title for one in document.sections] == ["Machine and settings"]
    assert document.subtitle == "NVIDIA H200 · 3 seeds of 60 measured steps"
    only = comparison_document(samples.comparison(runs=(samples.stopped_run("fp16"),), verdicts=()))
    assert [one.title for one in only.sections] == ["Summary", "Incomplete runs", "Machine and settings"]


def test_an_interruption_is_said_with_what_was_done() -> None:
    runs = (samples.run("fp32", steps=70), samples.run("bf16", steps=69))
    (notice,) = comparison_document(samples.comparison(runs=runs, interrupted=True)).notices
    assert "interrupted before all steps had run" in notice
    assert "Of 180 planned steps, these were measured: 70 in fp32, 69 in bf16." in notice


def test_the_same_precision_twice_is_told_apart_everywhere() -> None:
    comparison = samples.comparison(runs=(samples.run("fp32"), samples.run("fp32")), verdicts=(samples.verdict("fp32"),))
    document = comparison_document(comparison)
    (table,) = section(document, "Summary").tables
    assert [column.header for column in table.columns] == ["Metric", "fp32", "fp32 (2)"]
    assert [card.title for card in cards(comparison)] == ["fp32 (2)"]
    for name in ("Step time", "Peak memory"):
        (figure,) = section(document, name).figures
        assert "fp32 (2)" in {one.name for one in figure.series} | {str(x) for one in figure.series for x in one.x}


def test_the_memory_source_is_stated_once() -> None:
    def caption(comparison: Comparison) -> str:
        return section(comparison_document(comparison), "Summary").tables[0].caption

    assert "what CUDA's allocator handed out during one step" in caption(samples.comparison())
    assert "tensors during one step" in caption(samples.emulated_comparison())
    mixed = (samples.run("fp32"), samples.run("bf16", memory_source="tracked_tensors"))
    assert "cannot be compared" in caption(samples.comparison(runs=mixed))


@pytest.mark.parametrize(
    ("low", "high", "tone"),
    [(1.01, 1.2, "good"), (0.8, 0.99, "bad"), (0.95, 1.3, "neutral"), (0.7, 1.05, "neutral"), (math.nan, math.nan, "neutral")],
)
def test_a_speedup_is_good_news_only_when_its_whole_interval_is(low: float, high: float, tone: str) -> None:
    verdict = samples.verdict("bf16", speedup=Interval(median=(low + high) / 2, low=low, high=high))
    assert cards(samples.comparison(verdicts=(verdict,)))[0].facts[0].tone == tone


@pytest.mark.parametrize(("ratio", "tone"), [(0.7, "good"), (1.3, "bad"), (0.99, "neutral"), (1.01, "neutral"), (math.nan, "neutral")])
def test_memory_is_good_news_when_there_is_clearly_less(ratio: float, tone: str) -> None:
    assert cards(samples.comparison(verdicts=(samples.verdict("bf16", memory_ratio=ratio),)))[0].facts[1].tone == tone


@pytest.mark.parametrize(("parity", "tone"), [("same", "good"), ("better", "good"), ("worse", "bad"), ("inconclusive", "neutral")])
def test_loss_parity_has_a_tone(parity: LossParity, tone: str) -> None:
    fact = cards(samples.comparison(verdicts=(samples.verdict("bf16", loss_parity=parity),)))[0].facts[2]
    assert (fact.value, fact.tone) == (parity, tone)


def test_each_verdict_gives_its_reason() -> None:
    assert [card.text for card in cards(samples.comparison())] == [samples.verdict("bf16").reason, samples.verdict("fp16").reason]


def test_the_machine_and_the_settings_are_written_down() -> None:
    comparison = samples.comparison(settings=samples.settings(batch_size=None, seeds=(7,), steps=1))
    rows = {row[0]: row[1] for row in section(comparison_document(comparison), "Machine and settings").tables[0].rows}
    assert rows["Device"] == "NVIDIA H200 (cuda)"
    assert rows["Precisions in hardware"] == "fp32, bf16, fp16"
    assert rows["Seeds"] == "7"
    assert rows["Batch size"] == "–"
    assert (rows["Channels last"], rows["torch.compile"]) == ("yes", "no")
    assert comparison_document(comparison).subtitle.endswith("1 seed of 1 measured step")


def test_a_record_that_came_back_from_json_gives_the_same_document() -> None:
    comparison = replace(samples.emulated_comparison(), interrupted=True)
    assert comparison_document(Comparison.from_json(comparison.to_json())) == comparison_document(comparison)


@pytest.mark.parametrize(("steps", "label"), [(5, "Range"), (6, "95 %")])
def test_too_few_steps_have_a_range_and_no_interval(steps: int, label: str) -> None:
    sample = samples.comparison()
    sample = replace(sample, runs=tuple(replace(run, steps=steps) for run in sample.runs))
    assert {f"{label} of step time", f"{label} of speed-up"} <= set(summary(sample))
    cards = section(comparison_document(sample), "Verdicts").cards
    assert all(card.facts[0].detail.startswith(f"{label}: ") for card in cards)


class TestRehearsal:
    def test_time_and_memory_are_left_out(self) -> None:
        document = comparison_document(samples.rehearsed_comparison())
        assert [one.title for one in document.sections] == ["Verdicts", "Summary", "Loss", "Machine and settings"]
        assert list(summary(samples.rehearsed_comparison())) == [
            "First loss",
            "Final loss",
            "Loss parity",
            "Skipped steps",
            "Final scale",
            "Steps",
        ]
        assert [[(fact.label, fact.detail) for fact in card.facts][1:] for card in cards(samples.rehearsed_comparison())] == [
            [("Skipped steps", "of 195")]
        ] * 2
        assert [[fact.value for fact in card.facts] for card in cards(samples.rehearsed_comparison())] == [["same", "0"], ["same", "7"]]

    def test_every_step_counts(self) -> None:
        assert summary(samples.rehearsed_comparison())["Steps"] == ("195", "195", "195")

    def test_it_is_said_what_was_rehearsed_and_where(self) -> None:
        comparison = samples.rehearsed_comparison()
        document = comparison_document(comparison)
        assert document.subtitle == ("fp32 vs bf16 vs fp16 · cuda, rehearsed on Intel(R) Xeon(R) Platinum 8481C · 3 seeds of 65 steps")
        (table,) = section(document, "Summary").tables
        assert table.caption == "The numerics of cuda were rehearsed on a CPU; time and memory were not measured."
        rows = {row[0]: row[1] for row in section(document, "Machine and settings").tables[0].rows}
        assert rows["Target, rehearsed"] == "cuda"
        assert rows["Device"] == "Intel(R) Xeon(R) Platinum 8481C (cpu)"
        assert (rows["Steps of each seed"], rows["Warm-up steps among those"]) == ("65", "5")
        assert not any("Measured" in row for row in rows)

    def test_an_interruption_counts_the_steps_that_ran(self) -> None:
        (notice,) = comparison_document(samples.rehearsed_comparison(interrupted=True)).notices
        assert "Of 195 planned steps, these were run: 195 in fp32, 195 in bf16, 195 in fp16." in notice

    @pytest.mark.parametrize("interrupted", [False, True])
    def test_neither_the_terminal_nor_the_page_speaks_of_speed(self, interrupted: bool) -> None:
        document = comparison_document(samples.rehearsed_comparison(interrupted=interrupted))
        out = StringIO()
        print_document(document, Console(file=out, width=120))
        page = re.sub(r"<(script|style).*?</\1>", "", render_html(document), flags=re.DOTALL)
        for shown in (out.getvalue(), page):
            assert "on cuda (rehearsed on this CPU); time and memory were not measured" in " ".join(shown.split())
            assert not re.search(r"slow|fast|emulat|speed|step time|samples/s|peak memory|measured steps", shown, flags=re.IGNORECASE)

    def test_a_comparison_without_a_target_says_nothing_of_one(self) -> None:
        rows = [row[0] for row in section(comparison_document(samples.comparison()), "Machine and settings").tables[0].rows]
        assert "Target, rehearsed" not in rows
        assert rows.count("Warm-up steps before those") == 1
