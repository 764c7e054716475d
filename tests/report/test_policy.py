# ruff: noqa: RUF001
from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from rich.console import Console

from halfstep.records import PolicyEffect
from halfstep.report import Document, Section, comparison_document, policy_document, print_document, render_html
from halfstep.report.policy import policy_sections
from tests import samples
from tests.strategies import policy_effects

ATTACK = "</script><img src=x onerror=alert(1)>"


def section(document: Document, title: str) -> Section:
    return next(one for one in document.sections if one.title == title)


def large(count: int, direct: int) -> PolicyEffect:
    modules = tuple(samples.module_precision(f"layers.{index}", direct=index < direct, parameters=1000) for index in range(count))
    return samples.policy_effect(modules=modules)


def printed(document: Document) -> str:
    out = io.StringIO()
    print_document(document, Console(file=out))
    return out.getvalue()


def test_the_overrides_come_first_and_then_the_modules() -> None:
    document = policy_document(samples.policy_effect())
    assert [one.title for one in document.sections] == ["Overrides", "Modules"]
    assert (document.kind, document.title, document.subtitle) == ("Policy", "bf16; head=fp32; op:softmax=fp32", "examples/digits.py:task")
    (overrides,), (modules,) = document.sections[0].tables, document.sections[1].tables
    assert [column.header for column in overrides.columns] == ["Override", "Modules", "Parameters", "Called", "Casts added"]
    assert overrides.rows == (("head=fp32", "1", "650", "1 of 1", "−2"), ("op:softmax=fp32", "–", "–", "4", "+16"))
    assert overrides.caption.startswith("Casts of one step, forward and backward: 54 under the policy, 40 without its overrides.")
    assert "need not add up" in overrides.caption
    assert modules.rows[0] == ("(the model)", "Net", "bf16", "default", "0", "1")
    assert modules.rows[2] == ("head", "Linear", "fp32", "head=fp32", "650", "1")
    assert modules.caption == "3 modules, 2,000 parameters: 2 in bf16 and 1 in fp32."


@pytest.mark.parametrize(
    ("changes", "conclusion"),
    [
        (
            {},
            "Every override has an effect: 1 of 3 modules run by an override (1 in fp32), with 32 % of the parameters; a step makes 54 "
            "casts, 14 more than without overrides.",
        ),
        ({"casts": 38}, "; a step makes 38 casts, 2 fewer than without overrides."),
        ({"casts": 40}, "; a step makes 40 casts, as many as without overrides."),
        ({"casts": None}, "with 32 % of the parameters."),
        ({"overrides": ()}, "The policy has no overrides: all modules run in bf16."),
        (
            {"overrides": (samples.override_effect(status="absent"),)},
            "No override is about a module of this model: all modules run in bf16.",
        ),
        (
            {"overrides": (samples.override_effect(), samples.override_effect(status="absent"))},
            "Every override whose class the model has has an effect",
        ),
        (
            {"overrides": (samples.override_effect(), samples.override_effect("x=fp32", status="unmatched", note="It matches nothing."))},
            "x=fp32 has no effect: it matches nothing.",
        ),
        (
            {"overrides": tuple(samples.override_effect(f"{name}=fp32", status="uncalled", note="No.") for name in "abc")},
            "3 of 3 overrides have no effect: a=fp32, b=fp32 and c=fp32.",
        ),
    ],
)
def test_the_conclusion_says_whether_it_does_what_it_says(changes: dict[str, Any], conclusion: str) -> None:
    assert conclusion in policy_document(samples.policy_effect(**changes)).conclusion


def test_what_is_wrong_with_an_override_stands_above_the_table() -> None:
    found = samples.override_effect("x=fp32", modules=0, parameters=0, ran=0, casts=0, status="unmatched", note="It matches nothing.")
    (overrides,) = [one for one in policy_document(samples.policy_effect(overrides=(found,))).sections if one.title == "Overrides"]
    assert [(item.label, item.text) for item in overrides.items] == [("x=fp32", "It matches nothing.")]
    assert overrides.tables[0].rows == (("x=fp32", "0", "0", "–", "0"),)


def test_an_automatic_default_is_named() -> None:
    assert policy_document(samples.policy_effect(policy="auto; head=fp32")).subtitle == "examples/digits.py:task · auto is bf16 here"
    assert policy_document(samples.policy_effect(policy="pure fp16", pure=True, default="fp16", task="")).subtitle == ""


def test_what_was_not_measured_has_no_column() -> None:
    modules = tuple(replace(module, calls=None) for module in samples.policy_effect().modules)
    overrides = (samples.override_effect(ran=None, casts=None),)
    effect = samples.policy_effect(modules=modules, overrides=overrides, casts=None, casts_without=None, cast_elements=None)
    document = policy_document(effect)
    (overrides_table,), (modules_table,) = document.sections[0].tables, document.sections[1].tables
    assert [column.header for column in overrides_table.columns] == ["Override", "Modules", "Parameters"]
    assert overrides_table.caption == ""
    assert "Calls" not in [column.header for column in modules_table.columns]


