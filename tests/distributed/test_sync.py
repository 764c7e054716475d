from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.distributed import GradientSync, sync
from halfstep.errors import StepOrderError
from tests.ranks import run_ranks

MICRO_BATCHES = 3

Gradients = dict[str, Tensor | None]


class Net(nn.Module):
    """Has a gradient of every sort: on all ranks, on one rank alone, nowhere, sparse, and of a parameter that is left to itself."""

    _ddp_params_and_buffers_to_ignore = ("ignored.weight",)

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4, sparse=True)
        self.first = nn.Linear(4, 5)
        self.ignored = nn.Linear(5, 5, bias=False)
        self.sometimes = nn.Linear(5, 5)
        self.never = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.last = nn.Linear(5, 1)

    def forward(self, words: Tensor) -> Tensor:
        x = self.frozen(self.ignored(torch.tanh(self.first(self.words(words)))))
        if dist.get_rank() == 0:
            x = x + self.sometimes(x)
        result: Tensor = self.last(x)
        return result


class Small(nn.Module):
    """Uses all of its parameters on all ranks; one of them has no dimension, and one is of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(4, 1).double()

    def forward(self, words: Tensor) -> Tensor:
        result: Tensor = self.last((self.words(words) * self.gain).double())
        return result


def batches(rank: int) -> list[Tensor]:
    torch.manual_seed(10 + rank)
    return [torch.randint(0, 7, (6,)) for _ in range(MICRO_BATCHES)]


def backward(model: nn.Module, words: Tensor) -> None:
    model(words).square().sum().backward()


def gradients_of(model: nn.Module) -> Gradients:
    return {name: None if parameter.grad is None else parameter.grad.clone() for name, parameter in model.named_parameters()}


def same(ours: Gradients, theirs: Gradients, *, exact: bool = True) -> bool:
    def equal(one: Tensor | None, other: Tensor | None) -> bool:
        if one is None or other is None:
            return one is other
        if one.is_sparse or other.is_sparse:
            return one.is_sparse and other.is_sparse and equal(one.to_dense(), other.to_dense())
        return torch.equal(one, other) if exact else torch.allclose(one, other, rtol=1e-5, atol=1e-6)

    return ours.keys() == theirs.keys() and all(equal(ours[name], theirs[name]) for name in ours)


def wrapped(kind: type[nn.Module], **settings: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(kind(), **settings)


def reference(rank: int, kind: type[nn.Module], **settings: Any) -> Gradients:
    """The gradients when the last backward pass reduces."""
    model = wrapped(kind, **settings)
    *held, last = batches(rank)
    for words in held:
        with model.no_sync():
            backward(model, words)
    backward(model, last)
    return gradients_of(model.module)


def held(rank: int, model: nn.Module) -> GradientSync:
    control = GradientSync(model)
    control.hold()
    for words in batches(rank):
        backward(model, words)
    return control


def data_parallel(rank: int, exact: bool) -> dict[str, bool]:
    found = {}
    variants: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
        "every sort of gradient": (Net, {"find_unused_parameters": True}),
        "all used": (Small, {}),
        "views of buckets": (Small, {"gradient_as_bucket_view": True}),
        "static graph": (Small, {"static_graph": True}),
    }
    for name, (kind, settings) in variants.items():
        # torch cannot hold the first gradients of a static graph, so there the reference is one that is not.
        expected = reference(rank, kind, **(settings if not settings.get("static_graph") else {}))
        model = wrapped(kind, **settings)
        control = held(rank, model)
        torch.manual_seed(0)
        alone = kind()
        for words in batches(rank):
            backward(alone, words)
        if not model.static_graph:
            found[f"{name}: held ones are local"] = same(gradients_of(model.module), gradients_of(alone))
        control.reduce_held(model.parameters())
        # Reduced more than once, those of a static graph are rounded more than once.
        once = exact and not model.static_graph
        found[f"{name}: reduced"] = same(gradients_of(model.module), expected, exact=once)
        control.reduce_held(model.parameters())
        found[f"{name}: reducing again changes nothing"] = same(gradients_of(model.module), expected, exact=False)
        found[f"{name}: still held"] = model.require_backward_grad_sync == model.static_graph

        # The next group of micro-batches, whose last backward pass reduces.
        model.zero_grad()
        *first, last = batches(rank)
        for words in first:
            backward(model, words)
        control.release()
        backward(model, last)
        found[f"{name}: released"] = same(gradients_of(model.module), expected, exact=once)

        model.zero_grad()
        control.hold()
        for words in batches(rank):
            backward(model, words)
        found[f"{name}: held again"] = same(gradients_of(model.module), gradients_of(alone))
        control.reduce_held(model.parameters())
        found[f"{name}: reduced again"] = same(gradients_of(model.module), expected, exact=exact)
    return found


def some_parameters(rank: int) -> dict[str, bool]:
    """Only those that were asked for are reduced, and buckets are cut where they are full."""
    model = wrapped(Small)
    control = held(rank, model)
    before, expected = gradients_of(model.module), reference(rank, Small)
    control.reduce_held([model.module.gain])
    after = gradients_of(model.module)
    found = {"only one": same(after, before | {"gain": expected["gain"]})}
    sync._BUCKET = 1
    control.reduce_held([model.module.words.weight, *model.module.last.parameters()])
    found["buckets of one"] = same(gradients_of(model.module), expected)
    frozen = wrapped(Net, find_unused_parameters=True)
    frozen.module.frozen.weight.grad = left = torch.full((5, 5), float(rank))
    GradientSync(frozen).reduce_held(frozen.parameters())
    found["frozen"] = torch.equal(left, torch.full((5, 5), float(rank)))
    words = frozen.module.words.weight
    if rank == 0:
        words.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.full((1, 4), 6.0), (7, 4), check_invariants=True)
    GradientSync(frozen).reduce_held([words])
    assert words.grad is not None
    found["sparse on one rank"] = words.grad.is_sparse and words.grad.to_dense().sum(dim=1).tolist() == [0, 12, 0, 0, 0, 0, 0]
    return found


def inside_others(rank: int) -> dict[str, bool]:
    """Modules of which the distributed one is a part."""
    expected = reference(rank, Small)
    model = wrapped(Small)
    outer = nn.Sequential(model, nn.Identity())
    held(rank, outer).reduce_held(outer.parameters())
    found = {"submodule": same(gradients_of(model.module), expected)}
    model = wrapped(Small)
    compiled: Any = torch.compile(model, backend="eager")
    control = held(rank, compiled)
    found["compiled: local"] = not same(gradients_of(model.module), expected)
    control.reduce_held(compiled.parameters())
    found["compiled"] = same(gradients_of(model.module), expected)
    GradientSync(compiled)
    found["released when made"] = model.require_backward_grad_sync
    return found


def two_ranks(rank: int) -> dict[str, bool]:
    return data_parallel(rank, True) | some_parameters(rank) | inside_others(rank)


def three_ranks(rank: int) -> dict[str, bool]:
    return data_parallel(rank, False)


def sharded_model(**settings: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - slow to import, and only the ranks need it

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))
    for index in (0, 2):
        fully_shard(model[index], **settings)
    fully_shard(model, **settings)
    return model


def inputs(rank: int) -> list[Tensor]:
    torch.manual_seed(10 + rank)
    return [torch.randn(6, 4) for _ in range(MICRO_BATCHES)]


def whole(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.full_tensor()  # type: ignore[attr-defined]


def wholes(model: nn.Module) -> Gradients:
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


def train(model: Any, rank: int, group: Callable[[Any, list[Tensor]], None]) -> tuple[Gradients, Gradients]:
    """Three steps, the gradients of the first two by `group`; the first gradients and the last parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first: Gradients = {}
    for step in range(3):
        if step < 2:
            group(model, inputs(rank))
        else:
            backward(model, inputs(rank)[0])
        first = first or wholes(model)
        optimizer.step()
        optimizer.zero_grad()
    return first, {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}


