"""Masks filled with the lowest value of the dtype, and constants that half precision can hold."""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, inputs, mask):
        batch, length, width = inputs.shape
        query, key, value = self.qkv(inputs).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (query * query.size(-1) ** -0.5) @ key.transpose(-1, -2)
        scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1).masked_fill(mask, 0.0)
        return self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for inputs, mask in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            outputs = model(inputs, mask)
            loss = (outputs - inputs).square().mean() / (inputs.square().mean() + 1e-4)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
