"""The flag whether the optimizer ran is named and kept, and asked for with others."""

import torch


class Trainer:
    def __init__(self, model, optimizer, scheduler, args):
        self.model, self.optimizer, self.lr_scheduler, self.args = model, optimizer, scheduler, args
        self.scaler = torch.amp.GradScaler("cuda") if args.fp16 else None

    def train(self, loader):
        for step, batch in enumerate(loader):
            with torch.autocast("cuda", dtype=torch.float16, enabled=self.scaler is not None):
                loss = self.model(**batch).loss / self.args.window
            if self.scaler is not None:
                self.scaler.scale(loss).backward()
            else:
                loss.backward()
            if (step + 1) % self.args.window == 0 or step + 1 == len(loader):
                if self.args.max_norm > 0:
                    if self.scaler is not None:
                        self.scaler.unscale_(self.optimizer)
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_norm)
                optimizer_was_run = True
                if self.scaler is not None:
                    scale_before = self.scaler.get_scale()
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
                    optimizer_was_run = scale_before <= self.scaler.get_scale()
                else:
                    self.optimizer.step()
                if optimizer_was_run and not self.args.constant:
                    self.lr_scheduler.step()
                self.model.zero_grad()
