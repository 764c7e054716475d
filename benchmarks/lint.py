"""What does a look at the source cost? `halfstep lint` beside TorchFix on one tree of training scripts, and on a single file.

    python benchmarks/lint.py                             # 1,000 files of 300 lines; some minutes, nearly all of them TorchFix's
    python benchmarks/lint.py --files 100 --repeats 3     # half a minute
    python benchmarks/lint.py --alone                     # the same tree without TorchFix: some seconds
    python benchmarks/lint.py --plain-share 0.9           # nine of ten files hold no mixed precision, as in most projects

The tree is made up from a fixed seed: each file has classes of layers, data sets, helper functions and, but for the plain ones, a training
loop with mixed precision, right or with one of five mistakes. Both tools run as users run them, as commands with all cores, by turns, each
in processes of its own. Printed are seconds, files per second, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HEADER = """\
\"\"\"Trains {name} on {data}.\"\"\"

import argparse
import json
import math
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
"""

LAYER = """

class {name}(nn.Module):
    \"\"\"A block of {name}.\"\"\"

    def __init__(self, width, heads={heads}, dropout=0.{dropout}):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width * {heads})
        self.outer = nn.Linear(width * {heads}, width)
        self.dropout = nn.Dropout(dropout)
        self.scale = width ** -0.5

    def forward(self, x, mask=None):
        residual = x
        x = self.norm(x)
        x = F.gelu(self.inner(x)) * self.scale
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        return residual + self.dropout(self.outer(x))
"""

DATA = """

class {name}(Dataset):
    def __init__(self, root, split="train", limit={limit}):
        self.items = sorted(Path(root, split).glob("*.json"))[:limit]
        self.cache = {{}}

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        if index not in self.cache:
            with open(self.items[index]) as file:
                record = json.load(file)
            self.cache[index] = torch.tensor(record["x"]), torch.tensor(record["y"])
        return self.cache[index]
"""

HELPER = """

def {name}(values, start={start}, factor=0.{factor}):
    total = start
    for index, value in enumerate(values):
        if math.isnan(value):
            continue
        total = total * factor + value * (1.0 - factor)
        if index and index % {every} == 0:
            print(f"{{index}}: {{total:.3f}}")
    return {{"mean": total, "first": values[0] if values else None, "noise": random.random()}}
"""

LOOP = """

def train(model, loader, optimizer, scheduler, scaler, device, accumulate={every}):
    model.train()
    losses = []
    for step, (inputs, targets) in enumerate(loader):
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets) / accumulate
        scaler.scale(loss).backward()
        if (step + 1) % accumulate == 0:
            {unscale}torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            {extra}scaler.update()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    scheduler.step()
    return torch.stack(losses).mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default={every})
    parser.add_argument("--lr", type=float, default=1e-{every})
    options = parser.parse_args()
    device = torch.device("cuda")
    model = nn.Sequential({layers}).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    scaler = torch.amp.GradScaler("cuda")
    loader = DataLoader({data}("data"), batch_size=32, shuffle=True)
    for epoch in range(options.epochs):
        loss = train(model, loader, optimizer, scheduler, scaler, device)
        torch.save(
            {{"model": model.state_dict(), "optimizer": optimizer.state_dict(){saved}}},
            f"epoch-{{epoch}}.pt",
        )
        print(epoch, loss)


if __name__ == "__main__":
    main()
