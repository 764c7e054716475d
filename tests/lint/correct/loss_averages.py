"""Running means of numbers move in each iteration, as they should."""

import torch


class Mean:
    def __init__(self, share=0.98):
        self.share, self.value = share, 0.0

    def update(self, number):
        self.value = self.share * self.value + (1 - self.share) * number


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    ema_loss, time_ema = Mean(), Mean()
    for index, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        ema_loss.update(loss.detach())
        time_ema.update(index)
