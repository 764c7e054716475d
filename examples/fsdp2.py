"""Mixed precision on many GPUs with a sharded model (fully_shard, also called FSDP2): the loop is that of one GPU.

Two processes on this machine, on GPUs where there are enough and on the CPU elsewhere:

    torchrun --nproc-per-node 2 examples/fsdp2.py

Eight GPUs on each of four machines, the same command on every one of them:

    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/fsdp2.py --precision bf16

Parameters, gradients and optimizer state are spread over the processes. They stay in fp32; what is gathered for a layer's computation is
cast by the policy of `fully_shard`, and autocast chooses for each operation, as it does on one GPU. Clipping takes the norm of the whole
model, and a step whose gradients overflow in one process is skipped in all of them.
"""

from __future__ import annotations

import argparse
import gc
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from halfstep import MixedPrecision
from halfstep.distributed import fsdp_policy

BATCH_SIZE = 32
WIDTH = 128


class Block(nn.Module):
    """A residual block with layer normalization, sharded by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        change: Tensor = self.mlp(self.norm(x))
        return x + change


def digits() -> TensorDataset:
    """1797 images of handwritten digits, 8 by 8, with pixels from 0 to 1."""
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))


def train(arguments: argparse.Namespace, *, device: torch.device) -> None:
    """Trains for some epochs; the first process tells how it goes."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(3)]
    model = nn.Sequential(nn.Linear(64, WIDTH), *blocks, nn.Linear(WIDTH, 10)).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = fsdp_policy(arguments.precision)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    data = digits()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # Made after sharding: it must hold the sharded parameters.
    steps = arguments.epochs * -(-len(loader) // arguments.accumulate)
    amp = MixedPrecision(
        model,
        optimizer,
        arguments.precision,
        scheduler=CosineAnnealingLR(optimizer, T_max=steps),
        max_grad_norm=1.0,
        accumulate=arguments.accumulate,
    )
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        records = []
        for images, labels in amp.micro_batches(loader):
            with amp.autocast():
                loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            amp.backward(loss)
            if record := amp.step():
                records.append(record)
        if dist.get_rank() == 0:
            stats, loss_mean = amp.stats(), sum(record.loss for record in records) / len(records)  # Read here, all at once.
            print(f"epoch {epoch + 1}: loss {loss_mean:.3f}, {stats.steps} steps, {stats.skips} skipped, scale {stats.scale:g}")


def main() -> None:
    """Joins the other processes and trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches in one step")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/fsdp2.py")
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    try:
        train(arguments, device=device)
    finally:
        gc.collect()  # A model that is still waiting to be collected holds the process group, and gloo's threads outlive the interpreter.
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
