"""Old torch is served too: the deprecated names are what the new ones fall back to."""

import torch

try:
    from torch.amp import GradScaler, autocast
except ImportError:
    from torch.cuda.amp import GradScaler, autocast

if hasattr(torch.amp, "custom_fwd"):
    custom_fwd = torch.amp.custom_fwd(device_type="cuda")
else:
    custom_fwd = torch.cuda.amp.custom_fwd


def train(model, loader, optimizer):
    scaler = GradScaler()
    for inputs, targets in loader:
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
