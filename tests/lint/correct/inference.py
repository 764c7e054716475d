"""Evaluation in fp16 needs no scaler."""

import torch


@torch.no_grad()
def evaluate(model, loader, device="cuda"):
    model.eval()
    correct = count = 0
    for inputs, targets in loader:
        with torch.autocast(device, dtype=torch.float16):
            scores = model(inputs.to(device))
        correct += (scores.argmax(1) == targets.to(device)).sum()
        count += len(targets)
    return correct.item() / count


def generate(model, prompt, length):
    with torch.inference_mode(), torch.autocast("cuda", dtype=torch.float16):
        for _ in range(length):
            token = model(prompt)[:, -1].argmax(-1, keepdim=True)
            prompt = torch.cat([prompt, token], dim=1)
    return prompt
