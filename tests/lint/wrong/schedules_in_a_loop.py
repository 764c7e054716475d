"""Several schedules move with each batch."""

import torch


def train(model, loader, optimizer, schedules):
    scaler = torch.amp.GradScaler("cuda")
    for index, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        for scheduler in schedules:
            scheduler.step()  # expect: unconditional_scheduler_step
        if index % 100 == 0:
            print(index, scaler.get_scale())
