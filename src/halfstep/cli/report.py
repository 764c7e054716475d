"""`halfstep report`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from halfstep.cli.exit_codes import ExitCode
from halfstep.cli.outputs import check_outputs, publish
from halfstep.errors import ConfigurationError

__all__ = ["report_command"]

_MOST_NAMED: Final = 10


@click.command("report", short_help="Show saved runs: alerts, skipped steps, loss, scale, time and memory.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--html", "html_file", metavar="FILE", help="Write a report with plots: one file, readable offline.")
@click.option("--json", "json_file", metavar="FILE", help="Write what the runs come to as JSON; - for standard output.")
@click.option("--rules", "is_judged", is_flag=True, help="Judge the recorded steps anew, with the rules of this halfstep.")
@click.pass_context
def report_command(
    context: click.Context, /, runs: tuple[str, ...], html_file: str | None, json_file: str | None, *, is_judged: bool
) -> None:
    """Show what saved runs did, also runs that are still going on, or that were killed: no torch is needed.

    RUN is the folder of a run, as `halfstep run train.py` and halfstep.watch() make it, or the run.jsonl in it.

    Printed are the alerts, each with its place in the code and what to do, the numbers of the run, and the skipped steps of each epoch.
    The page that --html writes has the figures, too: loss, loss scale, gradient norm, step time, memory and learning rate over the steps,
    with skipped steps and alerts where they happened. Every spike is drawn, in runs of a million steps as well.

    Several runs are drawn over each other and compared side by side.

    The alerts are those that the run raised while it trained. With --rules the recorded steps are judged anew, such as after an upgrade of
    halfstep, and the report says where that differs.

    \b
    Examples:
        halfstep report halfstep-runs/train-20260131-120000
        halfstep report halfstep-runs/* --html report.html
        halfstep report halfstep-runs/train-20260131-120000 --json - | jq .skips

    \b
    Exit codes: 0 all is well, 1 there are warnings or errors, 2 a run could not be read, 130 Ctrl-C.
    """  # noqa: D301 - click reads \\b as "keep these lines"
    check_outputs(json_file=json_file, html_file=html_file)
    # They load numpy, which the help must not wait for.
    from halfstep.journal import read_run  # noqa: PLC0415
    from halfstep.report.runs import reported_record, reported_runs, runs_document  # noqa: PLC0415

    judge = None
    if is_judged:
        from halfstep.monitor import judge_run  # noqa: PLC0415

        judge = judge_run
    reported = reported_runs([read_run(_checked(run)) for run in runs], judge=judge)
    record = reported_record(reported)
    publish(record, runs_document(reported), json_file=json_file, html_file=html_file)
    context.exit(ExitCode.FINDINGS if record.has_findings else ExitCode.FINE)


def _checked(run: str) -> Path:
    """The path of a run, unless it is that of a folder of runs: which of them is meant, nobody knows."""
    path = Path(run)
    below = sorted(child.parent.name for child in path.glob("*/run.jsonl")) if not (path / "run.jsonl").exists() else []
    if not below:
        return path
    shown = ", ".join(below[-_MOST_NAMED:])
    named = f", the last {_MOST_NAMED} of which are {shown}" if len(below) > _MOST_NAMED else f": {shown}"
    raise ConfigurationError(
        f"{run} is no run, but holds {len(below)} folder{'s' * (len(below) != 1)} of runs{named}. Name one or several of them, such as "
        f"{path / below[-1]}, or all: halfstep report {path}/*"
    )
