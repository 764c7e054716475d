"""Two functions that differ in one line: only the wrong one is spoken about."""

import torch
from torch.nn.utils import clip_grad_norm_


def right(model, batch, optimizer, scaler):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(batch)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def wrong(model, batch, optimizer, scaler):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(batch)
    scaler.scale(loss).backward()
    clip_grad_norm_(model.parameters(), 1.0)  # expect: clip_before_unscale
    scaler.step(optimizer)
    scaler.update()


def main(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for batch in loader:
        right(model, batch, optimizer, scaler)
        wrong(model, batch, optimizer, scaler)
