"""The critic steps in each iteration, the generator in every fifth, with one scaler."""

import torch


def train(generator, critic, loader, every=5):
    c_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for index, real in enumerate(loader):
        c_optimizer.zero_grad()
        g_optimizer.zero_grad()
        noise = torch.randn(len(real), 64, device=real.device)
        with torch.autocast("cuda", dtype=torch.float16):
            fake = generator(noise)
            c_loss = critic(fake.detach()).mean() - critic(real).mean()
        scaler.scale(c_loss).backward()
        scaler.step(c_optimizer)
        if index % every == 0:
            with torch.autocast("cuda", dtype=torch.float16):
                g_loss = -critic(fake).mean()
            scaler.scale(g_loss).backward()
            scaler.step(g_optimizer)
        scaler.update()
