"""The `halfstep` command: its subcommands, and how errors become exit codes."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, MutableMapping, Sequence
from importlib import import_module
from typing import Final, final

import click

import halfstep
from halfstep.cli.exit_codes import ExitCode
from halfstep.errors import HalfstepError, TaskError

__all__ = ["command", "main"]

# Where each subcommand is defined. It is loaded when it is called, or listed: a hook that runs at every commit must not pay for the others.
_HOMES: Final = {
    "audit": ("halfstep.cli.audit", "audit_command"),
    "compare": ("halfstep.cli.compare", "compare_command"),
    "diagnose": ("halfstep.cli.diagnose", "diagnose_command"),
    "inspect": ("halfstep.cli.inspect", "inspect_command"),
    "lint": ("halfstep.cli.lint", "lint_command"),
    "ops": ("halfstep.cli.ops", "ops_command"),
    "policy": ("halfstep.cli.policy", "policy_group"),
    "report": ("halfstep.cli.report", "report_command"),
    "run": ("halfstep.cli.run", "run_command"),
}


@final
class _Subcommands(MutableMapping[str, click.Command]):
    """The subcommands by name, each imported when it is first asked for."""

    def __init__(self) -> None:
        self._loaded: dict[str, click.Command] = {}
        self._names = dict.fromkeys(_HOMES)

    def __getitem__(self, name: str) -> click.Command:
        if name in self._names and name not in self._loaded:
            module, attribute = _HOMES[name]
            self._loaded[name] = getattr(import_module(module), attribute)
        return self._loaded[name]

    def __setitem__(self, name: str, subcommand: click.Command) -> None:
        self._names[name] = None
        self._loaded[name] = subcommand

    def __delitem__(self, name: str) -> None:
        del self._names[name]
        self._loaded.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


_EPILOG = """\
\b
Exit codes: 0 all is well, 1 there are findings, 2 it could not run, 130 Ctrl-C.
Start with:  halfstep compare examples/cifar_resnet18.py:task --channels-last --html report.html
"""


@click.group(commands=_Subcommands(), epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(halfstep.__version__, "-V", "--version", message="halfstep %(version)s")
@click.option("--traceback", "show_traceback", is_flag=True, help="Show the whole traceback of an error.")
@click.pass_context
def command(context: click.Context, show_traceback: bool) -> None:  # noqa: FBT001 - click passes flags so
    """Mixed-precision training in PyTorch that you can trust."""
    context.obj = {"traceback": show_traceback}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits.

    Args:
        arguments: The words after `halfstep`; `None` for those of the process.

    Raises:
        SystemExit: Always, with the exit code; except that what a script raises under `halfstep run` leaves as it is.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    show_traceback = "--traceback" in words[:1]
    try:
        code = command.main(words, prog_name="halfstep", standalone_mode=False)
    except click.exceptions.Exit as done:
        code = done.exit_code
    except click.ClickException as error:
        error.show()
        code = ExitCode.COULD_NOT_RUN
    except HalfstepError as error:
        if show_traceback:
            traceback.print_exc()
        click.echo(f"halfstep: {error}", err=True)
        if isinstance(error, TaskError) and error.__cause__ is not None and not show_traceback:
            click.echo("For the whole traceback: halfstep --traceback ...", err=True)
        code = ExitCode.COULD_NOT_RUN
    except (KeyboardInterrupt, click.Abort):
        click.echo("halfstep: interrupted before there was a result.", err=True)
        code = ExitCode.INTERRUPTED
    except OSError as error:
        # Standard output may be a full disk, say. What goes wrong in a task's own files is a TaskError.
        click.echo(f"halfstep: cannot go on: {error}", err=True)
        code = ExitCode.COULD_NOT_RUN
    except Exception:
        traceback.print_exc()
        click.echo("halfstep: this is a bug in halfstep; please report it with the traceback above.", err=True)
        code = ExitCode.COULD_NOT_RUN
    if callable(code):
        # A script of the user's own, which must not run inside of the `try`: what it raises is for Python to print.
        code()
        code = ExitCode.FINE
    sys.exit(code)
