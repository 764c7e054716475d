"""`halfstep diagnose`."""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import click

from halfstep.cli.exit_codes import ExitCode
from halfstep.cli.outputs import check_outputs, progress_bar, publish, task_output
from halfstep.errors import ConfigurationError
from halfstep.report import diagnosis_document

__all__ = ["diagnose_command"]


@click.command("diagnose", short_help="Find the operation that breaks a training step, why, and what helps.")
@click.argument("task")
@click.option("--precision", default="fp16", show_default=True, metavar="PRECISION", help="fp16, bf16, auto, or a policy.")
@click.option("--target", metavar="TARGET", help="Rehearse the numerics of cuda, xpu, mtia, maia or cpu on this CPU.")
@click.option(
    "--max-steps", type=click.IntRange(min=1), default=100, show_default=True, help="Train so many steps at most until one breaks."
)
@click.option(
    "--loss-scale",
    default="dynamic",
    show_default=True,
    metavar="SCALE",
    help="dynamic, none, or the scale that dynamic scaling begins with, such as 1024.",
)
@click.option("--seed", type=click.IntRange(min=0, max=2**32 - 1), default=0, show_default=True, help="What the task is made from.")
@click.option("--device", default="auto", show_default=True, metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")
@click.option("--json", "json_file", metavar="FILE", help="Write what was found as JSON; - for standard output.")
@click.option("--html", "html_file", metavar="FILE", help="Write a report: one file, readable offline.")
@click.pass_context
def diagnose_command(context: click.Context, /, json_file: str | None, html_file: str | None, **options: Any) -> None:
    """Find out why training TASK in half precision breaks: which operation, for what cause, and what helps.

    TASK names a function that makes the model, the optimizer, the loss and the batches: path/to/file.py:task or package.module:task.

    The task is trained until a step is skipped, or is not finite. That step is replayed under a trace, which names the first operation
    whose result is not finite while what it was given is. Further replays, such as in fp32 and at other loss scales, tell the causes apart.
    Then a remedy is tried: it is called verified where that step and three more are clean with it. Where no step breaks, lost accuracy,
    gradients that become zero and updates that change nothing are looked for.

    Between replays the parameters, buffers and random numbers are put back, so that all of them see the same step.

    Without a GPU, --target cuda breaks where CUDA's numerics would, and is much quicker than the half kernels of most CPUs.

    \b
    Example:
        halfstep diagnose train.py:task --target cuda

    \b
    Exit codes: 0 nothing is wrong, 1 something is, 2 it could not run, 130 Ctrl-C.
    """  # noqa: D301 - click reads \\b as "keep these lines"
    check_outputs(json_file=json_file, html_file=html_file)
    loss_scale = _parse_loss_scale(options["loss_scale"])
    # It loads torch, which the help must not wait for.
    from halfstep.diagnosis import diagnose  # noqa: PLC0415

    with task_output(json_file), progress_bar() as progress:
        diagnosis = diagnose(
            options["task"],
            precision=options["precision"],
            target=options["target"],
            max_steps=options["max_steps"],
            loss_scale=loss_scale,
            seed=options["seed"],
            device=options["device"],
            progress=progress,
        )
    publish(diagnosis, diagnosis_document(diagnosis), json_file=json_file, html_file=html_file)
    if diagnosis.interrupted:
        context.exit(ExitCode.INTERRUPTED)
    context.exit(ExitCode.FINDINGS if diagnosis.is_finding else ExitCode.FINE)


def _parse_loss_scale(text: str) -> Literal["dynamic", "none"] | float:
    if text in {"dynamic", "none"}:
        return cast("Literal['dynamic', 'none']", text)
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not 0 < scale < math.inf:
        raise ConfigurationError(f"--loss-scale {text!r} is neither dynamic, none nor a positive number, such as 1024.")
    return scale
