"""A window of eight, of which seven are thrown away."""

import torch


def train(model, loader, accumulate=8):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for index, (inputs, targets) in enumerate(loader, start=1):
        optimizer.zero_grad()  # expect: zero_grad_per_microbatch
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets) / accumulate
        scaler.scale(loss).backward()
        if index % accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
