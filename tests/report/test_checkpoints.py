"""Inspected checkpoints as a document."""

# En dashes and multiplication signs are what readers are shown here, on purpose.
# ruff: noqa: RUF001

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given, settings
from rich.console import Console

from halfstep.records import CheckpointRecord, EngineRecord, Inspection, Inspections, PartRecord, TensorRecord
from halfstep.report import Document, Section, print_document, render_html
from halfstep.report.checkpoints import checkpoints_document
from tests.strategies import several_inspections

ATTACK = "</script><img src=x onerror=alert(1)>"


def engine(**changes: Any) -> EngineRecord:
    values: dict[str, Any] = {
        "name": "",
        "precision": "fp16",
        "policy": "fp16; head=fp32",
        "steps": 12000,
        "skips": 3,
        "scale": 1024.0,
        "micro_batches": 0,
        "accumulate": 1,
    }
    return EngineRecord(**(values | changes))


WEIGHT = TensorRecord(name="model.weight", dtype="float32", shape=(3, 4), storage="data/0")
COUNT = TensorRecord(name="extra.count", dtype="int64", shape=(), storage="data/1")


def record(**changes: Any) -> CheckpointRecord:
    values: dict[str, Any] = {
        "step": 12000,
        "time": "2026-01-31T12:00:00+00:00",
        "halfstep": "0.1.0",
        "torch": "2.13.0",
        "python": "3.11.7",
        "device": "cuda",
        "ranks": 1,
        "rank": 0,
        "engines": (engine(),),
        "parts": (PartRecord(name="model", tensors=1200, bytes=48), PartRecord(name="extra", tensors=1, bytes=8)),
        "tensors": (WEIGHT, COUNT),
    }
    return CheckpointRecord(**(values | changes))


def inspection(name: str = "a.pt", *, fault: str = "", **changes: Any) -> Inspection:
    values: dict[str, Any] = {"path": name, "kind": "file", "bytes": 3 << 20, "checkpoint": record()}
    return Inspection(**(values | changes), fault=fault and f"{name} is damaged: {fault}.")


def document(*found: Inspection, **settings: bool) -> Document:
    return checkpoints_document(Inspections(inspections=found), **settings)


def section(found: Document, title: str) -> Section:
    (only,) = [one for one in found.sections if one.title == title]
    return only


def titles(found: Document) -> list[str]:
    return [one.title for one in found.sections]


def printed(found: Document) -> str:
    out = io.StringIO()
    print_document(found, Console(file=out))
    return out.getvalue()


class TestOne:
    def test_it_shows_what_it_holds(self) -> None:
        found = document(inspection())
        assert (found.kind, found.title, found.notices) == ("Checkpoint", "a.pt", ())
        assert found.subtitle == "halfstep 0.1.0 · torch 2.13.0 · Python 3.11.7 · cuda · 1 rank"
        assert titles(found) == ["At a glance", "Engines", "Parts"]
        assert [(item.label, item.text) for item in section(found, "At a glance").items] == [
            ("Step", "12,000"),
            ("Saved", "2026-01-31 12:00:00 UTC"),
            ("Size", "3.0 MiB, 2 tensors"),
        ]
        (parts,) = section(found, "Parts").tables
        assert parts.rows == (("model", "1,200", "48 bytes"), ("extra", "1", "8 bytes"))

    def test_its_engine_has_no_name(self) -> None:
        (engines,) = section(document(inspection()), "Engines").tables
        assert [column.header for column in engines.columns] == ["Precision", "Policy", "Scale", "Steps", "Skips", "Micro-batches"]
        assert engines.rows == (("fp16", "fp16; head=fp32", "1024", "12,000", "3", "0 of 1"),)
        assert engines.caption == ""

    def test_several_engines_have_names(self) -> None:
        engines = (engine(name="generator", micro_batches=1, accumulate=4), engine(name="critic", scale=None, skips=None))
        (table,) = section(document(inspection(checkpoint=record(engines=engines))), "Engines").tables
        assert [row[0] for row in table.rows] == ["generator", "critic"]
        assert [row[3:] for row in table.rows] == [("1024", "12,000", "3", "1 of 4"), ("–", "12,000", "–", "0 of 1")]
        assert table.caption == "A step was in progress: its gradients so far are in the checkpoint."

    def test_what_it_lacks_is_not_shown(self) -> None:
        assert titles(document(inspection(checkpoint=record(engines=(), parts=())))) == ["At a glance"]

    @pytest.mark.parametrize(
        ("kind", "ranks", "labels"), [("file", 1, []), ("file", 2, ["Written by: rank 1 of 2"]), ("folder", 2, []), ("folder", 1, [])]
    )
    def test_a_file_of_several_ranks_says_whose_it_is(self, kind: str, ranks: int, labels: list[str]) -> None:
        found = document(inspection(kind=kind, checkpoint=record(ranks=ranks, rank=ranks - 1)))
        assert [f"{item.label}: {item.text}" for item in section(found, "At a glance").items][3:] == labels
        assert f"{ranks} rank{'s' * (ranks > 1)}" in found.subtitle

    def test_the_conclusion_is_what_is_wrong(self) -> None:
        found = document(inspection(fault="the data of model.weight (data/0) is not what was saved"))
        assert found.conclusion == "a.pt is damaged: the data of model.weight (data/0) is not what was saved."
        assert titles(found) == ["At a glance", "Engines", "Parts"]

    def test_of_one_that_cannot_be_read_nothing_is_shown(self) -> None:
        found = document(inspection(fault="it is empty", checkpoint=None), tensors=True)
        assert (found.conclusion, found.subtitle, found.sections) == ("a.pt is damaged: it is empty.", "", ())

    def test_the_conclusion_is_that_it_is_valid(self) -> None:
        assert document(inspection()).conclusion == "a.pt is valid: every byte of it is what was saved at step 12,000."

    def test_a_quick_answer_says_what_it_is_about(self) -> None:
        found = document(inspection(), quick=True)
        assert found.conclusion == "a.pt is valid as far as it was read: all but its tensors is what was saved at step 12,000."
        assert found.notices[0].startswith("The tensors were not read, so that damage to them is not seen")


