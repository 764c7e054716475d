# ruff: noqa: RUF001
"""A diagnosis as a document."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from rich.console import Console

from halfstep.records import CAUSES, UNKNOWN, Cause, Diagnosis, NonFiniteTensor, OpRecord, StuckTensor, VanishedGradients
from halfstep.report import Document, Excerpt, Section, Table, diagnosis_document, print_document, render_html
from tests.audit.samples import op_record, overflow, site
from tests.diagnosis_strategies import diagnoses
from tests.report import diagnosis_samples as samples

ATTACK = "</script><img src=x onerror=alert(1)>"


def section(document: Document, title: str) -> Section:
    return next(one for one in document.sections if one.title == title)


def titles(document: Document) -> list[str]:
    return [one.title for one in document.sections]


def table(document: Document, title: str) -> Table:
    (only,) = section(document, title).tables
    return only


def facts(document: Document) -> dict[str, tuple[str, str, str]]:
    (card,) = section(document, "What happened").cards
    return {fact.label: (fact.value, fact.detail, fact.tone) for fact in card.facts}


def places(document: Document) -> dict[str, str]:
    return {item.label: item.text for item in section(document, "Where").items}


def values(origin: OpRecord) -> str:
    return places(diagnosis_document(samples.diagnosis(origin=origin)))["Values"]


def printed(document: Document, **options: Any) -> str:
    out = io.StringIO()
    print_document(document, Console(file=out, **options))
    return out.getvalue()


class TestOrder:
    def test_a_page_answers_what_where_why_what_to_do_and_how_it_is_known(self) -> None:
        document = diagnosis_document(samples.full_diagnosis())
        assert (document.kind, document.title) == ("Diagnosis", "examples/digits.py:task")
        assert document.subtitle == "fp16 · cuda, rehearsed on a CPU · torch 2.13.0"
        assert titles(document) == ["What happened", "Where", "Why", "What to do", "Proof"]
        assert document.notices == ()

    def test_a_terminal_tells_the_story_in_its_order_and_ends_with_the_conclusion(self) -> None:
        document = diagnosis_document(samples.full_diagnosis())
        shown = printed(document).splitlines()
        order = [shown.index(title) for title in ("Proof", "What happened", "Where", "Why", "What to do", document.conclusion)]
        assert order == sorted(order)

    def test_where_nothing_is_known_nothing_stands(self) -> None:
        document = diagnosis_document(samples.diagnosis("healthy", target="", device="cuda:1"))
        assert titles(document) == ["What happened"]
        assert document.subtitle == "fp16 · cuda:1 · torch 2.13.0"

    def test_interrupted(self) -> None:
        document = diagnosis_document(samples.diagnosis("healthy", interrupted=True))
        assert document.conclusion == "Interrupted in step 100: nothing was found by then."
        assert [notice.partition(":")[0] for notice in document.notices] == ["The diagnosis was interrupted"]
        assert "interrupted" in printed(document)


class TestWhatHappened:
    def test_the_step_in_numbers(self) -> None:
        document = diagnosis_document(samples.diagnosis("forward", steps=9, step=9, skips=2))
        assert [card.title for card in section(document, "What happened").cards] == ["Step 9"]
        assert facts(document) == {
            "Loss": ("NaN", "", "bad"),
            "Loss scale": ("65536", "", "neutral"),
            "Skipped steps": ("2", "of 9 trained", "bad"),
        }

    def test_nothing_bad_is_no_bad_news(self) -> None:
        document = diagnosis_document(samples.diagnosis("healthy", loss=2.25, skips=2))
        assert {tone for _, _, tone in facts(document).values()} == {"neutral"}
        assert facts(document)["Loss"][0] == "2.250"
        assert facts(diagnosis_document(samples.diagnosis("update")))["Skipped steps"] == ("0", "of 5 trained", "neutral")

    def test_no_loss(self) -> None:
        assert facts(diagnosis_document(samples.diagnosis(loss=None)))["Loss"] == ("–", "", "neutral")

    @pytest.mark.parametrize(
        ("cause", "detail"), [("scale", "with 1024 the step is clean"), ("underflow", "with 4096 gradients do not vanish"), ("forward", "")]
    )
    def test_another_scale_that_helps(self, cause: Cause, detail: str) -> None:
        assert facts(diagnosis_document(samples.diagnosis(cause)))["Loss scale"][1] == detail


class TestWhere:
    def test_the_origin(self) -> None:
        assert places(diagnosis_document(samples.full_diagnosis())) == {
            "Operation": "aten.mm.default, in the forward pass",
            "Module": "head",
            "Line": "train.py:12",
            "Formats": "fp16, fp16 → fp16",
            "Values": "2 infinite of 8, computed from finite values; the largest is 102400 before it is rounded; fp16 ends at 65504",
            "First NaN": "later: aten._softmax.default in the forward pass of head (train.py:14) makes 8 of 8 values NaN out of infinite "
            "ones",
        }

    def test_the_origin_of_a_backward_pass(self) -> None:
        found = places(diagnosis_document(samples.diagnosis("backward")))
        assert found["Operation"] == "aten.mm.default, in the backward pass, by AddmmBackward0"
        assert found["Line"] == "train.py:12, where its forward operation is called"
        assert "First NaN" not in found

    def test_an_unknown_place(self) -> None:
        origin = overflow(site=site(UNKNOWN, file=UNKNOWN, line=0), input_dtypes=(), output_dtypes=("int64",))
        found = places(diagnosis_document(samples.diagnosis(origin=origin)))
        assert "Line" not in found
        assert (found["Module"], found["Formats"]) == ("unknown", "– → int64")
        root = samples.diagnosis(origin=overflow(site=site("")))
        assert places(diagnosis_document(root))["Module"] == "(the model)"

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            (
                {"nonfinite": 5, "nans": 2, "exact_absmax": math.inf},
                "3 infinite and 2 NaN of 8, computed from finite values; fp16 ends at 65504",
            ),
            (
                {"nans": 2, "has_nonfinite_input": True, "exact_absmax": None, "absmax": 7.0},
                "2 NaN of 8, computed from values that are not finite; the largest is 7.000; fp16 ends at 65504",
            ),
            (
                {"nonfinite": 0, "absmax": 3.0, "exact_absmax": None, "has_nan_input": True, "elements": 4096, "output_dtypes": ()},
                "none of 4,096 infinite or NaN, computed from NaN; the largest is 3.000",
            ),
        ],
    )
    def test_values(self, changes: dict[str, Any], text: str) -> None:
        assert values(overflow(**changes)) == text

    def test_the_source_with_the_line_that_is_meant(self) -> None:
        document = diagnosis_document(samples.full_diagnosis())
        assert section(document, "Where").excerpts == (Excerpt(lines=samples.excerpt()),)
        assert "\n> 12 |     scores = q @ k.mT\n" in printed(document)
        assert section(diagnosis_document(samples.diagnosis()), "Where").excerpts == ()

    def test_nan_alone_and_source_alone_have_a_place(self) -> None:
        alone = samples.diagnosis("scale", first_nan=samples.not_a_number())
        assert list(places(diagnosis_document(alone))) == ["First NaN"]
        alone = samples.diagnosis("scale", excerpt=samples.excerpt())
        assert len(section(diagnosis_document(alone), "Where").excerpts) == 1


class TestWhy:
    def test_the_explanation(self) -> None:
        full = samples.full_diagnosis()
        why = section(diagnosis_document(full), "Why")
        assert (why.paragraphs, why.tables) == ((full.explanation,), ())

    @pytest.mark.parametrize(
        ("cause", "rows"),
        [
            ("data", (("batch[0]", "input", "3", "64", "–"),)),
            ("parameters", (("head.weight", "parameter", "1,200", "6,400", "4"),)),
            (
                "precision",
                (
                    ("The result", "1.2"),
                    ("What it was computed from", "0.0040"),
                    ("The loss", "0.10"),
                    ("All gradients together", "0.80"),
                ),
            ),
            ("underflow", (("head", "50", "100", "50 %"), ("(the model)", "1", "1,000", "0.1 %"))),
            ("update", (("head.weight", "bf16", "1,800", "2,000", "90 %"),)),
        ],
    )
    def test_the_facts_of_a_cause(self, cause: Cause, rows: tuple[tuple[str, ...], ...]) -> None:
        assert table(diagnosis_document(samples.diagnosis(cause)), "Why").rows == rows

    @pytest.mark.parametrize("count", [10, 11, 25])
    @pytest.mark.parametrize("cause", ["data", "underflow", "update"])
    def test_a_terminal_shows_ten_and_a_page_all(self, cause: Cause, count: int) -> None:
        names = [f"layer{index}." for index in range(count)]
        many: dict[str, dict[str, Any]] = {
            "data": {"tensors": tuple(NonFiniteTensor(name=name, kind="input", nonfinite=1, elements=2, since=None) for name in names)},
            "underflow": {"vanished": tuple(VanishedGradients(module=name, zeros=1, elements=2) for name in names)},
            "update": {"stuck": tuple(StuckTensor(name=name, dtype="float16", stuck=1, elements=2) for name in names)},
        }
        document = diagnosis_document(samples.diagnosis(cause, **many[cause]))
        shown = printed(document)
        assert "layer9." in shown
        assert "layer10." not in shown
        page = render_html(document)
        assert all(name in page for name in names)
        assert (f"{count - 10} more are on the page and in the JSON." in shown) is (count > 10)
        assert ("Why: all rows" in titles(document)) is (count > 10)
        assert [row[0] for row in section(document, "Why").tables[0].rows] == names[:10]


class TestWhatToDo:
    def test_what_was_tried_is_told_from_what_was_not(self) -> None:
        advice = section(diagnosis_document(samples.full_diagnosis()), "What to do")
        assert [(item.label, item.text) for item in advice.items] == [
            ("Verified", "Run the module head in fp32. As a policy: fp16; head=fp32"),
            ("Not tried", "Divide q before the product."),
        ]
        assert advice.paragraphs == (
            "Verified: the step that failed, and three further steps, were replayed with it and were clean. Not tried: nothing was "
            "replayed with it.",
        )

    @pytest.mark.parametrize("verified", [True, False])
    def test_only_what_is_there_is_explained(self, verified: bool) -> None:
        document = diagnosis_document(samples.full_diagnosis(remedies=(samples.remedy(verified=verified),)))
        (legend,) = section(document, "What to do").paragraphs
        assert ("Verified:" in legend, "Not tried:" in legend) == (verified, not verified)

    @pytest.mark.parametrize(
        ("cause", "changes", "expected"),
        [
            ("forward", {}, ["No remedy was found."]),
            ("forward", {"interrupted": True}, []),
            ("healthy", {}, []),
            ("healthy", {"is_reproduced": False}, ["No remedy was found."]),
        ],
    )
    def test_no_remedy(self, cause: Cause, changes: dict[str, Any], expected: list[str]) -> None:
        document = diagnosis_document(samples.diagnosis(cause, **changes))
        assert [text for one in document.sections if one.title == "What to do" for text in one.paragraphs] == expected


class TestProof:
    def test_what_was_asked_and_answered(self) -> None:
        proof = table(diagnosis_document(samples.full_diagnosis()), "Proof")
        assert [column.header for column in proof.columns] == ["Question", "Precision", "Loss scale", "Clean", "Answer"]
        assert proof.rows == (
            ("Does the step fail again?", "fp16", "65536", "no", "It does, in the forward pass."),
            ("Is it finite in fp32?", "fp32", "1", "yes", "It is."),
            ("Is the batch finite?", "–", "–", "yes", "It is."),
        )

    @pytest.mark.parametrize(("replays", "text"), [(1, "replayed 1 time."), (12, "replayed 12 times.")])
    def test_replays_are_counted(self, replays: int, text: str) -> None:
        assert text in table(diagnosis_document(samples.full_diagnosis(replays=replays)), "Proof").caption


@pytest.mark.parametrize("cause", CAUSES)
def test_names_are_data(cause: Cause) -> None:
    named = op_record(ATTACK, site=site(ATTACK, file=ATTACK), output_dtypes=(ATTACK,), node=ATTACK, nonfinite=1)
    lines = tuple(replace(line, text=ATTACK) for line in samples.excerpt())
    remedies = (samples.remedy(text=ATTACK, override=ATTACK),)
    document = diagnosis_document(
        samples.diagnosis(cause, task=ATTACK, origin=named, first_nan=named, excerpt=lines, remedies=remedies, explanation=ATTACK)
    )
    page = render_html(document)
    assert ATTACK not in page
    assert page.count("&lt;/script&gt;&lt;img src=x") >= 10
    assert printed(document).count(ATTACK) >= 10


@given(diagnosis=diagnoses())
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_diagnosis_can_be_shown(diagnosis: Diagnosis) -> None:
    document = diagnosis_document(diagnosis)
    assert document.conclusion.endswith(".")
    assert titles(document)[0] == "What happened"
    assert printed(document)
    assert "<h2" in render_html(document)
