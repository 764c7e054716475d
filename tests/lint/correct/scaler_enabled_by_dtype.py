"""The scaler is on for fp16 only; bf16 passes through it."""

import argparse

import torch


def main(model, loader):
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    args = parser.parse_args()
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[args.dtype]
    scaler = torch.amp.GradScaler("cuda", enabled=(dtype == torch.float16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for inputs, targets in loader:
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
