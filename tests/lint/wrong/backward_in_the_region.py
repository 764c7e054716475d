"""Everything up to the step stands in the region."""

import torch
from torch import nn


class Autoencoder(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.encoder = nn.Linear(width, 8)
        self.decoder = nn.Linear(8, width)

    def forward(self, inputs):
        return self.decoder(self.encoder(inputs).relu())


def main(loader):
    model = Autoencoder().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(5):
        for (inputs,) in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                outputs = model(inputs)
                loss = nn.functional.mse_loss(outputs, inputs)
                # Gradients first, then the step.
                scaler.scale(loss).backward()  # expect: backward_in_autocast
            scaler.step(optimizer)
            scaler.update()
        print(epoch, loss.item())
