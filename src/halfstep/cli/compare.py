"""`halfstep compare`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import Any, final

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import halfstep
from halfstep.cli.exit_codes import ExitCode
from halfstep.errors import ConfigurationError
from halfstep.files import check_writable, write_text
from halfstep.records import Comparison
from halfstep.report import comparison_document, print_document, write_html

__all__ = ["compare_command"]


@click.command("compare", short_help="Measure fp32 against bf16 and fp16 on a task: time, memory, loss.")
@click.argument("task")
@click.option("--precisions", default="fp32,bf16,fp16", show_default=True, metavar="LIST", help="What to measure; fp32 is the baseline.")
@click.option("--steps", type=click.IntRange(min=1), default=12, show_default=True, help="Measured steps of each precision for each seed.")
@click.option(
    "--warmup", type=click.IntRange(min=1), default=2, show_default=True, help="Steps before those, which train but are not timed."
)
@click.option(
    "--seeds",
    default="3",
    show_default=True,
    metavar="N|LIST",
    help="How many seeds, or a list such as 7,11,13. The spread between seeds is what losses are judged by.",
)
@click.option("--device", default="auto", show_default=True, metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")
@click.option("--channels-last", is_flag=True, help="Lay out the model and its images channels last, which convolutions prefer.")
@click.option("--compile", "compile_model", is_flag=True, help="Run the model through torch.compile.")
@click.option(
    "--loss-scale",
    type=click.Choice(["dynamic", "none"]),
    default="dynamic",
    show_default=True,
    help="The loss scaling of fp16.",
)
@click.option(
    "--max-slowdown",
    type=click.FloatRange(min=1, min_open=True),
    default=10.0,
    show_default=True,
    metavar="FACTOR",
    help="Stop a precision early whose step takes more than this many times the fp32 step; inf never does.",
)
@click.option("--json", "json_file", metavar="FILE", help="Write the measurements as JSON; - for standard output.")
@click.option("--html", "html_file", metavar="FILE", help="Write a report with plots: one file, readable offline.")
@click.pass_context
def compare_command(context: click.Context, /, json_file: str | None, html_file: str | None, **options: Any) -> None:
    """Measure what mixed precision does for TASK: how much faster, how much memory, is the training still the same?

    TASK names a function that makes the model, the optimizer, the loss and the batches: path/to/file.py:task or package.module:task.

    \b
        def task(seed: int) -> halfstep.Task:
            model = MyModel()
            optimizer = torch.optim.AdamW(model.parameters())
            return halfstep.Task(model=model, optimizer=optimizer, loss=my_loss, batches=my_loader)

    \b
        def my_loss(model, batch):  # returns a scalar tensor
            x, y = batch
            return F.cross_entropy(model(x), y)

    The precisions run in turns in one process, from the same seeds. Ctrl-C prints what is known so far.

    \b
    Exit codes: 0 all is well, 1 a precision trains worse or fails, 2 it could not run, 130 Ctrl-C.
    """  # noqa: D301 - click reads \\b as "keep these lines"
    _check_outputs(json_file=json_file, html_file=html_file)
    seeds = _parse_seeds(options["seeds"])
    # With --json -, whatever the task prints goes to standard error: standard output is for the JSON alone.
    with redirect_stdout(sys.stderr) if json_file == "-" else nullcontext(), _progress_bar() as progress:
        comparison = halfstep.compare(
            options["task"],
            precisions=[name.strip() for name in options["precisions"].split(",")],
            steps=options["steps"],
            warmup=options["warmup"],
            seeds=seeds,
            device=options["device"],
            channels_last=options["channels_last"],
            compile=options["compile_model"],
            loss_scale=options["loss_scale"],
            max_slowdown=options["max_slowdown"],
            progress=progress,
        )
    _publish(comparison, json_file=json_file, html_file=html_file)
    if comparison.interrupted:
        context.exit(ExitCode.INTERRUPTED)
    findings = any(verdict.loss_parity == "worse" for verdict in comparison.verdicts)
    failures = any(run.outcome == "failed" for run in comparison.runs)
    context.exit(ExitCode.FINDINGS if findings or failures else ExitCode.FINE)


def _check_outputs(*, json_file: str | None, html_file: str | None) -> None:
    """Refuses, before any step runs, what could not be written after the last one."""
    if html_file == "-":
        raise ConfigurationError("--html - is not supported: a report is a file of some megabytes. Name a file.")
    paths = [Path(name) for name in (json_file, html_file) if name is not None and name != "-"]
    for path in paths:
        check_writable(path)
    # A device or a pipe takes both, one after the other.
    files = [path.resolve() for path in paths if path.is_file() or not path.exists()]
    if len(set(files)) < len(files):
        raise ConfigurationError(f"--json and --html both name {html_file}; one would overwrite the other. Name two files.")


def _publish(comparison: Comparison, *, json_file: str | None, html_file: str | None) -> None:
    """Writes the files first: what is printed can be lost to a closed pipe or a second Ctrl-C. It is printed even if they fail."""
    document = comparison_document(comparison)
    try:
        if json_file not in {None, "-"}:
            write_text(Path(str(json_file)), comparison.to_json(indent=2) + "\n")
        if html_file is not None:
            write_html(document, html_file)
    finally:
        if json_file == "-":
            _PatientConsole(soft_wrap=True).out(comparison.to_json(indent=2), highlight=False)
        print_document(document, _PatientConsole(stderr=json_file == "-", highlight=False))
    for what, name in (("Measurements", json_file), ("Report", html_file)):
        if name not in {None, "-"}:
            click.echo(f"{what}: {name}", err=True)


@final
class _PatientConsole(Console):
    """A console whose reader may leave, as `head` does: rich would end the program, with the exit code that stands for findings."""

    def on_broken_pipe(self) -> None:
        """Goes on without printing."""
        with suppress(SystemExit):
            super().on_broken_pipe()


def _parse_seeds(text: str) -> int | list[int]:
    wrong = f"--seeds {text!r} is neither a number of seeds, such as 3, nor a list of different seeds from 0 to 2**32 - 1, such as 7,11,13."
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ConfigurationError(wrong) from error
    how_many = "," not in text
    if not numbers or (numbers[0] < 1 if how_many else len(set(numbers)) < len(numbers) or not all(0 <= seed < 2**32 for seed in numbers)):
        raise ConfigurationError(wrong)
    return numbers[0] if how_many else numbers


@contextmanager
def _progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on standard error where that is a terminal, and nothing elsewhere."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not sys.stderr.isatty(),
        transient=True,
    ) as bar:
        running = bar.add_task("starting", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(running, completed=done, total=total, description=what)

        yield show
