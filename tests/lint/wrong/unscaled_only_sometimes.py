"""Whether gradients are unscaled is one decision, whether they are clipped is another."""

import torch
from torch.nn.utils import clip_grad_value_


class Config:
    unscale_first = False
    clip_value = 0.5


def train(model, loader, config):
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    grad_scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12)
    for batch in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch).square().mean()
        grad_scaler.scale(loss).backward()
        if config.unscale_first:
            grad_scaler.unscale_(optimizer)
        clip_grad_value_(model.parameters(), config.clip_value)  # expect: clip_before_unscale
        grad_scaler.step(optimizer)
        grad_scaler.update()
