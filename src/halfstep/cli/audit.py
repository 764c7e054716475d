"""`halfstep audit`."""

from __future__ import annotations

import click

from halfstep.cli.exit_codes import ExitCode
from halfstep.cli.outputs import check_outputs, progress_bar, publish, task_output
from halfstep.report import audit_document

__all__ = ["audit_command"]


@click.command("audit", short_help="Look at one training step, op by op: lowered, kept in fp32, casts, range.")
@click.argument("task")
@click.option("--precision", metavar="PRECISION", help="fp16, bf16, auto, or a policy.  [default: fp16 with --target, else auto]")
@click.option("--target", metavar="TARGET", help="Rehearse the numerics of cuda, xpu, mtia, maia or cpu on this CPU.")
@click.option("--seed", type=click.IntRange(min=0, max=2**32 - 1), default=0, show_default=True, help="What the task is made from.")
@click.option("--device", default="auto", show_default=True, metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")
@click.option("--json", "json_file", metavar="FILE", help="Write what was found as JSON; - for standard output.")
@click.option("--html", "html_file", metavar="FILE", help="Write a report: one file, readable offline.")
@click.pass_context
def audit_command(
    context: click.Context,
    /,
    task: str,
    precision: str | None,
    target: str | None,
    seed: int,
    device: str,
    json_file: str | None,
    html_file: str | None,
) -> None:
    """Look at one training step of TASK, op by op: what runs lowered, what stays in fp32 and why, and how much range is left.

    TASK names a function that makes the model, the optimizer, the loss and the batches: path/to/file.py:task or package.module:task.

    The forward and the backward pass run once under a trace, with the loss scale that training begins with; no weight changes. Shown are
    the share of operations and of time that run in half precision, the operations that stay in fp32, with the reason, casts, the places
    where most values become zero or subnormal, and for each module how many powers of two lie between its largest value and the end of the
    format. Where gradients overflow, the scale is lowered as training would lower it, and both are told.

    Without a GPU, --target cuda shows what CUDA's autocast would do, and is much quicker than the half kernels of most CPUs.

    \b
    Example:
        halfstep audit train.py:task --target cuda --precision fp16

    \b
    Exit codes: 0 all is well, 1 something is not finite at any loss scale, 2 it could not run,
    130 Ctrl-C.
    """  # noqa: D301 - click reads \\b as "keep these lines"
    check_outputs(json_file=json_file, html_file=html_file)
    # It loads torch, which the help must not wait for.
    from halfstep.audit import audit_task  # noqa: PLC0415

    precision = precision or ("auto" if target is None else "fp16")
    with task_output(json_file), progress_bar() as progress:
        audit = audit_task(task, precision=precision, target=target, seed=seed, device=device, progress=progress)
    publish(audit, audit_document(audit), json_file=json_file, html_file=html_file)
    context.exit(ExitCode.FINDINGS if audit.has_findings else ExitCode.FINE)