class TestSeveral:
    def test_they_are_listed_in_their_order(self) -> None:
        engines = (engine(), engine(precision="bf16", scale=None))
        found = document(
            inspection("c.pt", fault="it is empty", checkpoint=None, bytes=0),
            inspection("b.pt", checkpoint=record(step=200, engines=engines)),
            inspection("a.pt", checkpoint=record(step=100, engines=())),
        )
        assert (found.kind, found.title, found.subtitle) == ("Checkpoints", "3 checkpoints", "")
        assert titles(found) == ["What is wrong", "Checkpoints"]
        (table,) = section(found, "Checkpoints").tables
        assert table.rows == (
            ("c.pt", "no", "–", "–", "–", "–", "0 bytes"),
            ("b.pt", "yes", "200", "2026-01-31 12:00:00 UTC", "fp16, bf16", "1024, –", "3.0 MiB"),
            ("a.pt", "yes", "100", "2026-01-31 12:00:00 UTC", "–", "–", "3.0 MiB"),
        )
        assert section(found, "What is wrong").paragraphs == ("c.pt is damaged: it is empty.",)

    @pytest.mark.parametrize(
        ("valid", "conclusion"),
        [
            ([], "None of 3 checkpoints is valid."),
            ([0], "One of 3 checkpoints is valid: 0.pt at step 0."),
            ([0, 1], "2 of 3 checkpoints are valid; the newest of those is 1.pt at step 1."),
            ([0, 1, 2], "3 of 3 checkpoints are valid; the newest of those is 2.pt at step 2."),
        ],
    )
    def test_the_newest_valid_one_is_named(self, valid: list[int], conclusion: str) -> None:
        found = [inspection(f"{step}.pt", fault="" if step in valid else "it is empty", checkpoint=record(step=step)) for step in range(3)]
        assert document(*found).conclusion == document(*reversed(found)).conclusion == conclusion

    def test_of_two_of_one_step_the_later_one_is_the_newest(self) -> None:
        found = document(
            inspection("new.pt", checkpoint=record(time="2026-02-01T12:00:00+00:00")), inspection("old.pt", checkpoint=record())
        )
        assert "the newest of those is new.pt" in found.conclusion

    def test_nothing_is_wrong_where_all_are_valid(self) -> None:
        assert titles(document(inspection("a.pt"), inspection("b.pt"))) == ["Checkpoints"]


class TestTensors:
    def test_they_are_listed_on_request(self) -> None:
        (table,) = section(document(inspection(), tensors=True), "Tensors").tables
        assert table.rows == (("model.weight", "float32", "3 × 4", "data/0"), ("extra.count", "int64", "scalar", "data/1"))

    def test_those_of_several_stand_under_their_names(self) -> None:
        none = record(tensors=())
        found = document(inspection("a.pt"), inspection("b.pt"), inspection("c.pt", checkpoint=none), tensors=True)
        assert titles(found) == ["Checkpoints", "Tensors of a.pt", "Tensors of b.pt"]


def test_a_name_cannot_break_out() -> None:
    hostile = f"\x1b[2J[red]{ATTACK}\n"
    holds = record(
        device=hostile,
        engines=(engine(name=hostile, policy=hostile),),
        parts=(PartRecord(name=hostile, tensors=1, bytes=1),),
        tensors=(TensorRecord(name=hostile, dtype=hostile, shape=(), storage=hostile),),
    )
    for found in (
        document(inspection(hostile, fault=hostile, checkpoint=holds), tensors=True),
        document(inspection(hostile, fault=hostile, checkpoint=holds), inspection(), tensors=True),
    ):
        out = printed(found)
        assert "\x1b" not in out
        assert "[red]" in out
        page = render_html(found)
        assert "<img" not in page
        assert "&lt;/script&gt;&lt;img src=x" in page


@settings(max_examples=25)
@given(several_inspections().filter(lambda found: bool(found.inspections)))
def test_whatever_was_found_can_be_printed(found: Inspections) -> None:
    printed(checkpoints_document(found, tensors=True, quick=True))
