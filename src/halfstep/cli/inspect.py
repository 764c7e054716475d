"""`halfstep inspect`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import click

from halfstep.archive import inspect_path, places_of, read_record, verify
from halfstep.cli.exit_codes import ExitCode
from halfstep.cli.outputs import check_outputs, progress_bar, publish
from halfstep.errors import CheckpointError
from halfstep.records import CheckpointRecord, Inspection, Inspections

__all__ = ["inspect_command"]


@click.command("inspect", short_help="Show what checkpoints hold, and whether every byte is what was saved.")
@click.argument("checkpoints", nargs=-1, required=True, metavar="CHECKPOINT...")
@click.option("--quick", is_flag=True, help="Do not read the tensors: tell what is in a file of many GB at once.")
@click.option("--tensors", is_flag=True, help="List every tensor, with its type and shape.")
@click.option("--json", "json_file", metavar="FILE", help="Write what was found as JSON; - for standard output.")
@click.pass_context
def inspect_command(context: click.Context, /, checkpoints: tuple[str, ...], json_file: str | None, *, quick: bool, tensors: bool) -> None:
    """Show what checkpoints hold, and find out whether every byte of them is what was saved: no torch is needed.

    CHECKPOINT is a file or a folder that halfstep.save_checkpoint() or halfstep.Checkpointer wrote, or a folder of such checkpoints. Those
    are listed with the newest first, and the newest valid one is named: it is the one that Checkpointer.resume() goes on from.

    Nothing in a checkpoint is loaded or executed, so that one from somebody else can be looked at. A damaged one is still shown as far as
    it can be read, and what is wrong is named: a tensor, the structure, or what lies around them.

    All of a checkpoint is read, which takes about a second for 3 GB on a disk that is fast enough. With --quick its tensors are not, and
    damage to them is not seen.

    \b
    Examples:
        halfstep inspect checkpoints/step-00000100.pt
        halfstep inspect checkpoints
        halfstep inspect checkpoints --quick --json - | jq '.inspections[] | select(.fault == "") | .path'
        halfstep inspect checkpoints/step-00000100.pt --tensors | grep weight

    \b
    Exit codes: 0 all are valid, 1 one is damaged, 2 there is no checkpoint, or it could not be read, 130 Ctrl-C.
    """  # noqa: D301 - click reads \\b as "keep these lines"
    check_outputs(json_file=json_file, html_file=None)
    # It loads numpy, which the help must not wait for.
    from halfstep.report.checkpoints import checkpoints_document  # noqa: PLC0415

    # What is not there is told before much is read.
    places = [place for path in checkpoints for place in places_of(Path(path))]
    inspections = tuple(_inspected(places, check=read_record if quick else verify))
    if not inspections:
        raise CheckpointError(f"{', '.join(map(str, places))} was removed before it was looked at. Try again.")
    found = Inspections(inspections=inspections)
    publish(found, checkpoints_document(found, quick=quick, tensors=tensors), json_file=json_file, html_file=None)
    context.exit(ExitCode.FINDINGS if found.has_findings else ExitCode.FINE)


def _inspected(places: Sequence[Path], *, check: Callable[[Path], CheckpointRecord]) -> Iterator[Inspection]:
    with progress_bar() as show:
        for done, place in enumerate(places):
            show(done, len(places), str(place))
            # A run that goes on removes its older ones.
            with suppress(CheckpointError):
                yield inspect_path(place, check=check)
