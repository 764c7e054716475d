"""Two networks and their averages, moved by a method of the class in each iteration."""

import copy

import torch


class Pair:
    def __init__(self, online):
        self.online = online
        self.target = copy.deepcopy(online)
        self.optimizer = torch.optim.Adam(online.parameters(), lr=1e-4)
        self.grad_scaler = torch.amp.GradScaler("cuda")

    @torch.no_grad()
    def update_ema(self, momentum=0.996):
        for kept, new in zip(self.target.parameters(), self.online.parameters()):
            kept.mul_(momentum).add_(new, alpha=1 - momentum)

    def step(self, first, second):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = 2 - 2 * torch.nn.functional.cosine_similarity(self.online(first), self.target(second).detach(), eps=1e-4).mean()
        self.grad_scaler.scale(loss).backward()
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        self.update_ema()  # expect: average_moved_on_skip
