"""A generator and a discriminator: two backward passes, two steps, one update."""

import torch
from torch import nn


def train(generator, discriminator, loader, width=128):
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    scaler = torch.amp.GradScaler("cuda")
    for real in loader:
        noise = torch.randn(len(real), width, device=real.device)
        ones = torch.ones(len(real), 1, device=real.device)

        d_optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            fake = generator(noise)
            d_loss = criterion(discriminator(real), ones) + criterion(discriminator(fake.detach()), 1 - ones)
        scaler.scale(d_loss).backward()
        scaler.step(d_optimizer)

        g_optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            g_loss = criterion(discriminator(fake), ones)
        scaler.scale(g_loss).backward()
        scaler.step(g_optimizer)

        scaler.update()
