"""`halfstep compare`."""

from __future__ import annotations

from typing import Any

import click

import halfstep
from halfstep.cli.exit_codes import ExitCode
from halfstep.cli.outputs import check_outputs, progress_bar, publish, task_output
from halfstep.errors import ConfigurationError
from halfstep.report import comparison_document

__all__ = ["compare_command"]


@click.command("compare", short_help="Measure fp32 against bf16 and fp16 on a task: time, memory, loss.")
@click.argument("task")
@click.option("--precisions", default="fp32,bf16,fp16", show_default=True, metavar="LIST", help="What to measure; fp32 is the baseline.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="POLICY",
    help="A policy to measure beside them: a TOML file, or a text such as 'fp16; head=fp32; class:Block=fp32'. May be repeated.",
)
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
@click.option(
    "--target",
    metavar="TARGET",
    help="Rehearse the numerics of a device that is not here, such as cuda, on the CPU: losses and skipped steps, not time or memory.",
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

    The precisions, and the policies given by --policy, run in turns in one process, from the same seeds. Ctrl-C prints what is known
    so far. What a policy does to each module, whether each of its overrides has an effect, and what its casts are, shows
    `halfstep policy show`.

    No GPU at hand? --target cuda trains on the CPU with the numerics of a GPU, casts, storage and rounding, at about the cost of fp32. It
    measures whether a precision trains as fp32 does there, which steps are skipped and where the loss scale ends. It measures neither time
    nor memory, and goes with neither --device cuda nor --compile.

    \b
    Exit codes: 0 all is well, 1 a precision trains worse or fails, 2 it could not run, 130 Ctrl-C.
    """  # noqa: D301 - click reads \\b as "keep these lines"
    check_outputs(json_file=json_file, html_file=html_file)
    seeds = _parse_seeds(options["seeds"])
    with task_output(json_file), progress_bar() as progress:
        comparison = halfstep.compare(
            options["task"],
            precisions=[name.strip() for name in options["precisions"].split(",")],
            policies=list(options["policies"]),
            steps=options["steps"],
            warmup=options["warmup"],
            seeds=seeds,
            device=options["device"],
            channels_last=options["channels_last"],
            compile=options["compile_model"],
            loss_scale=options["loss_scale"],
            max_slowdown=options["max_slowdown"],
            target=options["target"],
            progress=progress,
        )
    publish(comparison, comparison_document(comparison), json_file=json_file, html_file=html_file)
    if comparison.interrupted:
        context.exit(ExitCode.INTERRUPTED)
    findings = any(verdict.loss_parity == "worse" for verdict in comparison.verdicts)
    failures = any(run.outcome == "failed" for run in comparison.runs)
    context.exit(ExitCode.FINDINGS if findings or failures else ExitCode.FINE)


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
