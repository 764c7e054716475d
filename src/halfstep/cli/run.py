"""`halfstep run`."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal, cast

import click

from halfstep.watching.launching import run_script
from halfstep.watching.scripts import Script, check_script

__all__ = ["run_command"]


@click.command(
    "run",
    short_help="Run a training script unchanged, and watch its mixed precision.",
    # Everything from the script on belongs to the script.
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
)
@click.argument("target", metavar="SCRIPT|-m MODULE")
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "is_module", is_flag=True, help="Run a module, as python -m does.")
@click.option("--log-dir", metavar="DIR", help="The folder of the run.  [default: halfstep-runs/NAME-DATE-TIME]")
@click.option("--diagnose", is_flag=True, help="Once five steps in a row were skipped, trace one and name the operation that overflows.")
@click.option(
    "--sink",
    "sinks",
    multiple=True,
    metavar="NAME",
    help="Send the steps there, too: csv, tensorboard, or console for a live line. May be repeated.",
)
@click.option(
    "--on-persistent-skips",
    "on_persistent_skips",
    type=click.Choice(["warn", "raise", "save-and-stop", "fall-back"]),
    help="What to do when step after step is skipped.  [default: the alert alone]",
)
@click.option("--quiet", is_flag=True, help="Print neither alerts while it runs, nor the line at its end.")
def run_command(*, target: str, arguments: tuple[str, ...], is_module: bool, sinks: tuple[str, ...], quiet: bool, **options: Any) -> object:
    """Run SCRIPT as python does, unchanged, and watch its mixed precision.

    Every optimizer step is recorded: loss, loss scale, gradient norm, whether it was skipped. What goes wrong, in the numbers or in the
    code, is told at once, with the line to change. Write halfstep run where you would write python: what comes before SCRIPT is for
    halfstep, what comes after it is for the script.

    \b
        python                  train.py --epochs 3
        halfstep run            train.py --epochs 3
        halfstep run --diagnose -m research.train --epochs 3
        torchrun --nproc-per-node 2 -m halfstep run train.py --epochs 3

    The script does not notice: what it prints, its exit status, its tracebacks, signals and the processes that it starts are its own.
    halfstep writes to standard error alone, in lines that begin with its name, and into the folder of the run. See it afterwards, or from
    another terminal while it trains, by halfstep report and the name of the folder.

    \b
    When step after step is skipped, --on-persistent-skips
      warn            warns, by Python's warnings
      raise           raises PersistentSkipsError in the script
      save-and-stop   saves model, optimizer and scaler into the folder of the run, and raises
      fall-back       goes on with the operation that overflows in fp32, then in bf16, then in fp32

    \b
    Exit codes: those of the script; 2 there is no such script, or it could not be watched.
    """  # noqa: D301 - click reads \\b as "keep these lines"
    script = Script(target=target, arguments=arguments, is_module=is_module)
    check_script(script)
    reaction = options["on_persistent_skips"]

    def watching() -> AbstractContextManager[object]:
        # It loads torch, which must not happen before the script does it itself.
        from halfstep.monitor import process_rank  # noqa: PLC0415
        from halfstep.watching import watch  # noqa: PLC0415

        stack = ExitStack()
        watched = watch(
            options["log_dir"],
            sinks=_sinks(sinks, quiet=quiet),
            on_persistent_skips=None if reaction is None else cast("_Reaction", reaction.replace("-", "_")),
            diagnose=options["diagnose"],
            command=script.command,
        )
        # The other ranks write nothing that one could look at.
        if not quiet and process_rank() == 0:
            # Entered before, so left after: the summary is that of a run that has ended.
            stack.callback(lambda: click.echo(f"halfstep: {watched.summary()}", err=True))
        stack.enter_context(watched)
        return stack

    # For `main`, which calls it once neither click nor a `try` of its own stands around the script any more.
    return lambda: run_script(script, watcher=watching, begins_after="torch")


_Reaction = Literal["warn", "raise", "save_and_stop", "fall_back"]


def _sinks(named: tuple[str, ...], *, quiet: bool) -> tuple[str, ...]:
    """Steps always go to `run.jsonl`, which `halfstep report` reads. The console shows alerts, too."""
    shown = () if quiet or "console" in named else ("alerts",)
    silent = {"alerts", "console"} if quiet else set()
    return tuple(dict.fromkeys(["jsonl", *shown, *(name for name in named if name not in silent)]))