def last_reduces(model: Any, micro_batches: list[Tensor]) -> None:
    *first, last = micro_batches
    model.set_requires_gradient_sync(False)
    for x in first:
        backward(model, x)
    model.set_requires_gradient_sync(True)
    backward(model, last)


def reduced_afterwards(model: Any, micro_batches: list[Tensor]) -> None:
    control = GradientSync(model)
    control.hold()
    for x in micro_batches:
        backward(model, x)
    assert all(parameter.grad is None for parameter in model.parameters())
    control.reduce_held(model.parameters())
    control.release()


def reduced_after_release(model: Any, micro_batches: list[Tensor]) -> None:
    control = GradientSync(nn.ModuleList([model]))
    control.reduce_held([])  # nothing has run yet, or nothing waits
    control.hold()
    model.set_is_last_backward(False)
    for x in micro_batches:
        backward(model, x)
    control.release()
    control.reduce_held([])
    assert not model._get_fsdp_state()._state_ctx.is_last_backward
    model.set_is_last_backward(True)


def fully_sharded(rank: int, replicas: int) -> dict[str, bool]:
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: PLC0415

    size = dist.get_world_size()
    grid = init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("replicas", "shards"))
    mesh = grid["shards"] if replicas == 1 else grid
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = {}
    variants: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"mp_policy": low}, "kept whole": {"reshard_after_forward": False}}
    for name, settings in variants.items():
        expected = train(sharded_model(mesh=mesh, **settings), rank, last_reduces)
        for group in (reduced_afterwards, reduced_after_release):
            gradients, parameters = train(sharded_model(mesh=mesh, **settings), rank, group)
            found[f"{name}: gradients {group.__name__}"] = same(gradients, expected[0])
            found[f"{name}: parameters {group.__name__}"] = same(parameters, expected[1])
    return found


