"""A trainer collects its state in a method, and a function writes what is left."""

import torch


def write(model, optimizer, path):
    state = torch.load(path, weights_only=True) if path.exists() else None
    print("the last one was of epoch", state and state["epoch"])
    state = {"epoch": 0}
    state["model"] = model.state_dict()
    state["optimizer"] = optimizer.state_dict()  # expect: scaler_not_saved
    torch.save(state, path)


class Trainer:
    def __init__(self, model, loader):
        self.model, self.loader = model, loader
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda")

    def epoch(self, path):
        for inputs, targets in self.loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = torch.nn.functional.cross_entropy(self.model(inputs), targets)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        write(self.model, self.optimizer, path)

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}  # expect: scaler_not_saved

    def save(self, path):
        torch.save(self.state(), path)
