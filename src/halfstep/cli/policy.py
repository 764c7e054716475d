"""`halfstep policy`."""

from __future__ import annotations

import click

from halfstep.cli.exit_codes import ExitCode
from halfstep.cli.outputs import check_outputs, progress_bar, publish, task_output
from halfstep.report import policy_document

__all__ = ["policy_group"]


@click.group("policy", short_help="Show what a policy does to a task: precision, reason and casts.")
def policy_group() -> None:
    """Policies: which precision each module and operation of a model runs in."""


@policy_group.command("show", short_help="Show which override decides about each module, and the casts it adds.")
@click.argument("policy")
@click.argument("task")
@click.option("--seed", type=click.IntRange(min=0, max=2**32 - 1), default=0, show_default=True, help="What the task is made from.")
@click.option("--device", default="auto", show_default=True, metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")
@click.option("--json", "json_file", metavar="FILE", help="Write what was found as JSON; - for standard output.")
@click.option("--html", "html_file", metavar="FILE", help="Write a report: one file, readable offline.")
@click.pass_context
def show_command(
    context: click.Context, /, policy: str, task: str, seed: int, device: str, json_file: str | None, html_file: str | None
) -> None:
    """Show what POLICY does to TASK: the precision of each module and why, what each override is about, and the casts it adds.

    POLICY is the path of a TOML file, or a text: a default precision (fp32, bf16, fp16 or auto), and overrides by the path of a module, by
    class or by operation. Later overrides win. A class of your own is written class:package.Name, or class:Name. O0 to O3 are Apex's
    levels.

    \b
        'fp16; decoder.*.attn=fp32; torch.nn.LayerNorm=fp32; op:softmax=fp32'

    The same as a file:

    \b
        default = "fp16"
    \b
        [[override]]
        module = "decoder.*.attn"
        precision = "fp32"
    \b
        [[override]]
        class = "torch.nn.LayerNorm"
        precision = "fp32"
    \b
        [[override]]
        op = "softmax"
        precision = "fp32"

    TASK names a function that makes the model, the optimizer, the loss and the batches: path/to/file.py:task or package.module:task.

    One training step runs under the policy, and one without each of its overrides; no weight changes. Where the device emulates a
    precision, as most CPUs do fp16, a step of a large model may take minutes.

    \b
    Example:
        halfstep policy show 'bf16; layers.*.norm?=fp32' train.py:task

    \b
    Exit codes: 0 all is well, 1 an override has no effect, 2 it could not run, 130 Ctrl-C.
    An override has no effect when it matches nothing, when later ones decide about all that it
    matches, or when none of that was called in the step. A class of torch's that the model lacks
    is no such case, since a policy may serve many models: that is shown, and the exit code is 0.
    """  # noqa: D301 - click reads \\b as "keep these lines"
    check_outputs(json_file=json_file, html_file=html_file)
    # It loads torch, which the help must not wait for.
    from halfstep.coverage import check_policy_first, policy_effect  # noqa: PLC0415

    check_policy_first(policy, task)
    with task_output(json_file), progress_bar() as progress:
        effect = policy_effect(policy, task, seed=seed, device=device, progress=progress)
    publish(effect, policy_document(effect), json_file=json_file, html_file=html_file)
    context.exit(ExitCode.FINDINGS if effect.findings else ExitCode.FINE)