class TestLargeModels:
    def test_a_terminal_shows_those_that_an_override_is_about_and_the_page_all(self) -> None:
        document = policy_document(large(31, direct=2))
        compact, everything = section(document, "Modules that an override is about"), section(document, "All modules")
        assert [row[0] for row in compact.tables[0].rows] == ["layers.0", "layers.1"]
        assert compact.tables[0].caption == "31 modules, 31,000 parameters: 31 in fp32."
        assert (everything.place, len(everything.tables[0].rows)) == ("page", 31)
        assert "layers.30" not in printed(document)
        assert "layers.30" in render_html(document)

    def test_even_those_may_be_too_many(self) -> None:
        (table,) = section(policy_document(large(100, direct=50)), "Modules that an override is about").tables
        assert len(table.rows) == 30
        assert table.caption.startswith("The first 30 of 50. 100 modules, ")

    def test_there_may_be_none(self) -> None:
        compact = section(policy_document(large(31, direct=0)), "Modules that an override is about")
        assert (compact.tables, compact.paragraphs) == ((), ("31 modules, 31,000 parameters: 31 in fp32.",))

    def test_thirty_are_shown_in_full(self) -> None:
        assert "layers.29" in printed(policy_document(large(30, direct=1)))


def test_a_module_that_runs_as_its_caller_is_counted_apart() -> None:
    modules = (*samples.policy_effect().modules, samples.module_precision("shared", precision="caller", reason="shared"))
    (table,) = section(policy_document(samples.policy_effect(modules=modules)), "Modules").tables
    assert table.caption == "4 modules, 2,650 parameters: 2 in bf16, 1 in fp32 and 1 as their caller."
    assert "1 of 4 modules run by an override (1 in fp32)" in policy_document(samples.policy_effect(modules=modules)).conclusion


def test_a_name_cannot_break_out_of_the_page() -> None:
    hostile = samples.module_precision(ATTACK, kind=ATTACK, reason=f"{ATTACK}=fp32")
    effect = samples.policy_effect(modules=(hostile,), overrides=(samples.override_effect(f"{ATTACK}=fp32", note=ATTACK),), name=ATTACK)
    for document in (policy_document(effect), comparison_document(samples.comparison(policies=(effect,)))):
        page = render_html(document)
        assert "<img" not in page
        assert "&lt;/script&gt;&lt;img src=x" in page


@settings(max_examples=25)
@given(policy_effects())
def test_any_effect_makes_a_document_that_can_be_printed(effect: PolicyEffect) -> None:
    assert policy_document(effect).title == effect.policy
    printed(policy_document(effect))


class TestInAComparison:
    def test_each_policy_has_a_section_and_its_modules_are_on_the_page(self) -> None:
        effect = samples.policy_effect()
        document = comparison_document(samples.comparison(policies=(effect, replace(effect, name="others"))))
        titles = [one.title for one in document.sections]
        assert titles[-5:] == ["Policy islands", "Modules under islands", "Policy others", "Modules under others", "Machine and settings"]
        assert section(document, "Policy islands").paragraphs == (effect.policy,)
        assert section(document, "Modules under islands").place == "page"
        assert len(section(document, "Modules under islands").tables[0].rows) == 3

    def test_an_effect_that_was_not_measured_says_so_and_who_measures_it(self) -> None:
        unmeasured: dict[str, Any] = {"casts": None, "cast_elements": None, "casts_without": None}
        told = policy_sections(samples.policy_effect(**unmeasured))[0]
        assert told.paragraphs == (
            "bf16; head=fp32; op:softmax=fp32",
            "Whether each override has an effect in a step was not measured here: halfstep policy show tells.",
        )
        assert policy_sections(samples.policy_effect(overrides=(), **unmeasured))[0].paragraphs == ("It has no overrides.",)

    def test_a_terminal_has_them_in_the_order_of_their_columns_before_the_summary(self) -> None:
        effects = tuple(replace(samples.policy_effect(), name=name) for name in ("first", "second", "third"))
        output = printed(comparison_document(samples.comparison(policies=effects)))
        places = [output.index(title) for title in ("Policy first", "Policy second", "Policy third", "Summary", "Verdicts")]
        assert places == sorted(places)

    @pytest.mark.parametrize(
        ("changes", "paragraphs"),
        [({"name": "bf16; head=fp32; op:softmax=fp32"}, ()), ({"overrides": (), "policy": "bf16"}, ("It has no overrides.",))],
    )
    def test_the_text_is_not_repeated(self, changes: dict[str, Any], paragraphs: tuple[str, ...]) -> None:
        assert policy_sections(samples.policy_effect(**changes))[0].paragraphs == paragraphs

    def test_a_policy_has_a_colour_of_its_own(self) -> None:
        run, verdict = replace(samples.run("bf16"), precision="islands"), replace(samples.verdict("bf16"), precision="islands")
        document = comparison_document(samples.comparison(runs=(samples.run("fp32"), run), verdicts=(verdict,)))
        assert [card.role for card in section(document, "Verdicts").cards] == ["islands"]
        page = render_html(document)
        assert "var(--series-1)" in page
        assert "fp32 vs islands" in page
