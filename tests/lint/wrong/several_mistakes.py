"""What comes together in a script that was changed in a hurry."""

import copy

import torch
from torch import nn


def update_ema(average, model, decay=0.999):
    with torch.no_grad():
        for kept, new in zip(average.parameters(), model.parameters()):
            kept.lerp_(new, 1 - decay)


def train(model, loader, writer, use_amp=True):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=10_000)
    average = copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=use_amp):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()  # expect: backward_in_autocast
        writer.add_scalar("norm", torch.linalg.vector_norm(model.head.weight.grad), step)  # expect: scaled_norm_logged
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # expect: clip_before_unscale
        scaler.step(optimizer)
        scaler.update()
        lr_scheduler.step()  # expect: unconditional_scheduler_step
        update_ema(average, model)  # expect: average_moved_on_skip
