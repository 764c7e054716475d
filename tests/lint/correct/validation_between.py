"""Training and validation take turns; each has its region."""

import torch


def train(model, loader, validation, optimizer, every=500):
    scaler = torch.amp.GradScaler("cuda")
    for index, (inputs, targets) in enumerate(loader):
        model.train()
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if index % every == 0:
            model.eval()
            with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
                total = sum(torch.nn.functional.cross_entropy(model(x), y, reduction="sum") for x, y in validation)
            print(index, total.item())
