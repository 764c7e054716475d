"""A loop that leaves backward, clipping and the step to a helper, if there is one."""

import contextlib

import torch

from library import NativeScaler


def train_one_epoch(model, loader, optimizer, args, loss_scaler=None, scheduler=None):
    if args.amp:
        region = lambda: torch.autocast("cuda", dtype=torch.float16)
    else:
        region = contextlib.nullcontext
    for index, (inputs, targets) in enumerate(loader):
        need_update = (index + 1) % args.accumulate == 0
        with region():
            loss = torch.nn.functional.cross_entropy(model(inputs), targets) / args.accumulate
        if loss_scaler is not None:
            loss_scaler(loss, optimizer, clip_grad=args.clip, parameters=model.parameters(), need_update=need_update)
        else:
            loss.backward()
            if need_update:
                if args.clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
        if need_update:
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step_update(index)


def main(model, loader, args):
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loss_scaler = NativeScaler() if args.amp else None
    train_one_epoch(model, loader, optimizer, args, loss_scaler)
