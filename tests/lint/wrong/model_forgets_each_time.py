"""The model drops its gradients in each micro-batch."""

import torch


def train(model, loader, args):
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cuda")
    for step, batch in enumerate(loader):
        model.zero_grad()  # expect: zero_grad_per_microbatch
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(**batch)[0] / args.gradient_accumulation_steps
        scaler.scale(loss).backward()
        if (step + 1) % args.gradient_accumulation_steps == 0:
            scaler.step(optimizer)
            scaler.update()
