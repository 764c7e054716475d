"""The scaler is never told that an iteration is over."""

import torch


class Runner:
    def __init__(self, net, lr):
        self.net = net
        self.optim = torch.optim.Adam(net.parameters(), lr=lr)
        self.amp_scaler = torch.amp.GradScaler("cuda")

    def run(self, loader):
        for features, wanted in loader:
            self.optim.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = (self.net(features) - wanted).abs().mean()
            self.amp_scaler.scale(loss).backward()
            self.amp_scaler.step(self.optim)  # expect: missing_update
