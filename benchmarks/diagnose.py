"""How good is a diagnosis, and what does it cost? Planted overflows, beside what else looks out for them.

    python benchmarks/diagnose.py                                # 100 plants and 50 healthy seeds
    python benchmarks/diagnose.py --plants 4 --seeds 2 --quick   # under two minutes
    python benchmarks/diagnose.py --peers-only                   # without halfstep.diagnose

A plant is a Transformer of twelve layers in which exactly one operation of the fp16 step overflows, forward or backward, at every loss
scale; in fp32 all is finite (tests/diagnosis/plants.py). Kinds, layers, places and sizes are drawn from a seed. Measured on each: whether
`halfstep.diagnose` names the operation, the module and the pass that were planted, whether a remedy is verified, how often it replayed
the step, and how long it took, from the task's factory to the diagnosis, in fp32 steps of the same model. Healthy seeds tell how often it
finds something where there is nothing.

Beside it run `torch.autograd.detect_anomaly` and, where transformers is installed, its `DebugUnderflowOverflow`: on one step of the same
model and batch with loss scale 1. Nothing here is native fp16: all of it has the numerics of CUDA, as `halfstep.rehearse("cuda")` computes
them. To open the rehearsal, which they would not need on a GPU, and to make the model are not timed. A peer names something where it
raises an error. Its module is right where the frame that DebugUnderflowOverflow shows last is that of the planted module; detect_anomaly
knows no modules. Its operation is right where detect_anomaly names the node of autograd and the line of code that the planted operation
has by a trace; DebugUnderflowOverflow names no operations.

The runs on one plant take turns, in an order that is new each time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import platform
import random
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import halfstep
from halfstep.comparison.statistics import median_interval
from halfstep.numerics import is_foreign
from halfstep.records.diagnosis import Diagnosis
from halfstep.records.trace import OpRecord
from halfstep.task import Task, TaskFactory, fresh_task

sys.path.insert(0, str(Path(__file__).parents[1]))  # The plants belong to the tests.
from tests.diagnosis.plants import Plant, healthy_task, planted_task, plants

CPU = torch.device("cpu")
ANOMALY, DEBUG = "detect_anomaly", "DebugUnderflowOverflow"


def make(factory: TaskFactory, seed: int) -> Task:
    """A fresh task."""
    with fresh_task(factory, seed=seed, device=CPU) as task:
        return task


def step(task: Task, *, half: bool) -> None:
    """The forward and the backward pass, with loss scale 1."""
    with torch.autocast("cpu", dtype=torch.float16, enabled=half):  # halfstep: ignore[HS012] - its time, not its gradients
        loss = task.loss(task.model, next(iter(task.batches)))
    loss.backward()  # type: ignore[no-untyped-call]


def time_fp32(task: Task) -> float:
    """Seconds of one fp32 step, with the optimizer's."""
    start = time.perf_counter()
    step(task, half=False)
    task.optimizer.step()
    task.optimizer.zero_grad()
    return time.perf_counter() - start


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a peer says of one step.

    Attributes:
        seconds: How long the step took, until it was told.
        text: All that was said; empty where nothing was.
        module: The path of the module that it names; `None` where it names none.
        node: The node of autograd that it names; `None` where it names none.
        line: The line of the user's code that it names, with its file; `None` where it names none.
    """

    seconds: float
    text: str = ""
    module: str | None = None
    node: str | None = None
    line: tuple[str, int] | None = None


def run_anomaly(task: Task) -> Finding:
    """One step under `torch.autograd.detect_anomaly`."""
    text = ""
    with halfstep.rehearse("cuda"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = time.perf_counter()
        try:
            with torch.autograd.detect_anomaly(check_nan=True):
                step(task, half=True)
        except RuntimeError as error:
            text = str(error)
        seconds = time.perf_counter() - start
    if not text:
        return Finding(seconds=seconds)
    node = re.search(r"Function '(\w+)' returned nan", text)
    shown = "\n".join(str(each.message) for each in caught)
    lines = [(file, int(number)) for file, number in re.findall(r'File "([^"]+)", line (\d+)', shown) if not is_foreign(file)]
    return Finding(seconds=seconds, text=text, node=node and node.group(1), line=lines[-1] if lines else None)


def run_debug(task: Task) -> Finding:
    """One step under the `DebugUnderflowOverflow` of transformers."""
    from transformers.debug_utils import DebugUnderflowOverflow

    raised, shown = False, io.StringIO()
    with halfstep.rehearse("cuda"), contextlib.redirect_stdout(shown):
        start = time.perf_counter()
        look_out: Any = DebugUnderflowOverflow  # It is typed where it is installed, and unknown elsewhere.
        look_out(task.model)
        try:
            step(task, half=True)
        except ValueError as error:
            raised = True
            if "inf/nan detected" not in str(error):
                raise
        seconds = time.perf_counter() - start
    if not raised:
        return Finding(seconds=seconds)
    # A frame begins with a line that holds the module's path and the name of its class.
    frames = re.findall(r"^ {17,}(\S*) ([A-Z]\w*)$", shown.getvalue(), re.MULTILINE)
    return Finding(seconds=seconds, text=shown.getvalue(), module=frames[-1][0] if frames else None)


def installed_peers() -> dict[str, Callable[[Task], Finding]]:
    """The peers that are installed; a line is printed for one that is not."""
    try:
        import transformers.debug_utils  # noqa: F401
    except ImportError:
        print(f"{DEBUG}: skipped, since transformers is not installed (make peers)")
        return {ANOMALY: run_anomaly}
    return {ANOMALY: run_anomaly, DEBUG: run_debug}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found in one trial, and whether that is what was planted.

    Attributes:
        names: Whether it names anything.
        module: Whether the module is the planted one.
        op: Whether the operation is.
        exact: Whether both are, and the pass.
        ratio: How long it took, in fp32 steps.
    """

    names: bool
    module: bool
    op: bool
    exact: bool
    ratio: float


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One plant, and what each tool says of it.

    Attributes:
        plant: The plant.
        verdicts: The verdict on each tool, by its name.
        diagnosis: That of halfstep; `None` where it was left out.
    """

    plant: Plant
    verdicts: dict[str, Verdict]
    diagnosis: Diagnosis | None


def planted_origin(plant: Plant, seed: int) -> OpRecord:
    """The operation that overflows, as a trace sees it."""
    task = make(planted_task(plant), seed)
    with halfstep.rehearse("cuda"), halfstep.trace(task.model) as seen:
        step(task, half=True)
    origin = seen.origin
    expected = (plant.expected_op, plant.expected_module, plant.expected_phase)
    if origin is None or (origin.op, origin.site.module, origin.phase) != expected:
        raise RuntimeError(f"{plant} does not overflow where it says: a trace finds {origin}.")
    return origin


def judge_peer(finding: Finding, origin: OpRecord, *, ratio: float) -> Verdict:
    """Whether a peer names what overflows."""
    module = finding.module == origin.site.module
    names = finding.node is not None and finding.line == (str(Path(origin.site.file).resolve()), origin.site.line)
    op = names and _is_of_node(origin, str(finding.node))
    return Verdict(names=bool(finding.text), module=module, op=op, exact=module and op, ratio=ratio)


def _is_of_node(origin: OpRecord, node: str) -> bool:
    """Whether an operation is what a node of autograd is named after, as aten.addmm.default is for AddmmBackward0."""
    return node == origin.node if origin.node else node.lower().split("backward")[0] == origin.op.split(".")[1].replace("_", "")


def judge(diagnosis: Diagnosis, plant: Plant, *, ratio: float) -> Verdict:
    """Whether a diagnosis names what overflows."""
    origin = diagnosis.origin
    if origin is None:
        return Verdict(names=False, module=False, op=False, exact=False, ratio=ratio)
    module, op = origin.site.module == plant.expected_module, origin.op == plant.expected_op
    return Verdict(names=True, module=module, op=op, exact=module and op and origin.phase == plant.expected_phase, ratio=ratio)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to measure.

    Attributes:
        rounds: How often each tool runs on each plant.
        max_steps: How many steps halfstep trains until it takes a model for healthy.
        halfstep: Whether halfstep runs, and not only its peers.
        peers: The peers, by name.
        order: What the tools take turns by.
    """

    rounds: int
    max_steps: int
    halfstep: bool
    peers: dict[str, Callable[[Task], Finding]]
    order: random.Random


