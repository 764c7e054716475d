"""Each plant makes the operation that it says overflow, and nothing else; fp32 does not notice it, and an island is a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from halfstep import Policy, rehearse, trace
from halfstep.numerics.tracing import Trace
from halfstep.records.trace import OpRecord
from halfstep.task import Task, fresh_task
from tests.diagnosis.plants import KINDS, LAYERS, PLACES, Plant, healthy_task, planted_task, plants

CPU = torch.device("cpu")

# One of each kind.
PLANTS = plants(len(KINDS), seed=20)

each_plant = pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.kind.replace(" ", "_"))


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """What is tiny only waits for a second thread."""


def step(task: Task, *, half: bool = True, scale: float = 1.0, batch: int = 0) -> Tensor | None:
    """The forward and the backward pass; the loss where it and all gradients are finite."""
    batches = list(task.batches)
    task.model.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16, enabled=half):
        loss = task.loss(task.model, batches[batch])
    (loss * scale).backward()  # type: ignore[no-untyped-call]
    tensors = [loss, *(weight.grad for weight in task.model.parameters() if weight.grad is not None)]
    return loss.detach() if all(bool(tensor.isfinite().all()) for tensor in tensors) else None


def traced(task: Task, *, scale: float = 1.0) -> tuple[Trace, Tensor | None]:
    """The step in fp16 under a trace, in a rehearsal."""
    with rehearse("cuda"), trace(task.model) as seen:
        loss = step(task, scale=scale)
    return seen, loss


def seed_for(order: str) -> int:
    """A seed whose healthy model has its norms there."""
    return 2 if order == "pre" else 3


def made(plant: Plant) -> Task:
    """The task of a plant."""
    with fresh_task(planted_task(plant), seed=seed_for(plant.order), device=CPU) as task:
        return task


@dataclass(frozen=True, kw_only=True)
class Run:
    """A step in fp16.

    Attributes:
        seen: Its trace.
        loss: The loss; `None` where it or a gradient is not finite.
        blocks: What the blocks returned, in order.
    """

    seen: Trace
    loss: Tensor | None
    blocks: list[Tensor]


def run(task: Task) -> Run:
    blocks: list[Tensor] = []
    for block in task.model.get_submodule("blocks").children():
        block.register_forward_hook(lambda _module, _args, output: blocks.append(output.detach()))
    seen, loss = traced(task)
    return Run(seen=seen, loss=loss, blocks=blocks)


@cache
def planted_run(plant: Plant) -> Run:
    return run(made(plant))


@cache
def healthy_run(order: str) -> Run:
    with fresh_task(healthy_task, seed=seed_for(order), device=CPU) as task:
        return run(task)


def place_of(op: OpRecord | None) -> tuple[str, str, str] | None:
    return None if op is None else (op.op, op.site.module, op.phase)


def expected(plant: Plant) -> tuple[str, str, str]:
    return plant.expected_op, plant.expected_module, plant.expected_phase


def with_parents(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]


def helps(path: str, plant: Plant) -> bool:
    """Whether nothing overflows when a module runs in fp32, nor after an update."""
    task = made(plant)
    with Policy.parse(f"fp16; {path}=fp32").apply(task.model):
        seen, loss = traced(task)
        if seen.origin is not None or loss is None:
            return False
        task.optimizer.step()
        with rehearse("cuda"):
            return step(task, batch=1) is not None


@each_plant
def test_the_first_operation_that_breaks_is_the_planted_one(plant: Plant) -> None:
    broken = planted_run(plant)
    origin = broken.seen.origin
    assert place_of(origin) == expected(plant)
    assert (broken.loss is not None) == plant.is_hidden
    assert origin is not None
    assert not origin.has_nonfinite_input
    assert origin.exact_absmax is None or torch.finfo(torch.float16).max < origin.exact_absmax < torch.finfo(torch.float32).max


@each_plant
def test_in_fp32_all_is_finite(plant: Plant) -> None:
    task = made(plant)
    with trace(task.model) as seen:
        loss = step(task, half=False)
    assert (seen.origin, loss is not None) == (None, True)


@each_plant
def test_an_island_around_it_is_a_remedy(plant: Plant) -> None:
    around = [path for path in with_parents(plant.expected_module) if path.startswith(f"blocks.{plant.layer}")]
    assert any(helps(path, plant) for path in around)


@each_plant
def test_what_comes_before_it_is_as_without_it(plant: Plant) -> None:
    blocks, healthy = planted_run(plant).blocks, healthy_run(plant.order).blocks
    assert len(blocks) == len(healthy) == LAYERS
    for number in range(plant.layer if plant.phase == "forward" else LAYERS):
        assert torch.equal(blocks[number], healthy[number])


def test_plants_are_drawn_from_a_seed() -> None:
    assert plants(40, seed=1) == plants(40, seed=1) != plants(40, seed=2)
    assert plants(40, seed=1)[:10] == plants(10, seed=1)


def test_plants_are_of_every_kind_in_every_layer_and_place_before_and_behind_norms() -> None:
    drawn = plants(20 * len(KINDS), seed=0)
    assert [sum(plant.kind == kind for plant in drawn) for kind in KINDS] == [20] * len(KINDS)
    assert {plant.layer for plant in drawn} == set(range(LAYERS))
    assert {plant.place for plant in drawn} == set(PLACES)
    assert {(plant.order, plant.inline) for plant in drawn} == {(order, inline) for order in ("pre", "post") for inline in (False, True)}
    assert {plant.phase for plant in drawn} == {"forward", "backward"}
    assert len({expected(plant) for plant in drawn}) > 300
    assert len({plant.expected_op for plant in drawn}) > 12


@pytest.mark.parametrize("order", ["pre", "post"])
def test_without_a_plant_all_is_finite(order: str) -> None:
    healthy = healthy_run(order)
    assert healthy.loss is not None
    assert healthy.seen.origin is None


def test_without_a_plant_all_is_finite_at_the_scale_that_dynamic_loss_scaling_begins_with() -> None:
    with fresh_task(healthy_task, seed=0, device=CPU) as task:
        seen, loss = traced(task, scale=65536.0)
    assert (seen.origin, loss is not None) == (None, True)
