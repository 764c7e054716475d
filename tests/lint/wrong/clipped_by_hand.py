"""Limited by hand, parameter by parameter, while the gradients are still scaled; and by an import of another name."""

import torch
from torch.nn.utils import clip_grad_norm_ as limit_norm


def improve(policy, batch, optimizer, scaler):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = policy(batch).mean()
    scaler.scale(loss).backward()
    for parameter in policy.parameters():
        parameter.grad.data.clamp_(-1, 1)  # expect: clip_before_unscale
    scaler.step(optimizer)
    scaler.update()


def improve_by_norm(policy, batch, optimizer, gs):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = policy(batch).mean()
    gs.scale(loss).backward()
    limit_norm(policy.parameters(), 1.0)  # expect: clip_before_unscale
    gs.step(optimizer)
    gs.update()
