"""What saved runs look like as a document."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from halfstep.report.document import Card, Document, Fact, Item, Place, Section
from halfstep.report.quantities import Unit, memory_unit, number_text, time_unit
from halfstep.report.runs.alerts import alert_cards, difference_items
from halfstep.report.runs.conclusions import runs_conclusion
from halfstep.report.runs.course import course_items
from halfstep.report.runs.figures import run_figures
from halfstep.report.runs.positions import counts_anew
from halfstep.report.runs.reported import ReportedRun
from halfstep.report.runs.tables import comparison_table, epoch_table, optimizer_table, scale_text
from halfstep.report.runs.wording import listed, share_text, time_text

__all__ = ["runs_document"]


_COURSE: Final = "How it ran"


def runs_document(runs: Sequence[ReportedRun]) -> Document:
    """The document that shows saved runs: what needs attention first, then what happened at which step, then how they went.

    Args:
        runs: The runs, at least one. Several are drawn over each other and compared side by side.

    Example:
        >>> from tempfile import mkdtemp
        >>> from halfstep.journal import RunWriter, read_run
        >>> from halfstep.records import StepRecord
        >>> from halfstep.report.runs import reported_runs
        >>> writer = RunWriter(mkdtemp())
        >>> writer.write([StepRecord(step=1, skipped=False, scale=1.0, loss=0.25, grad_norm=None, lr=0.1, step_time_s=0.01,
        ...     memory_bytes=None, precision="bf16")])
        >>> runs_document(reported_runs([read_run(writer.path)])).conclusion
        '1 step in bf16, none skipped; no alerts.'
    """
    sections = (
        Section(title="Alerts", cards=alert_cards(runs)),
        *_sections(runs, "Where today's rules differ", difference_items),
        *_glance(runs),
        _step_section(runs),
        *_epoch_sections(runs),
        *_sections(runs, "Actions", _action_items),
        *_sections(runs, _COURSE, course_items),
        *_sections(runs, "What could not be read", _note_items),
    )
    return Document(
        kind="Training run" if len(runs) == 1 else "Training runs",
        title=listed([run.name for run in runs]),
        subtitle=_subtitle(runs),
        conclusion=runs_conclusion(runs),
        notices=tuple(_notices(runs)),
        sections=tuple(one for one in sections if one.cards or one.items or one.tables or one.figures),
        roles=tuple(run.role for run in runs),
    )


def _sections(runs: Sequence[ReportedRun], title: str, items: Callable[[ReportedRun], tuple[Item, ...]]) -> Iterator[Section]:
    """A section for each run."""
    # On a terminal, several runs are told by what they have in common, and by what is wrong.
    place: Place = "page" if len(runs) > 1 and title == _COURSE else "everywhere"
    return (Section(title=_titled(title, run, runs), items=items(run), place=place, group=title) for run in runs)


def _titled(title: str, run: ReportedRun, runs: Sequence[ReportedRun]) -> str:
    return f"{title}: {run.name}" if len(runs) > 1 else title


def _subtitle(runs: Sequence[ReportedRun]) -> str:
    """Where and when, as far as it is the same for all runs."""
    starts = [start for run in runs for start in run.summary.starts]
    parts = (
        {", ".join(run.summary.precisions) for run in runs},
        {start.device for start in starts},
        {f"torch {start.torch}" if start.torch else "" for start in starts},
        {time_text(start.time) for start in starts[:1]} if len(runs) == 1 else set(),
    )
    return " · ".join(text for part in parts if len(part) == 1 for text in part if text)


def _notices(runs: Sequence[ReportedRun]) -> Iterator[str]:
    names = listed([run.name for run in runs if not run.saved.ended[-1]])
    if names:
        which = f" of {names}" if len(runs) > 1 else ""
        yield f"No end{which} was recorded: it was killed, or is still running."
    if any(run.summary.recorded_alerts is not None for run in runs):
        yield "The alerts are those of today's rules, judged anew from the recorded steps."
    names = listed([run.name for run in runs if counts_anew(run.saved)])
    if names:
        which = f" {names}" if len(runs) > 1 else " the run"
        yield f"A process that resumed{which} counted its steps from 1 again. In the figures they follow those before."


def _glance(runs: Sequence[ReportedRun]) -> Iterator[Section]:
    if not any(run.summary.steps for run in runs):
        return
    if len(runs) > 1:
        yield Section(title="Side by side", tables=(comparison_table(runs),))
        return
    run = runs[0]
    tables = (optimizer_table(run),) if len(run.summary.optimizers) > 1 else ()
    yield Section(title="At a glance", cards=(_glance_card(run),), tables=tables)


def _glance_card(run: ReportedRun) -> Card:
    summary = run.summary
    time, memory = time_unit([summary.median_step_time_ms]), memory_unit([summary.peak_memory_mib])
    optimizers = summary.optimizers if len(summary.optimizers) == 1 else ()
    facts = (
        Fact(label="Steps", value=f"{summary.steps:,}"),
        Fact(label="Skipped", value=f"{summary.skips:,}", detail=share_text(summary.skips, summary.steps)),
        *(
            Fact(label="Final loss", value=number_text(one.settled_loss, digits=3), detail=f"from {number_text(one.first_loss, digits=3)}")
            for one in optimizers
            if one.settled_loss is not None
        ),
        *(Fact(label="Final scale", value=scale_text(one.final_scale)) for one in optimizers if one.final_scale is not None),
        *_measured("Step time", summary.median_step_time_ms, unit=time, detail="median"),
        *_measured("Peak memory", summary.peak_memory_mib, unit=memory),
    )
    return Card(title=", ".join(summary.precisions), facts=facts, role=run.role if optimizers else "")


def _measured(label: str, value: float | None, *, unit: Unit, detail: str = "") -> tuple[Fact, ...]:
    if value is None:
        return ()
    return (Fact(label=label, value=f"{number_text(value * unit.factor, digits=3)} {unit.name}", detail=detail),)


def _step_section(runs: Sequence[ReportedRun]) -> Section:
    figures = run_figures(runs)
    guide = (
        "All figures show the same steps: zooming in on one zooms all, and a double click shows the whole run again.",
        "Faint lines reach from the lowest to the highest of neighbouring steps, bold ones are their medians."
        if any(series.emphasis == "faint" for figure in figures for series in figure.series)
        else "",
        "Dots with dashed lines are alerts." if any(run.summary.alerts for run in runs) else "",
    )
    return Section(title="Step by step", paragraphs=(" ".join(filter(None, guide)),), figures=figures, place="page")


def _epoch_sections(runs: Sequence[ReportedRun]) -> Iterator[Section]:
    for run in runs:
        if run.summary.epochs:
            has_epochs = any(epoch.epoch is not None for epoch in run.summary.epochs)
            title = _titled("Epoch by epoch" if has_epochs else "Part by part", run, runs)
            yield Section(title=title, tables=(epoch_table(run),), place="page" if len(runs) > 1 else "everywhere", group="epochs")


def _action_items(run: ReportedRun) -> tuple[Item, ...]:
    return tuple(
        Item(label=f"{action.action} after step {action.step:,} ({action.rule})", text=action.message) for action in run.summary.actions
    )


def _note_items(run: ReportedRun) -> tuple[Item, ...]:
    return tuple(Item(label=f"Note {number}", text=note) for number, note in enumerate(run.summary.notes, start=1))
