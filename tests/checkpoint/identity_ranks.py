"""What runs on each rank, for tests of runs of several ranks that are stopped and gone on with."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

from halfstep import MixedPrecision
from halfstep.checkpoint import Checkpointer, load_checkpoint, save_checkpoint
from halfstep.checkpoint.names import canonical_names
from halfstep.distributed import fsdp_policy
from halfstep.errors import HalfstepError, HalfstepWarning
from tests.checkpoint.cases import SparseWords, Tied, engine, mlp
from tests.checkpoint.cases import loop as case_loop
from tests.checkpoint.runs import Build, Facts, Run, batch, facts, seeded, state, sweep, trained

__all__ = ["CASES", "SAVED", "STEPS", "amp_of", "failures", "gathered", "interrupted", "loaded", "plain", "saved"]

STEPS: Final = 14
SAVED: Final = 7
LARGE: Final = (2, 3, 8, 14, 15, 25)  # of both ranks together, in turns
INFINITE: Final = (5, 11, 26)


def placed(kind: str, model: nn.Module, **settings: Any) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model, **settings)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = fsdp_policy(settings.pop("policy", "fp32"))
    if isinstance(model, nn.Sequential) and settings.pop("nested", True):
        fully_shard(model[0], mesh=mesh, mp_policy=policy, **settings)
    fully_shard(model, mesh=mesh, mp_policy=policy, **settings)
    return model


def body_of(policy: str) -> nn.Module:
    if policy == "fp32":
        return mlp()
    # Batch normalization with parameters in half precision is none of torch's.
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1))


def on_ranks(kind: str, precision: str, *, accumulate: int = 1, knows_end: bool = False, **settings: Any) -> Build:
    """A run of several ranks, each with batches and random numbers of its own."""

    def made() -> Run:
        model = placed(kind, body_of(settings.get("policy", "fp32")), **settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        schedule = lr_scheduler.CosineAnnealingLR(optimizer, 9)
        return loop(engine(model, optimizer, precision, scheduler=schedule, accumulate=accumulate), knows_end=knows_end)

    return made


def of_body(kind: str, body: Callable[[], nn.Module], *, accumulate: int = 2) -> Build:
    """A run of a model of its own kind."""

    def made() -> Run:
        model = placed(kind, body())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return loop(engine(model, optimizer, "bf16", accumulate=accumulate, max_grad_norm=None), knows_end=False)

    return made


def loop(amp: MixedPrecision, *, knows_end: bool) -> Run:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    bad: dict[str, Sequence[int]] = {"large": LARGE} if amp.scaler is not None else {"infinite": INFINITE}
    begun: list[Any] = []

    def numbers(start: int) -> Any:
        if not begun:
            begun.append(amp.micro_batches(range(start, STEPS)) if knows_end else iter(range(start, STEPS)))
        return begun[0]

    def step(number: int) -> Facts:
        x, y = batch(ranks * next(numbers(number)) + rank, **bad)
        with amp.autocast():
            loss = F.mse_loss(amp.model(x), y)
        amp.backward(loss)
        return facts(loss, amp.step())

    return Run(engines=amp, step=step)


CASES: Final[Mapping[str, Build]] = {
    "ddp fp32": on_ranks("ddp", "fp32"),
    "ddp bf16": on_ranks("ddp", "bf16"),
    "ddp fp16": on_ranks("ddp", "fp16"),
    "ddp fp16 accumulated": on_ranks("ddp", "fp16", accumulate=3),
    "ddp bf16 accumulated, known end": on_ranks("ddp", "bf16", accumulate=3, knows_end=True),
    "ddp fp16 accumulated, views": on_ranks("ddp", "fp16", accumulate=3, gradient_as_bucket_view=True),
    "ddp fp16, static graph": on_ranks("ddp", "fp16", static_graph=True),
    "ddp fp16 accumulated, own buffers": on_ranks("ddp", "fp16", accumulate=3, broadcast_buffers=False),
    "ddp fp32 accumulated, static graph": on_ranks("ddp", "fp32", accumulate=3, static_graph=True),
    "ddp sparse": of_body("ddp", SparseWords),
    "ddp tied": of_body("ddp", Tied),
    "fsdp tied": of_body("fsdp", Tied),
    "fsdp fp32": on_ranks("fsdp", "fp32"),
    "fsdp bf16": on_ranks("fsdp", "bf16", policy="bf16"),
    "fsdp fp16": on_ranks("fsdp", "fp16"),
    "fsdp fp16 accumulated": on_ranks("fsdp", "fp16", accumulate=3),
    "fsdp bf16 accumulated, known end": on_ranks("fsdp", "bf16", accumulate=3, knows_end=True, policy="bf16"),
    "fsdp fp32 accumulated, whole": on_ranks("fsdp", "fp32", accumulate=3, nested=False),
}


def interrupted(rank: int, folder: Path, places: Mapping[str, Sequence[int]]) -> dict[str, list[Facts]]:
    """Stops each run at some steps, and makes sure on every rank that it is the one that never stopped; returns what steps say."""
    said = {}
    for name, at in places.items():
        place = folder / name.replace(",", "").replace(" ", "-")
        place.mkdir(exist_ok=True)
        try:
            said[name] = sweep(CASES[name], at=at, folder=place, steps=STEPS, rank=rank)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    return said


def gathered(amp: MixedPrecision) -> dict[str, Any]:
    """The weights, and the state of the optimizer of each, by the names that they have without wrappers; whole on every rank."""
    names = canonical_names(amp.model, [name for name, _ in amp.model.named_parameters()])
    found: dict[str, Any] = {}
    for name, parameter in amp.model.named_parameters():
        state = amp.optimizer.state.get(parameter, {})
        for key, value in (("value", parameter), *state.items()):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{names[name]}.{key}"] = whole.detach().flatten().tolist()
    found["lr"] = amp.optimizer.param_groups[0]["lr"]
    found["scale"] = None if amp.scaler is None else amp.scaler.get_scale()
    found["steps"] = amp.state_dict()["steps"]
    return found


def plain(precision: str) -> Run:
    """The same run in one process."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return case_loop(engine(model, optimizer, precision, scheduler=lr_scheduler.CosineAnnealingLR(optimizer, 9)))


