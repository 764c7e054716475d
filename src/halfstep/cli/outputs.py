"""What commands write, and the progress that they show."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import Any, final

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from halfstep.errors import ConfigurationError
from halfstep.files import check_writable, write_text
from halfstep.records import AbstractRecord
from halfstep.report import Document, print_document, write_html

__all__ = ["check_outputs", "progress_bar", "publish", "task_output"]


def task_output(json_file: str | None) -> AbstractContextManager[Any]:
    """A region in which whatever the task prints goes to standard error with `--json -`: standard output is for the JSON alone."""
    return redirect_stdout(sys.stderr) if json_file == "-" else nullcontext()


def check_outputs(*, json_file: str | None, html_file: str | None) -> None:
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


def publish(record: AbstractRecord, document: Document, *, json_file: str | None, html_file: str | None) -> None:
    """Writes the files first: what is printed can be lost to a closed pipe or a second Ctrl-C. It is printed even if they fail."""
    try:
        if json_file not in {None, "-"}:
            write_text(Path(str(json_file)), record.to_json(indent=2) + "\n")
        if html_file is not None:
            write_html(document, html_file)
    finally:
        if json_file == "-":
            _PatientConsole(soft_wrap=True).out(record.to_json(indent=2), highlight=False)
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


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
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
