"""Files with tiny tasks, for the command line to find."""

from __future__ import annotations

from pathlib import Path

__all__ = ["SQUARE", "write_task"]

# What each task file begins with. The model is as small as can be, and the loss is a function of its own in each file.
HEADER = """
import sys, time
import torch
from torch import nn
import halfstep

def precision():
    if not torch.is_autocast_enabled("cpu"):
        return "fp32"
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}[torch.get_autocast_dtype("cpu")]

def task(seed):
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    return halfstep.Task(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, batches=[torch.randn(8, 4) for _ in range(3)]
    )
"""

SQUARE = """
def loss(model, batch):
    return model(batch).square().mean()
"""


def write_task(folder: Path, source: str = SQUARE) -> str:
    file = folder / "small.py"
    file.write_text(HEADER + source)
    return f"{file}:task"
