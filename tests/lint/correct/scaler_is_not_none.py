"""A scaler that may be missing is asked for at each moment of the step."""

import torch


def train_one_epoch(model, criterion, optimizer, loader, device, clip=None, scaler=None):
    model.train()
    for image, target in loader:
        image, target = image.to(device), target.to(device)
        with torch.autocast("cuda", dtype=torch.float16, enabled=scaler is not None):
            loss = criterion(model(image), target)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()


def main(args, model, criterion, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
    scaler = torch.amp.GradScaler("cuda") if args.amp else None
    for epoch in range(args.epochs):
        train_one_epoch(model, criterion, optimizer, loader, "cuda", args.clip, scaler)
        scheduler.step()
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epoch": epoch,
        }
        if scaler:
            checkpoint["scaler"] = scaler.state_dict()
        torch.save(checkpoint, args.output)
