"""Unscaled and clipped in each micro-batch of a window."""

import torch
from torch.nn.utils import clip_grad_norm_


def fine_tune(model, loader, args):
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cuda")
    optimizer.zero_grad()
    for index, batch in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(**batch).loss / args.accumulate
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # expect: repeated_unscale
        clip_grad_norm_(model.parameters(), args.max_norm)
        if (index + 1) % args.accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
