"""The same flag is asked at each moment of the step."""

import torch
from torch.nn.utils import clip_grad_norm_


def train(model, loader, args):
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cuda") if args.fp16 else None
    for index, (inputs, targets) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16, enabled=args.fp16):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets) / args.accumulate
        if args.fp16:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        if (index + 1) % args.accumulate == 0:
            if args.fp16:
                scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), args.max_norm)
            if args.fp16:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
