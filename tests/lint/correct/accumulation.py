"""Several micro-batches a step: the scale changes only where the optimizer steps."""

import torch
from torch import nn

MICRO_BATCHES = 4

model = nn.Linear(32, 10).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cuda")
loader = [(torch.randn(8, 32).cuda(), torch.randint(10, (8,)).cuda()) for _ in range(16)]

for index, (batch, target) in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(batch), target) / MICRO_BATCHES
    scaler.scale(loss).backward()
    if (index + 1) % MICRO_BATCHES == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
