"""A base class runs a plain step, and a class derived from it runs the step in fp16."""

import torch


class SimpleTrainer:
    def __init__(self, model, loader, optimizer):
        self.model, self.optimizer = model, optimizer
        self._batches = iter(loader)

    def run_step(self):
        losses = self.model(next(self._batches))
        self.optimizer.zero_grad()
        losses.backward()
        self.optimizer.step()


class AMPTrainer(SimpleTrainer):
    def __init__(self, model, loader, optimizer, grad_scaler=None, precision=torch.float16):
        super().__init__(model, loader, optimizer)
        if grad_scaler is None:
            grad_scaler = torch.amp.GradScaler("cuda")
        self.grad_scaler = grad_scaler
        self.precision = precision

    def run_step(self):
        assert self.model.training, "the model is in evaluation mode"
        batch = next(self._batches)
        with torch.autocast("cuda", dtype=self.precision):
            losses = self.model(batch)
        self.optimizer.zero_grad()
        self.grad_scaler.scale(losses).backward()
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()

    def state_dict(self):
        return {"optimizer": self.optimizer.state_dict(), "grad_scaler": self.grad_scaler.state_dict()}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["optimizer"])
        self.grad_scaler.load_state_dict(state["grad_scaler"])
