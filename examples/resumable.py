"""A run that may be killed at any moment, and goes on as if it had not been.

    python examples/resumable.py runs/a                     # trains to the end
    python examples/resumable.py runs/b --kill-after 130    # is killed (SIGKILL) in the middle of a step that accumulates
    python examples/resumable.py runs/b                     # goes on, and ends with the same digest as the first

What is halfstep's part: weights, optimizer, schedule, loss scale, random numbers, and the gradients of the step in progress come back bit
for bit; checkpoints are written in the background; a damaged one is passed over. What is the script's: the batches follow from the number
of the micro-batch, so that there is no position in the data to be kept.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from halfstep import Checkpointer, MixedPrecision

BATCH_SIZE = 32
ACCUMULATE = 4


def make_run(precision: str) -> tuple[nn.Module, MixedPrecision]:
    """A multi-layer perceptron with dropout and batch normalization, and its engine."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    return model, MixedPrecision(model, optimizer, precision, scheduler=scheduler, accumulate=ACCUMULATE, max_grad_norm=1.0)


def digest(model: nn.Module) -> str:
    """A few letters that change when a single bit of the model does."""
    bits = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    return hashlib.sha256(bits).hexdigest()[:16]


def main() -> None:
    """Trains, from where an earlier run of the same folder was stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="where the checkpoints lie")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--micro-batches", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="micro-batches from one checkpoint to the next")
    parser.add_argument("--kill-after", type=int, default=0, metavar="N", help="end the process after N micro-batches, as a crash would")
    options = parser.parse_args()
    torch.set_num_threads(2)

    pixels, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
    images = pixels.float() / 16

    def batch(number: int) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(images), (BATCH_SIZE,), generator=torch.Generator().manual_seed(number))
        return images[rows], labels[rows]

    model, amp = make_run(options.precision)
    with Checkpointer(options.folder, amp=amp, every=options.every, background=True) as checkpointer:
        info = checkpointer.resume()
        start = info.step if info else 0
        print(f"from micro-batch {start}" if info else "from the beginning")
        for number in range(start, options.micro_batches):
            x, y = batch(number)
            with amp.autocast():
                loss = F.cross_entropy(model(x), y)
            amp.backward(loss)
            amp.step()
            checkpointer.save_if_due(number + 1)
            if number + 1 == options.kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
    print(f"loss {loss.item():.4f}, weights {digest(model)}")


if __name__ == "__main__":
    main()
