"""A run that goes on begins with a new scale."""

import torch


def main(model, loader, resume=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    start = 0
    if resume:
        checkpoint = torch.load(resume, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start = checkpoint["epoch"] + 1
    for epoch in range(start, 10):
        for inputs, targets in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}  # expect: scaler_not_saved
        torch.save(state, "last.pt")
