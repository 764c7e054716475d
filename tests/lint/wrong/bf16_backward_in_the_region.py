"""bf16: no scaler, and backward runs in the region."""

import torch


def pretrain(model, batches, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95))
    for step in range(steps):
        tokens = next(batches)
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()  # expect: backward_in_autocast
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            print(step, loss.item())
