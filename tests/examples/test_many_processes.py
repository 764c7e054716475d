from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no torch.distributed")


def launch(example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs an example in two processes on this machine, as its documentation says."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / example), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        ("ddp.py", ["--precision", "fp16"]),
        ("ddp.py", ["--precision", "bf16", "--compress", "--accumulate", "1"]),
        ("fsdp2.py", ["--precision", "fp16"]),
        ("fsdp2.py", ["--precision", "bf16", "--accumulate", "4"]),
    ],
)
def test_two_processes_learn(example: str, arguments: list[str]) -> None:
    done = launch(example, *arguments, "--epochs", "2")
    assert done.returncode == 0, done.stderr
    found = re.findall(r"epoch (\d): loss ([\d.]+), (\d+) steps, (\d+) skipped, scale ([\d.]+)", done.stdout)
    assert [int(epoch) for epoch, *_ in found] == [1, 2], "one process tells of each epoch"
    assert float(found[1][1]) < 0.7 * float(found[0][1])
    accumulate = int(arguments[arguments.index("--accumulate") + 1]) if "--accumulate" in arguments else 2
    micro_batches = 29  # 899 images on each rank, in batches of 32
    assert int(found[0][2]) == -(-micro_batches // accumulate)


@pytest.mark.parametrize("example", ["ddp.py", "fsdp2.py"])
def test_without_torchrun_it_says_how_to_start_it(example: str) -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES / example)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert f"torchrun --nproc-per-node 2 examples/{example}" in done.stderr
