"""Parameters whose gradients are not finite get none, when the scaler has already counted them; and the same by torch.where()."""

import torch


def by_hand(model, loader, optimizer, scaler):
    for batch in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for _name, parameter in model.named_parameters():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                parameter.grad.zero_()  # expect: cleaning_after_unscale
        scaler.step(optimizer)
        scaler.update()


def by_where(model, loader, optimizer, scaler):
    for batch in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.where(torch.isnan(parameter.grad), 0.0, parameter.grad)  # expect: cleaning_after_unscale
        scaler.step(optimizer)
        scaler.update()