"""


def source(draw: random.Random, lines: int, *, plain: bool) -> str:
    """A file of about so many lines."""
    layers = [f"Block{draw.randrange(10_000)}" for _ in range(2)]
    data = f"Records{draw.randrange(10_000)}"
    parts = [HEADER.format(name=layers[0], data=data), DATA.format(name=data, limit=draw.randrange(100, 10_000))]
    parts += [LAYER.format(name=name, heads=draw.choice((2, 4, 8)), dropout=draw.randrange(10)) for name in layers]
    if not plain:
        # One in three is right.
        mistake = draw.randrange(6)
        parts.append(
            LOOP.format(
                every=draw.randrange(2, 9),
                unscale="" if mistake == 1 else "scaler.unscale_(optimizer)\n            ",
                extra="optimizer.step()\n            "
                if mistake == 2
                else "scaler.unscale_(optimizer)\n            "
                if mistake == 3
                else "",
                layers=", ".join(f"{name}(512)" for name in layers),
                data=data,
                saved="" if mistake == 4 else ', "scaler": scaler.state_dict()',
            )
        )
    while sum(part.count("\n") for part in parts) < lines:
        number = draw.randrange(100_000)
        if draw.random() < 0.5:
            parts.insert(
                -1, HELPER.format(name=f"smoothed_{number}", start=number, factor=draw.randrange(1, 9), every=draw.randrange(2, 99))
            )
        else:
            parts.insert(-1, LAYER.format(name=f"Block{number}", heads=draw.choice((2, 4, 8)), dropout=draw.randrange(10)))
    return "".join(parts)


def timed(words: Sequence[str]) -> tuple[float, str]:
    """The seconds that a command takes, and what it prints."""
    start = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(words[:3])} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return seconds, done.stdout


def shown(name: str, seconds: list[float], files: int) -> None:
    """A line of the table."""
    median = statistics.median(seconds)
    print(f"  {name:<14} {median:10.2f} {min(seconds):10.2f} {max(seconds):10.2f} {files / median:12.1f}")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1000, help="How many files (default: 1000).")
    parser.add_argument("--lines", type=int, default=300, help="Lines of a file (default: 300).")
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        choices=range(1, 100),
        metavar="N",
        help="How often TorchFix runs; halfstep runs once more (default: 1).",
    )
    parser.add_argument("--plain-share", type=float, default=0.0, help="The share of files without mixed precision (default: 0).")
    parser.add_argument("--seed", type=int, default=0, help="The seed of the tree (default: 0).")
    parser.add_argument("--alone", action="store_true", help="Leave TorchFix out.")
    options = parser.parse_args()
    bin_ = Path(sys.executable).parent
    halfstep, torchfix = [str(bin_ / "halfstep"), "lint"], [str(bin_ / "torchfix"), "--select", "ALL"]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("halfstep", "torchfix", "libcst"))
    print(f"{versions}, Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder:
        draw = random.Random(options.seed)
        lines = 0
        for index in range(options.files):
            text = source(draw, options.lines, plain=draw.random() < options.plain_share)
            lines += text.count("\n")
            Path(folder, f"train_{index:04d}.py").write_text(text, encoding="utf-8")
        timed([*halfstep, str(Path(folder, "train_0000.py"))])  # Byte code is written once.
        ours, theirs = [timed([*halfstep, folder])], []
        for _ in range(options.repeats):
            if not options.alone:
                theirs.append(timed([*torchfix, folder]))
            ours.append(timed([*halfstep, folder]))
        single = [timed([*halfstep, str(Path(folder, "train_0000.py"))])[0] for _ in range(7)]
    print(f"\n{options.files} files, {lines / options.files:.0f} lines each, mixed precision in {1 - options.plain_share:.0%} of them")
    print(f"  {'':<14} {'median s':>10} {'fastest':>10} {'slowest':>10} {'files per s':>12}")
    shown("halfstep lint", [seconds for seconds, _ in ours], options.files)
    if theirs:
        shown("TorchFix", [seconds for seconds, _ in theirs], options.files)
        ratio = statistics.median(seconds for seconds, _ in theirs) / statistics.median(seconds for seconds, _ in ours)
        print(f"halfstep lint is {ratio:.1f} times as fast.")
    print(f"halfstep lint found: {ours[-1][1].strip().splitlines()[-1]}")
    print(f"\nOne file, from the shell: {statistics.median(single):.2f} s (fastest {min(single):.2f}, slowest {max(single):.2f})")


if __name__ == "__main__":
    main()