@pytest.mark.parametrize(
    ("function", "args", "size"),
    [(two_ranks, (), 2), (three_ranks, (), 3), (fully_sharded, (1,), 2), (fully_sharded, (2,), 4)],
    ids=["data parallel", "three ranks", "fully sharded", "sharded and replicated"],
)
def test_reducing_afterwards_equals_a_last_backward_that_reduces(function: Any, args: tuple[Any, ...], size: int, tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(function, *args, size=size, tmp_path=tmp_path)):
        assert found
        assert [name for name, right in found.items() if not right] == [], f"rank {rank}"


def test_a_torch_without_the_means_says_what_to_do(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "finish_sharded_backward", lambda module: False)
    model = sharded_model()
    control = GradientSync(model)
    control.hold()
    with pytest.raises(
        StepOrderError, match=r"cannot reduce gradients of fully_shard after the backward pass\. .*amp\.micro_batches\(loader\)"
    ):
        control.reduce_held(model.parameters())
    groups = model._get_fsdp_state()._fsdp_param_groups  # type: ignore[operator]
    assert not any(group.reduce_grads for group in groups)


def test_a_model_in_one_process_is_left_alone(alone: None) -> None:
    for model in (nn.Linear(2, 1), DistributedDataParallel(nn.Linear(2, 1))):
        control = GradientSync(model)
        control.hold()
        control.hold()
        model(torch.ones(1, 2)).sum().backward()
        before = gradients_of(model)
        control.reduce_held(model.parameters())
        control.release()
        control.release()
        assert same(gradients_of(model), before)


def test_switching_is_done_only_when_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    control = GradientSync(nn.Linear(2, 1))
    calls = []
    monkeypatch.setattr(GradientSync, "_switch", lambda self, *, reducing: calls.append(reducing))
    for move in (control.release, control.hold, control.hold, control.release, control.release):
        move()
    assert calls == [False, True]


def test_buckets_hold_one_type_and_are_cut_when_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "_BUCKET", 4)
    sizes = [(3, torch.float32), (1, torch.float64), (3, torch.float32), (1, torch.float32), (3, torch.float32), (2, torch.float64)]
    buckets = sync._buckets([torch.zeros(size, dtype=dtype) for size, dtype in sizes])
    assert [[tensor.numel() for tensor in bucket] for bucket in buckets] == [[3, 3], [1, 3], [1, 2]]
