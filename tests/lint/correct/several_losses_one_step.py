"""Several scaled losses add up to one step, in a loop over tasks."""

import torch


def train(model, loaders, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for batches in zip(*loaders.values()):
        optimizer.zero_grad()
        for task, (inputs, targets) in zip(loaders, batches):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = torch.nn.functional.cross_entropy(model(inputs, task), targets)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        scaler.step(optimizer)
        scaler.update()
