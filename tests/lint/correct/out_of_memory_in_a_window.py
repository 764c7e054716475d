"""What a window has gathered is dropped when a batch does not fit: no gradients of that window are left to step by."""

import torch


def train(model, loader, optimizer, accumulate):
    scaler = torch.amp.GradScaler("cuda")
    last = -1
    for index, batch in enumerate(loader):
        try:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(batch).mean() / accumulate
            scaler.scale(loss).backward()
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            optimizer.zero_grad()
            break
        if index - last >= accumulate:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            last = index
