"""A batch is worked through in parts, and each part forgets the one before."""

import torch


def train(model, loader, parts=4):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for inputs, targets in loader:
        for some, wanted in zip(inputs.chunk(parts), targets.chunk(parts)):
            optimizer.zero_grad()  # expect: zero_grad_per_microbatch
            with torch.autocast("cuda", dtype=torch.float16):
                loss = torch.nn.functional.cross_entropy(model(some), wanted) / parts
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
