"""A teacher without gradients and a student share a region."""

import torch
import torch.nn.functional as F


def train(student, teacher, loader, temperature=4.0):
    teacher.eval().requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cuda")
    for inputs, targets in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            with torch.no_grad():
                wanted = teacher(inputs)
            logits = student(inputs)
            soft = F.kl_div(F.log_softmax(logits / temperature, 1), F.softmax(wanted / temperature, 1), reduction="batchmean")
            loss = F.cross_entropy(logits, targets) + temperature**2 * soft
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
