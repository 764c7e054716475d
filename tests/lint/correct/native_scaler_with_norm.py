"""A helper that always unscales, and returns the norm that clipping saw."""

import torch


def norm_of(parameters):
    return torch.linalg.vector_norm(torch.stack([p.grad.detach().norm() for p in parameters if p.grad is not None]))


class ScalerWithNorm:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cuda")

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, update_grad=True):
        self._scaler.scale(loss).backward()
        if not update_grad:
            return None
        if clip_grad is not None:
            self._scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
        else:
            self._scaler.unscale_(optimizer)
            norm = norm_of(parameters)
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm


def train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = ScalerWithNorm()
    for index, (inputs, targets) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(model(inputs), targets) / 2
        norm = scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters(), update_grad=(index + 1) % 2 == 0)
        if norm is not None:
            print("norm", norm)
            optimizer.zero_grad()
