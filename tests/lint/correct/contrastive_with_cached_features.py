"""Features of a window are made without gradients first, then once more part by part; with or without a scaler."""

import torch


def backward(loss, scaler):
    if scaler is not None:
        scaler.scale(loss).backward()
    else:
        loss.backward()


def train_one_epoch(model, loader, criterion, optimizer, scaler, args):
    kept = []
    for index, (images, texts) in enumerate(loader):
        optimizer.zero_grad()
        if args.window == 1:
            with torch.autocast("cuda", dtype=args.dtype):
                loss = criterion(*model(images, texts))
            backward(loss, scaler)
        else:
            with torch.no_grad(), torch.autocast("cuda", dtype=args.dtype):
                kept.append((images, texts, *model(images, texts)))
            if (index + 1) % args.window > 0:
                continue
            optimizer.zero_grad()
            for images, texts, *_ in kept:
                with torch.autocast("cuda", dtype=args.dtype):
                    loss = criterion(*model(images, texts), others=kept)
                backward(loss, scaler)
            kept.clear()
        if scaler is not None:
            if args.max_norm is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
            scaler.step(optimizer)
            scaler.update()
        else:
            if args.max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
            optimizer.step()
