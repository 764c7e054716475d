"""LBFGS gets its closure by way of the scaler."""

import torch


def fit(model, inputs, targets):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    scaler = torch.amp.GradScaler("cuda", init_scale=4096.0)

    def closure():
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = (model(inputs) - targets).pow(2).mean()
        scaler.scale(loss).backward()
        return loss

    for _ in range(10):
        scaler.step(optimizer, closure)  # expect: closure_with_scaler
        scaler.update()