def diagnose(factory: TaskFactory, seed: int, settings: Settings) -> Diagnosis:
    """The diagnosis of a task, on the CPU with the numerics of CUDA."""
    found: Diagnosis = halfstep.diagnose(factory, precision="fp16", target="cuda", max_steps=settings.max_steps, seed=seed, device="cpu")
    return found


def try_plant(plant: Plant, seed: int, settings: Settings) -> Trial:
    """Runs all tools on one plant, by turns."""
    factory = planted_task(plant)
    origin, trained = planted_origin(plant, seed), make(factory, seed)
    time_fp32(trained)  # The first step warms up.
    seconds: dict[str, list[float]] = {}
    findings: dict[str, Finding] = {}
    diagnosis: Diagnosis | None = None
    tools = ["fp32", *(["halfstep"] if settings.halfstep else []), *settings.peers]
    for _ in range(settings.rounds):
        for tool in settings.order.sample(tools, k=len(tools)):
            if tool == "fp32":
                taken = median(time_fp32(trained) for _ in range(3))
            elif tool == "halfstep":
                start = time.perf_counter()
                diagnosis = diagnose(factory, seed, settings)
                taken = time.perf_counter() - start
            else:
                findings[tool] = settings.peers[tool](make(factory, seed))
                taken = findings[tool].seconds
            seconds.setdefault(tool, []).append(taken)
    ratios = {tool: median(times) / median(seconds["fp32"]) for tool, times in seconds.items()}
    verdicts = {tool: judge_peer(findings[tool], origin, ratio=ratios[tool]) for tool in settings.peers}
    if diagnosis is not None:
        verdicts = {"halfstep": judge(diagnosis, plant, ratio=ratios["halfstep"]), **verdicts}
    return Trial(plant=plant, verdicts=verdicts, diagnosis=diagnosis)