def saved(rank: int, folder: Path, precision: str) -> dict[str, tuple[dict[str, Any], list[Facts], dict[str, str]]]:
    """Trains a run of each kind, saves it in the background, and trains on; returns what it was then, what steps say later, and the end."""
    found = {}
    for kind in ("ddp", "fsdp"):
        run = seeded(on_ranks(kind, precision), 3, rank=rank)
        with Checkpointer(folder / kind, amp=run.engines, every=2, keep=2, background=True) as checkpointer:
            for number in range(SAVED):
                run.step(number)
                checkpointer.save_if_due(number + 1, extra={"rank": rank})
            then = gathered(amp_of(run))
            checkpointer.save(SAVED, extra={"rank": rank})
            said = trained(run, SAVED, STEPS)
        assert [path.name for path in checkpointer.checkpoints()] == ["step-00000007", "step-00000006"]
        found[kind] = then, said, state(run)
    return found


Loaded = tuple[dict[str, Any], tuple[str, ...], Any, list[Facts], dict[str, str]]


def loaded(rank: int, folder: Path, precision: str) -> dict[tuple[str, str], Loaded]:
    """Loads each checkpoint into a run of each kind, which trains on; returns what was loaded, the notes, what is extra, and the rest."""
    found = {}
    for there in ("ddp", "fsdp", "one"):
        for here in ("ddp", "fsdp"):
            run = seeded(on_ranks(here, precision), 5, rank=rank)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", HalfstepWarning)
                info = Checkpointer(folder / there, amp=run.engines).resume()
            assert info is not None
            found[there, here] = gathered(amp_of(run)), info.notes, info.extra, trained(run, SAVED, STEPS), state(run)
    return found


def attempt(call: Callable[[], object], run: Run) -> str:
    """What is raised; nothing may have changed then."""
    before = state(run)
    try:
        call()
    except HalfstepError as error:
        assert state(run) == before
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def failures(rank: int, folder: Path) -> dict[str, str]:
    """What is said on each rank when something goes wrong on one."""
    said = {}
    run = seeded(on_ranks("ddp", "fp16"), 3, rank=rank)
    path = save_checkpoint(folder / "whole", run.engines, step=1)
    trained(run, 0, 2)
    said["saved"] = attempt(lambda: save_checkpoint(path, run.engines, step=2, extra={"x": object()} if rank == 1 else {}), run)
    dist.barrier()
    assert [each.name for each in folder.iterdir()] == ["whole"]
    model = placed("ddp", mlp())
    other = loop(engine(model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), "fp16"), knows_end=False)
    said["loaded"] = attempt(lambda: load_checkpoint(path, (other if rank == 1 else run).engines), other if rank == 1 else run)
    checkpointer = Checkpointer(folder / "several", amp=run.engines)
    checkpointer.save(1)
    damaged = checkpointer.save(2) / "rank-1.pt"
    dist.barrier()
    if rank == 1:
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
    dist.barrier()
    said["damaged"] = attempt(lambda: load_checkpoint(damaged.parent, run.engines), run)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        info = checkpointer.resume()
    assert info is not None
    said["resumed"] = f"{info.step}: {caught[0].message}"
    return said


def amp_of(run: Run) -> MixedPrecision:
    assert isinstance(run.engines, MixedPrecision)
    return run.engines
