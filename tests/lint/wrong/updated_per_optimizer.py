"""Two optimizers, and an update behind each of them."""

import torch


class Adversaries:
    def __init__(self, generator, critic):
        self.generator, self.critic = generator, critic
        self.g_opt = torch.optim.Adam(generator.parameters(), lr=1e-4)
        self.c_opt = torch.optim.Adam(critic.parameters(), lr=4e-4)
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, real, noise):
        self.c_opt.zero_grad()
        self.g_opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            fake = self.generator(noise)
            c_loss = self.critic(fake.detach()).mean() - self.critic(real).mean()
            g_loss = (fake - real).square().mean()
        self.scaler.scale(c_loss).backward()
        self.scaler.scale(g_loss).backward()
        self.scaler.step(self.c_opt)
        self.scaler.update()  # expect: repeated_update
        self.scaler.step(self.g_opt)
        self.scaler.update()
