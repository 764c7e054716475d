"""The best weights are kept as half-precision copies; training goes on in fp32."""

import copy

import torch


def train(model, loader, evaluate, path):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    best = 0.0
    for epoch in range(10):
        for inputs, targets in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        accuracy = evaluate(model)
        if accuracy > best:
            best = accuracy
            torch.save({"epoch": epoch, "model": copy.deepcopy(model).half().state_dict()}, path)
            small = {name: tensor.half() for name, tensor in model.state_dict().items()}
            torch.save(small, path + ".small")
