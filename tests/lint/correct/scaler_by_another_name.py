"""Nothing in the name of the parameter says that it is a scaler; what is called on it does."""

import torch


def train(net, batches, optimizer, gs=None):
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = net(batch)
        if gs is not None:
            gs.scale(loss).backward()
        else:
            loss.backward()
        if gs:
            gs.step(optimizer)
            gs.update()
        else:
            optimizer.step()
