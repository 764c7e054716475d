"""A trainer with an `optimizer_step` of its own, which unscales, clips, steps, updates, zeroes and moves the average."""

import copy
import math

import torch


class ModelEMA:
    def __init__(self, model, decay=0.9999):
        self.ema = copy.deepcopy(model).eval()
        self.updates = 0
        self.decay = lambda count: decay * (1 - math.exp(-count / 2000))

    def update(self, model):
        self.updates += 1
        decay = self.decay(self.updates)
        state = model.state_dict()
        for name, value in self.ema.state_dict().items():
            if value.dtype.is_floating_point:
                value *= decay
                value += (1 - decay) * state[name].detach()


class DetectorTrainer:
    def __init__(self, model, loader, args):
        self.model, self.loader, self.args = model, loader, args
        self.amp = args.amp
        self.accumulate = max(round(64 / args.batch), 1)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda epoch: 1 - epoch / args.epochs)
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.amp)
        self.ema = ModelEMA(model)

    def train(self):
        last_step = -1
        self.optimizer.zero_grad()
        for epoch in range(self.args.epochs):
            self.model.train()
            for index, batch in enumerate(self.loader):
                count = index + len(self.loader) * epoch
                with torch.autocast("cuda", dtype=torch.float16, enabled=self.amp):
                    self.loss, self.loss_items = self.model(batch)
                self.scaler.scale(self.loss).backward()
                if count - last_step >= self.accumulate:
                    self.optimizer_step()
                    last_step = count
            self.scheduler.step()

    def optimizer_step(self):
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.scaler.get_scale() >= scale:
            self.ema.update(self.model)
