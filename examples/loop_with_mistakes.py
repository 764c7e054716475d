"""A loop as many are written, on handwritten digits, with two mistakes that raise no error. `halfstep run` finds them.

    python examples/loop_with_mistakes.py               # it trains, and says nothing
    halfstep run examples/loop_with_mistakes.py         # the same, and what is wrong with it
    halfstep run examples/loop_with_mistakes.py --mended

Gradients are clipped while they are still multiplied with the loss scale, so that each update is a fraction of what it should be. And the
learning rate warms up with each step, also with those that the scaler skips while it looks for its scale.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Trains for some epochs, and prints the loss after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--mended", action="store_true", help="without the mistakes")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # The model is small.

    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.images, dtype=torch.float32).flatten(1), torch.tensor(digits.target))
    loader = DataLoader(data, batch_size=64, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=20)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)

    for epoch in range(1, options.epochs + 1):
        for images, labels in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if options.mended:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= scale or not options.mended:
                warm_up.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