GROUPS: dict[str, Callable[[Plant], bool]] = {
    "all": lambda _: True,
    "forward, the loss breaks": lambda plant: plant.phase == "forward" and not plant.is_hidden,
    "forward, nothing breaks": lambda plant: plant.is_hidden,
    "backward": lambda plant: plant.phase == "backward",
}


def report_plants(trials: list[Trial]) -> None:
    """Prints what each tool finds, for each group of plants."""
    for group, belongs in GROUPS.items():
        chosen = [trial for trial in trials if belongs(trial.plant)]
        if not chosen:
            continue
        print(f"\nplants: {group} ({len(chosen)})")
        print(f"  {'tool':<24}{'names something':>17}{'right module':>14}{'right op':>10}{'exact':>8}   fp32 steps: median [95 %], most")
        for tool in chosen[0].verdicts:
            verdicts = [trial.verdicts[tool] for trial in chosen]
            counts = [share(getattr(verdict, name) for verdict in verdicts) for name in ("names", "module", "op", "exact")]
            print(f"  {tool:<24}{counts[0]:>17}{counts[1]:>14}{counts[2]:>10}{counts[3]:>8}", end="   ")
            print(ratios_text([verdict.ratio for verdict in verdicts]))


def share(answers: Iterable[bool]) -> str:
    """Such as `90 %`."""
    found = list(answers)
    return f"{100 * sum(found) / len(found):.0f} %"


def report_diagnoses(trials: list[Trial]) -> None:
    """Prints what halfstep's diagnoses hold besides the origin, and where the origin is not the planted one."""
    diagnosed = [(trial, trial.diagnosis) for trial in trials if trial.diagnosis is not None]
    if not diagnosed:
        return
    verified = [trial.verdicts["halfstep"].ratio for trial, diagnosis in diagnosed if diagnosis.verified]
    print(f"\nhalfstep: verified remedies {share(diagnosis.verified for _, diagnosis in diagnosed)} of {len(diagnosed)}")
    if verified:
        print(f"  until a verified diagnosis, in fp32 steps: {ratios_text(verified)}")
    for trial, diagnosis in diagnosed:
        if not (trial.verdicts["halfstep"].exact and diagnosis.verified):
            plant, origin = trial.plant, diagnosis.origin
            said = "no origin" if origin is None else f"{origin.op}, {origin.site.module}, {origin.phase}"
            print(f"  {plant.kind}: {plant.expected_op}, {plant.expected_module}, {plant.phase}; {plant.factor:.4g}, {plant.order}-norm")
            print(f"    was diagnosed as {diagnosis.cause}: {said}; {'verified' if diagnosis.verified else 'not verified'}")


