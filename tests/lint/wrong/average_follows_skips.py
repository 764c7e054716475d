"""The average of the weights moves in each iteration, skipped or not."""

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def train(model, loader):
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9999))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for inputs, targets in loader:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        ema.update_parameters(model)  # expect: average_moved_on_skip
    return ema
