"""Scalers in files where nothing, or something out of sight, enters autocast."""

from __future__ import annotations

import pytest

from halfstep.lint.rules.scaler_without_autocast import ScalerWithoutAutocast
from tests.lint.marking import check_marked

RULE = ScalerWithoutAutocast()


@pytest.mark.parametrize(
    "code",
    [
        """
        import torch
        from torchvision import models

        model = models.resnet18().cuda()
        criterion = torch.nn.CrossEntropyLoss()
        scaler = torch.cuda.amp.GradScaler()  # <-
        for x, y in loader:
            output = model(x.cuda())
            loss = criterion(output, y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        """
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(2, 2)

            def forward(self, x):
                return self.fc(x)

        class Trainer:
            def __init__(self):
                self.model = Net()
                self.scaler = torch.amp.GradScaler("cuda")  # <-

            def step(self, x, y):
                loss = torch.nn.functional.mse_loss(self.model(x), y)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
        """,
        """
        import torch

        def step(model, x, y, scaler):
            loss = torch.nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()

        step(torch.nn.Linear(2, 2), x, y, torch.amp.GradScaler("cpu", init_scale=8.0))  # <-
        """,
        # The flags differ.
        """
        import torch

        amp = False
        scaler = torch.amp.GradScaler("cuda")  # <-
        with torch.autocast("cuda", enabled=amp):
            loss = model(x)
        scaler.scale(loss).backward()
        """,
        # The model is from elsewhere.
        """
        import torch
        from mine import Net

        model = Net()
        scaler = torch.amp.GradScaler("cuda")
        loss = model(x).mean()
        scaler.scale(loss).backward()
        """,
        """
        import torch
        from mine import build

        model = build()
        scaler = torch.amp.GradScaler("cuda")
        loss = model(x).mean()
        scaler.scale(loss).backward()
        """,
        """
        import torch
        from mine import step

        scaler = torch.amp.GradScaler("cuda")
        loss = step(torch.nn.Linear(2, 2), x)
        scaler.scale(loss).backward()
        """,
        """
        import torch

        class Trainer:
            def __init__(self):
                self.model = torch.nn.Linear(2, 2)
                self.scaler = torch.amp.GradScaler("cuda")

            def step(self, x, y):
                loss = self.compute(self.model, x, y)
                self.scaler.scale(loss).backward()
        """,
        # Something else is half precision.
        """
        import torch

        model = torch.nn.Linear(2, 2).half()
        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(model(x).mean()).backward()
        """,
        """
        import torch
        from mine import amp_context

        model = torch.nn.Linear(2, 2)
        scaler = torch.amp.GradScaler("cuda")
        with amp_context():
            loss = model(x).mean()
        scaler.scale(loss).backward()
        """,
        """
        import torch

        model = torch.nn.Linear(2, 2)
        scaler = torch.amp.GradScaler("cuda", enabled=False)
        scaler.scale(model(x).mean()).backward()
        """,
        """
        import torch

        model = torch.nn.Linear(2, 2)
        scaler = torch.amp.GradScaler("cuda", enabled=flag)
        scaler.scale(model(x).mean()).backward()
        """,
        # The region that is off is one of several.
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        context = torch.autocast("cuda")
        with torch.autocast("cuda", enabled=False):
            loss = criterion(run(context, x).float())
        scaler.scale(loss).backward()
        """,
    ],
)
def test_programs(code: str) -> None:
    check_marked(code, RULE)
