"""A scaler for each of two networks, made by one call and told apart by their keys."""

import torch


def train(networks, loader, optimizers):
    scalers = {name: torch.amp.GradScaler("cuda") for name in ("generator", "critic")}
    for batch in loader:
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            losses = {name: network(batch) for name, network in networks.items()}
        scalers["generator"].scale(losses["generator"]).backward(retain_graph=True)
        scalers["critic"].scale(losses["critic"]).backward()
        scalers["generator"].step(optimizers["generator"])
        scalers["generator"].update()
        scalers["critic"].step(optimizers["critic"])
        scalers["critic"].update()
