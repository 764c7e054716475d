"""What does a checkpoint cost? `save_checkpoint` and a `Checkpointer` in the background beside `torch.save` of the same state.

    python benchmarks/checkpoint.py                   # a state of 420 MB
    python benchmarks/checkpoint.py --width 256 --rounds 5

The state is that of a Transformer encoder after two steps of AdamW: weights, two moments each, buffers, and all else that a run goes on
from. Each round saves it in each way, in an order that is new for each round, to a new file on the same disk:

- `torch.save`: of the same nested state, into the page cache, as scripts do; nothing of it need be on disk when it returns;
- `torch.save, flushed`: the same with fsync;
- `save_checkpoint`: with checksums, flushed, renamed;
- `background, save()`: how long the call of a `Checkpointer(background=True)` keeps the step waiting, when the one before is on disk;
- `background, whole`: how much later the training steps end that run while it is written, with the call, against the same steps without.

Ratios are taken round by round against `torch.save` in the same round. Printed are medians with 95 % intervals. The first save in the
background takes longer, because the memory for the copy is new then; it is printed by itself.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from halfstep import Checkpointer, MixedPrecision, load_checkpoint, save_checkpoint
from halfstep.checkpoint.contents import capture
from halfstep.comparison.statistics import median_interval

LAYERS = 12
STEPS_BESIDE = 6


def make_engine(width: int) -> tuple[nn.Module, MixedPrecision]:
    """A Transformer encoder and its engine, after two steps."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, nhead=8, dim_feedforward=4 * width, batch_first=True)
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    amp = MixedPrecision(model, torch.optim.AdamW(model.parameters(), fused=True), "fp32")
    for _ in range(2):
        train(amp, model, width)
    return model, amp


def train(amp: MixedPrecision, model: nn.Module, width: int) -> None:
    """One step on a small batch."""
    amp.train_step(lambda x: model(x).square().mean(), torch.randn(2, 16, width))


def seconds_of(work: Callable[[], object]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def flushed(tree: object, path: Path) -> None:
    """`torch.save`, and the file is on disk."""
    with path.open("wb") as file:
        torch.save(tree, file)
        file.flush()
        os.fsync(file.fileno())


def measure(width: int, rounds: int, folder: Path) -> dict[str, list[float]]:
    """The seconds of each way in each round, in the order of the rounds."""
    model, amp = make_engine(width)
    tree = capture({"": amp}, step=1, extra=None, ranks=None).tree
    background = Checkpointer(folder / "background", amp=amp, keep=1, background=True)
    first = seconds_of(lambda: background.save(1))
    background.wait()
    size = background.checkpoints()[0].stat().st_size
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters, a checkpoint of {size / 1e6:.0f} MB")
    print(f"the first save() in the background: {first:.3f} s\n")
    plain, target = folder / "plain.pt", folder / "checkpoint.pt"

    def steps() -> None:
        for _ in range(STEPS_BESIDE):
            train(amp, model, width)

    def beside() -> None:
        background.save(1)
        steps()

    ways: dict[str, Callable[[], object]] = {
        "torch.save": lambda: torch.save(tree, plain),
        "torch.save, flushed": lambda: flushed(tree, plain),
        "save_checkpoint": lambda: save_checkpoint(target, amp, step=1),
        "background, save()": lambda: background.save(1),
        "steps alone": steps,
        "steps beside": beside,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in random.sample(list(ways), len(ways)):
            background.wait()
            for path in (plain, target):
                path.unlink(missing_ok=True)
            os.sync()  # What another way left to be written must not be in the way of this one.
            taken = seconds_of(ways[name])
            if number:  # The first round warms up.
                seconds[name].append(taken)
    background.wait()
    seconds["background, whole"] = [b - a for a, b in zip(seconds.pop("steps alone"), seconds.pop("steps beside"), strict=True)]
    seconds["(loading) load_checkpoint"] = [seconds_of(lambda: load_checkpoint(background.checkpoints()[0], amp)) for _ in range(rounds)]
    check_same(tree, folder / "background", amp)
    return seconds


def check_same(tree: dict[str, dict[str, Tensor]], folder: Path, amp: MixedPrecision) -> None:
    """What was saved is what the run has."""
    saved = torch.load(next(folder.glob("*.pt")), weights_only=True)
    state = amp.model.state_dict()
    if not all(torch.equal(state[name], value) for name, value in saved["model"].items()) or saved.keys() != tree.keys():
        raise SystemExit("the checkpoint is not what the run has: the figures mean nothing")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=488, help="of the Transformer; 488 makes 420 MB")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, help="where to save; a temporary folder by default")
    options = parser.parse_args()
    torch.set_num_threads(2)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {options.rounds} rounds")
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        seconds = measure(options.width, options.rounds, folder)
    finally:
        shutil.rmtree(folder)
    base = seconds["torch.save"]
    print(f"  {'way':28}{'seconds':>8}   times torch.save, with its 95 % interval")
    for name, taken in seconds.items():
        ratios = [mine / other for mine, other in zip(taken, base, strict=True)]
        print(f"  {name:28}{median_interval(taken).median:8.3f}   {median_interval(ratios)}")


if __name__ == "__main__":
    main()
