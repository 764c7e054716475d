"""Training and validation share a loop; what trains is asked for."""

import torch


def run(model, loaders, optimizer, scheduler, epochs):
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for phase in ("train", "val"):
            model.train(phase == "train")
            total = 0.0
            for inputs, targets in loaders[phase]:
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    with torch.autocast("cuda", dtype=torch.float16):
                        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
                    if phase == "train":
                        scaler.scale(loss).backward()
                        scaler.step(optimizer)
                        scaler.update()
                total += loss.detach()
            if phase == "train":
                scheduler.step()
            print(epoch, phase, total.item() / len(loaders[phase]))
