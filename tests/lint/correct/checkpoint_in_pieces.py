"""A trainer collects its state in methods, and keeps the scaler's in them."""

import torch


class Trainer:
    def __init__(self, model, loader):
        self.model, self.loader = model, loader
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scaler = torch.amp.GradScaler("cuda")

    def epoch(self):
        for inputs, targets in self.loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = torch.nn.functional.cross_entropy(self.model(inputs), targets)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "precision": self.scaler}

    def state(self):
        state = {}
        for name, part in self.parts().items():
            state[name] = part.state_dict()
        state["optimizer"] = self.optimizer.state_dict()
        return state

    def save(self, path):
        torch.save(self.state(), path)

    def load(self, path):
        state = torch.load(path, weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
