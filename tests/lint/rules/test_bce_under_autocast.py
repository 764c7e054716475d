"""The forbidden loss, by whatever way it comes into a region."""

from __future__ import annotations

import pytest

from halfstep.lint.rules.bce_under_autocast import BceUnderAutocast
from tests.lint.judging import messages
from tests.lint.marking import check_marked, fix_all

RULE = BceUnderAutocast()


@pytest.mark.parametrize(
    ("region", "fires"),
    [
        ('torch.autocast("cuda")', True),
        ('torch.autocast("cuda", dtype=torch.bfloat16)', True),
        ("torch.cuda.amp.autocast(enabled=amp)", True),
        ('torch.autocast("cuda" if torch.cuda.is_available() else "cpu")', True),
        ("torch.autocast(device_type=device.type)", True),
        ('torch.autocast("cpu")', False),
        ('torch.autocast("mps")', False),
        ('torch.autocast("cuda", enabled=False)', False),
        ("torch.no_grad()", False),
    ],
)
def test_regions(region: str, *, fires: bool) -> None:
    mark = "  # <-" if fires else ""
    check_marked(
        f"""
        import torch
        import torch.nn.functional as F

        def loss_of(model, x, y, amp, device):
            with {region}:
                p = model(x)
                return F.binary_cross_entropy(p, y){mark}
        """,
        RULE,
    )


@pytest.mark.parametrize(
    "code",
    [
        """
        import torch
        from torch.nn.functional import binary_cross_entropy as bce

        @torch.autocast("cuda")
        def loss_of(model, x, y):
            return bce(model(x), y)  # <-
        """,
        """
        import torch
        from torch import nn

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.criterion = nn.BCELoss(reduction="sum").cuda()

            def step(self, x, y):
                with torch.autocast("cuda"):
                    return self.loss(self.model(x), y)

            def loss(self, p, y):
                return self.criterion(p, y)  # <-
        """,
        """
        import torch

        def step(model, x, y, scaler):
            with torch.autocast("cuda"):
                loss = torch.nn.BCELoss()(model(x), y)  # <-
            scaler.scale(loss).backward()
        """,
        """
        import torch
        import torch.nn.functional as F

        def losses(p, y):
            return {"bce": lambda: F.binary_cross_entropy(p, y), "mse": lambda: F.mse_loss(p, y)}  # <-

        def run(p, y):
            return {name: loss() for name, loss in losses(p, y).items()}

        def train(p, y):
            with torch.autocast("cuda"):
                return run(p, y)
        """,
        """
        import torch
        import torch.nn.functional as F

        def loss(p, y):
            return F.binary_cross_entropy(p, y)  # <-

        torch.set_autocast_enabled("cuda", True)
        try:
            print(loss(torch.rand(2), torch.ones(2)))
        finally:
            torch.set_autocast_enabled("cuda", False)
        """,
        """
        import torch
        import torch.nn.functional as F

        def loss(p, y):
            return F.binary_cross_entropy(p, y)

        with torch.autocast("cuda"):
            p = torch.rand(2)
            with torch.autocast("cuda", enabled=False):
                print(loss(p.float(), torch.ones(2)))
        """,
        """
        import torch
        from torch import nn

        criterion = nn.BCELoss() if True else nn.BCEWithLogitsLoss()

        def loss(p, y):
            with torch.autocast("cuda"):
                return criterion(p, y)
        """,
    ],
)
def test_ways_into_a_region(code: str) -> None:
    check_marked(code, RULE)


def test_the_message_knows_where_the_sigmoid_is() -> None:
    code = """import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 1)

    def forward(self, x):
        return torch.sigmoid(self.fc(x))


def train(x, y):
    model = Net()
    with torch.autocast("cuda"):
        p = model(x)
        loss = F.binary_cross_entropy(p, y)
    return loss
"""
    (message,) = messages(code, [RULE])
    assert "The model ends in a sigmoid (line 12)" in message


def test_the_fix_takes_the_logits() -> None:
    code = """
    import torch
    from torch.nn.functional import binary_cross_entropy

    def loss_of(model, x, y):
        with torch.autocast("cuda"):
            logits = model(x)
            p = torch.sigmoid(logits)
            loss = binary_cross_entropy(p, y, reduction="sum")
        return loss, p
    """
    changed = fix_all(code, RULE)
    assert 'loss = binary_cross_entropy_with_logits(logits, y, reduction="sum")' in changed
    assert "import binary_cross_entropy_with_logits" in changed


def test_logits_that_are_gone_are_not_taken() -> None:
    code = """
    import torch
    import torch.nn.functional as F

    def loss_of(model, x, y):
        with torch.autocast("cuda"):
            p = model(x)
            p = torch.sigmoid(p)
            return F.binary_cross_entropy(p, y)
    """
    changed = fix_all(code, RULE)
    assert "with_logits" not in changed
    assert 'with torch.autocast("cuda", enabled=False):\n            return F.binary_cross_entropy(p.float(), y.float())' in changed


def test_all_losses_of_a_statement_are_taken_out_at_once() -> None:
    code = """
    import torch
    from torch import nn

    bce = nn.BCELoss()

    def loss_of(real, fake, ones, device):
        with torch.autocast(device_type=device):
            loss = (bce(real, ones) + bce(fake, 1 - ones)) / 2
        return loss
    """
    changed = fix_all(code, RULE)
    assert "with torch.autocast(device, enabled=False):" in changed
    assert "loss = (bce(real.float(), ones.float()) + bce(fake.float(), (1 - ones).float())) / 2" in changed
