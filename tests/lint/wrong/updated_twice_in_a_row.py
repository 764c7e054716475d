"""An update that nothing happened for: behind another one, and behind the loop whose every batch had one."""

import torch


def in_a_row(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for batch in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scaler.update()  # expect: repeated_update


def behind_the_loop(model, loader, optimizer, epochs):
    scaler = torch.amp.GradScaler("cuda")
    for _epoch in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        scaler.update()  # expect: repeated_update
