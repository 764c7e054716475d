"""`halfstep ops`."""

from __future__ import annotations

import click

from halfstep.cli.exit_codes import ExitCode
from halfstep.cli.outputs import check_outputs, publish
from halfstep.errors import ConfigurationError
from halfstep.report import ops_document

__all__ = ["ops_command"]


@click.command("ops", short_help="Print what autocast does to each operation: lower, fp32, promote, banned.")
@click.argument("pattern", required=False, default="")
@click.option("--target", default="cuda", show_default=True, metavar="TARGET", help="The device type: cuda, cpu, xpu, mtia or maia.")
@click.option("--against", metavar="TARGET", help="Print only what another device type treats otherwise, such as cpu.")
@click.option("--json", "json_file", metavar="FILE", help="Write the lists as JSON; - for standard output.")
@click.pass_context
def ops_command(context: click.Context, /, pattern: str, target: str, against: str | None, json_file: str | None) -> None:
    """Print what the installed torch's autocast does to each operation whose name has PATTERN in it, or to all that it knows.

    \b
      lower    runs in the dtype of the region, such as fp16
      fp32     runs in fp32
      promote  runs in the widest dtype among its arguments
      banned   raises
      as_is    runs in whatever it is given

    PATTERN is a part of a name, or a pattern with * and ?; upper and lower case are the same.

    \b
    Examples:
        halfstep ops softmax
        halfstep ops '*norm*' --target cpu
        halfstep ops --target cuda --against cpu

    \b
    Exit codes: 0 all is well, 2 it could not run, such as for a name that no operation has.
    """  # noqa: D301 - click reads \\b as "keep these lines"
    if json_file is not None:
        check_outputs(json_file=json_file, html_file=None)
    if against is not None and against == target:
        raise ConfigurationError(f"--against {against} is the target itself. Name another device type, such as {_other(target)}.")
    # It loads torch, which the help must not wait for.
    from halfstep.numerics import find_treatments  # noqa: PLC0415

    lists = find_treatments(pattern, target=target, against=against)
    publish(lists, ops_document(lists), json_file=json_file, html_file=None)
    context.exit(ExitCode.FINE)


def _other(target: str) -> str:
    return "cpu" if target != "cpu" else "cuda"
