"""Two losses are added up in the gradients, and one of them was never scaled."""

import torch


def train(model, loader, weight=0.4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda")
    for inputs, targets in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            main, auxiliary = model(inputs)
            loss = torch.nn.functional.cross_entropy(main, targets)
            side_loss = weight * torch.nn.functional.cross_entropy(auxiliary, targets)
        scaler.scale(loss).backward(retain_graph=True)
        side_loss.backward()  # expect: unscaled_backward
        scaler.step(optimizer)
        scaler.update()
