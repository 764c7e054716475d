"""What has a `scale()` is no gradient scaler for that: a normaliser of rewards, and an engine that unscales in its own step."""

import torch


def improve(policy, batches, optimizer, normaliser):
    for batch in batches:
        optimizer.zero_grad()
        loss = policy(batch).mean()
        normaliser.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        normaliser.update(batch)


def train(engine, batches):
    for batch in batches:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = engine(batch)
        engine.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(engine.parameters(), 1.0)
        engine.step()
