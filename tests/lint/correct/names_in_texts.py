"""Old spellings such as `torch.cuda.amp.autocast()` and `loss.backward()` stand in texts here, and nowhere else.

from torch.cuda.amp import GradScaler was how this file began; scaler.step(optimizer, closure) was in it as well.
"""

import warnings

import torch

warnings.filterwarnings("ignore", message=r".*torch\.cuda\.amp\.GradScaler.*is deprecated", category=FutureWarning)
warnings.filterwarnings("ignore", message="`torch.cuda.amp.autocast(args...)` is deprecated")

# torch.cuda.amp.GradScaler() is what we had before.
NOTE = "Do not call torch.nn.utils.clip_grad_norm_ before scaler.unscale_(optimizer), mask with -1e9, or import apex.amp."


def train(model, loader, optimizer):
    """Trains in fp16; see torch.cuda.amp for the old interface."""
    scaler = torch.amp.GradScaler("cuda")
    for inputs, targets in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
