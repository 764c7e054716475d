"""A window is an inner loop, after which the optimizer steps once."""

import torch
from torch import nn

model = nn.Linear(16, 16).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")

for step in range(100):
    optimizer.zero_grad()
    for micro_step in range(8):
        inputs = torch.randn(4, 16, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = (model(inputs) - inputs).square().mean() / 8
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
