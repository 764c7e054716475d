"""Forward and backward are functions within the loop, and a helper does the step."""

import contextlib
from functools import partial

import torch

from library import LossScaler, make_schedule


def train_one_epoch(model, loader, criterion, optimizer, args, region=contextlib.suppress, loss_scaler=None, schedule=None, average=None):
    optimizer.zero_grad()
    for index, (inputs, targets) in enumerate(loader):
        need_update = index == len(loader) - 1 or (index + 1) % args.window == 0

        def forward():
            with region():
                return criterion(model(inputs), targets) / args.window

        def backward(loss):
            if loss_scaler is not None:
                loss_scaler(loss, optimizer, clip_grad=args.clip, parameters=model.parameters(), need_update=need_update)
            else:
                loss.backward()
                if need_update:
                    if args.clip is not None:
                        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
                    optimizer.step()

        if hasattr(model, "no_sync") and not need_update:
            with model.no_sync():
                backward(forward())
        else:
            backward(forward())
        if not need_update:
            continue
        optimizer.zero_grad()
        if average is not None:
            average.update(model)
        if schedule is not None:
            schedule.step_update(index)


def main(model, loader, criterion, args):
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    region, loss_scaler = contextlib.suppress, None
    if args.amp:
        region = partial(torch.autocast, device_type="cuda", dtype=torch.float16)
        loss_scaler = LossScaler(device="cuda")
    schedule = make_schedule(optimizer)
    for epoch in range(args.epochs):
        train_one_epoch(model, loader, criterion, optimizer, args, region, loss_scaler, schedule)
        schedule.step(epoch + 1)