def ratios_text(ratios: list[float]) -> str:
    """Their median with its 95 % interval, and the largest."""
    interval = median_interval(ratios)
    return f"{interval.median:.1f} [{interval.low:.1f}, {interval.high:.1f}], {max(ratios):.1f}"


def report_replays(diagnoses: list[Diagnosis]) -> None:
    """Prints how often steps were replayed."""
    if not diagnoses:
        return
    print(f"\n  {'cause':<14}{'diagnoses':>10}   replays: median, most")
    for cause, count in Counter(diagnosis.cause for diagnosis in diagnoses).most_common():
        replays = [diagnosis.replays for diagnosis in diagnoses if diagnosis.cause == cause]
        print(f"  {cause:<14}{count:>10}   {median(replays):g}, {max(replays)}")


def try_healthy(seeds: int, settings: Settings) -> list[Diagnosis]:
    """Runs all tools on healthy models, and prints how often they find something."""
    diagnoses: list[Diagnosis] = []
    alarms = dict.fromkeys(settings.peers, 0)
    for seed in range(seeds):
        show_progress(f"healthy seed {seed + 1} of {seeds}")
        if settings.halfstep:
            diagnoses.append(diagnose(healthy_task, seed, settings))
        for name, run in settings.peers.items():
            alarms[name] += bool(run(make(healthy_task, seed)).text)
    print(f"\nhealthy seeds: {seeds}")
    if diagnoses:
        print(f"  halfstep: healthy {share(diagnosis.cause == 'healthy' for diagnosis in diagnoses)}")
        for seed, diagnosis in enumerate(diagnoses):
            if diagnosis.cause != "healthy":
                print(f"    seed {seed} was diagnosed as {diagnosis.cause}: {diagnosis.explanation}")
    for name, count in alarms.items():
        print(f"  {name}: nothing is named in {seeds - count} of {seeds}")
    return diagnoses


def show_progress(text: str) -> None:
    """Writes where it is, over what was written before."""
    print(f"{text:<60}", end="\r", file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plants", type=int, default=100, help="how many planted models")
    parser.add_argument("--seeds", type=int, default=50, help="how many healthy ones")
    parser.add_argument("--seed", type=int, default=0, help="what the plants are drawn from")
    parser.add_argument("--rounds", type=int, default=3, help="how often each tool runs on each plant")
    parser.add_argument("--max-steps", type=int, default=100, help="of halfstep.diagnose")
    parser.add_argument("--quick", action="store_true", help="one round, and 10 steps at most")
    parser.add_argument("--peers-only", action="store_true", help="leave halfstep.diagnose out")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    return parser.parse_args()


def main() -> None:
    """Measures what the command line asks for."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {arguments.threads} thread(s)", flush=True)
    settings = Settings(
        rounds=1 if arguments.quick else arguments.rounds,
        max_steps=10 if arguments.quick else arguments.max_steps,
        halfstep=not arguments.peers_only,
        peers=installed_peers(),
        order=random.Random(arguments.seed),
    )
    trials = []
    for number, plant in enumerate(plants(arguments.plants, seed=arguments.seed)):
        show_progress(f"plant {number + 1} of {arguments.plants}: {plant.kind}")
        trials.append(try_plant(plant, number, settings))
    report_plants(trials)
    report_diagnoses(trials)
    healthy = try_healthy(arguments.seeds, settings)
    report_replays([*(trial.diagnosis for trial in trials if trial.diagnosis is not None), *healthy])


if __name__ == "__main__":
    main()
