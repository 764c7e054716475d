from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.distributed import Ranks, ranks, ranks_of
from halfstep.errors import ConfigurationError, InvalidTypeError
from tests.ranks import run_ranks


def agree(found: Ranks | None) -> dict[str, Any] | None:
    """What the ranks make of the number of each."""
    if found is None:
        return None
    mine = dist.get_rank()
    values = torch.tensor([float(mine), -float(mine)])
    scattered = torch.zeros(2, 2)[:, 0]
    scattered.fill_(mine)
    found.maximize_(values)
    found.maximize_(scattered)
    return {
        "rank": found.rank,
        "size": found.size,
        "maximum": values.tolist(),
        "scattered": scattered.tolist(),
        "gathered": found.gather({"rank": mine, "text": "x" * mine}),
    }


def expected(members: list[int], rank: int) -> dict[str, Any]:
    return {
        "rank": members.index(rank),
        "size": len(members),
        "maximum": [float(max(members)), -float(min(members))],
        "scattered": [float(max(members))] * 2,
        "gathered": [{"rank": member, "text": "x" * member} for member in members],
    }


def four_ranks(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - slow to import, and only the ranks need it
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: PLC0415

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    columns = [2 * (rank // 2), 2 * (rank // 2) + 1]
    rows = [rank % 2, rank % 2 + 2]
    everyone = [0, 1, 2, 3]
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def tensors(*, over: Any, placements: list[Any]) -> nn.Module:
        model = net()
        weight = nn.Parameter(distribute_tensor(torch.zeros(4, 3), over, placements))
        model[0].weight = weight  # type: ignore[index]
        return model

    hybrid, nested = net(), net()
    fully_shard(hybrid, mesh=mesh)
    fully_shard(nested[0], mesh=mesh["columns"])  # type: ignore[index]
    with torch.no_grad():
        hybrid(torch.ones(1, 3))
    assert not any(isinstance(parameter, DTensor) for parameter in hybrid.parameters())  # gathered: they tell no mesh
    crossed = tensors(over=mesh["columns"], placements=[Shard(0)])
    both = nn.ModuleList([crossed, DistributedDataParallel(net(), device_mesh=mesh["rows"])])
    wide = nn.ModuleList([tensors(over=mesh, placements=[Replicate(), Shard(0)]), tensors(over=mesh["rows"], placements=[Shard(0)])])
    found: dict[str, Any] = {
        "plain": (agree(ranks_of(net())), None),
        "plain, with a group": (agree(ranks_of(net(), process_group=pairs[rank // 2])), columns),
        "data parallel": (agree(ranks_of(DistributedDataParallel(net()))), everyone),
        "data parallel in a group": (agree(ranks_of(DistributedDataParallel(net(), process_group=pairs[rank // 2]))), columns),
        "data parallel, with a wider group": (
            agree(ranks_of(DistributedDataParallel(net(), process_group=pairs[rank // 2]), process_group=dist.group.WORLD)),
            everyone,
        ),
        "hybrid sharded": (agree(ranks_of(hybrid)), everyone),
        "sharded submodule": (agree(ranks_of(nested)), columns),
        "one dimension": (agree(ranks_of(tensors(over=mesh["rows"], placements=[Shard(1)]))), rows),
        "two dimensions": (agree(ranks_of(tensors(over=mesh, placements=[Replicate(), Replicate()]))), everyone),
        "data parallel over tensor parallel": (agree(ranks_of(both)), everyone),
        "two meshes": (agree(ranks_of(wide)), everyone),
    }
    try:
        ranks_of(net(), process_group=pairs[1 - rank // 2])
    except ConfigurationError as error:
        found["no member"] = (str(error), f"Rank {rank} is no member")
    return found


def test_the_ranks_are_those_that_train_the_model(tmp_path: Path) -> None:
    for rank, cases in enumerate(run_ranks(four_ranks, size=4, tmp_path=tmp_path)):
        message, begin = cases.pop("no member")
        assert message.startswith(begin)
        assert len(cases) == 11
        for name, (found, members) in cases.items():
            assert found == (None if members is None else expected(members, rank)), f"{name}, rank {rank}"


class TestAlone:
    def test_without_a_process_group_there_are_no_ranks(self) -> None:
        assert ranks_of(nn.Linear(2, 2)) is None

    def test_without_distributed_there_are_no_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dist, "is_available", lambda: False)
        monkeypatch.delattr(dist, "is_initialized")
        assert ranks_of(nn.Linear(2, 2)) is None

    def test_a_world_of_one_has_no_ranks(self, alone: None) -> None:
        assert ranks_of(DistributedDataParallel(nn.Linear(2, 2))) is None
        assert ranks_of(nn.Linear(2, 2), process_group=dist.group.WORLD) is None

    def test_what_is_no_group_is_refused(self, alone: None) -> None:
        with pytest.raises(InvalidTypeError, match=r"takes a torch\.distributed\.ProcessGroup or None, not a str"):
            ranks_of(nn.Linear(2, 2), process_group="gloo")  # type: ignore[arg-type]

    @pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
    def test_the_first_fsdp_is_refused(self, alone: None) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415 - slow to import

        model = nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")))
        with pytest.raises(ConfigurationError, match=r"Sequential is wrapped in FullyShardedDataParallel.*fully_shard\(model\) instead"):
            ranks_of(model)


@pytest.mark.parametrize(
    ("config", "device", "moved"),
    [("cpu:gloo,cuda:nccl", "cpu", "cpu"), ("cuda:nccl", "cpu", "meta"), ("xyz:abc,cuda:nccl", "cpu", "meta")],
)
def test_tensors_are_moved_to_a_device_that_the_group_serves(config: str, device: str, moved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The accelerator is played by the meta device.
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config.replace("cuda", "meta"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("meta"))
    seen: list[Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda values, op, group: seen.append(values))
    monkeypatch.setattr(Tensor, "copy_", lambda self, other: self)  # nothing comes back from the meta device
    ranks.all_reduce_(torch.ones(2, device=device), group=None, op=None)  # type: ignore[arg-type]
    assert [values.device.type for values in seen] == [moved]


def test_without_an_accelerator_the_first_device_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert ranks._reachable(["cpu", "cuda"]) == torch.device("cpu")
