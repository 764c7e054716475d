"""Image classification: gradients are clipped while they still carry the scale."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader


def build(args):
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    return model, optimizer


def train_epoch(model, optimizer, scaler, loader, args):
    model.train()
    total = 0.0
    for step, (images, labels) in enumerate(loader):
        images, labels = images.to(args.device), labels.to(args.device)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=args.clip)  # expect: clip_before_unscale
        scaler.step(optimizer)
        scaler.update()
        if step % 50 == 0:
            total += loss.item()
    return total


@torch.no_grad()
def evaluate(model, loader, args):
    model.eval()
    hits = sum((model(x.to(args.device)).argmax(1).cpu() == y).sum().item() for x, y in loader)
    return hits / len(loader.dataset)


def main(dataset, held_out):
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    model, optimizer = build(args)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(10):
        train_epoch(model, optimizer, scaler, DataLoader(dataset, 128, shuffle=True), args)
        print(epoch, evaluate(model, DataLoader(held_out, 256), args))
