"""A script for a small language model: the region, the scaler and the schedule follow from settings at its top."""

import math
from contextlib import nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel

from library import GPT, get_batch

gradient_accumulation_steps = 40
grad_clip = 1.0
max_iters = 600_000
device = "cuda"
ddp = False
dtype = "bfloat16" if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0) else "float16"
device_type = "cuda" if "cuda" in device else "cpu"
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
ctx = nullcontext() if device_type == "cpu" else torch.amp.autocast(device_type=device_type, dtype=ptdtype)

model = GPT().to(device)
scaler = torch.amp.GradScaler(device_type, enabled=(dtype == "float16"))
optimizer = model.configure_optimizers(weight_decay=0.1, learning_rate=6e-4)
if ddp:
    model = DistributedDataParallel(model)


def get_lr(iteration):
    return 6e-4 * 0.5 * (1 + math.cos(math.pi * iteration / max_iters))


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(200)
    for index in range(200):
        inputs, targets = get_batch("val")
        with ctx:
            _, loss = model(inputs, targets)
        losses[index] = loss.item()
    model.train()
    return losses.mean()


iter_num = 0
X, Y = get_batch("train")
while True:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % 2000 == 0:
        print(f"step {iter_num}: loss {estimate_loss():.4f}")
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num > max_iters:
        break
