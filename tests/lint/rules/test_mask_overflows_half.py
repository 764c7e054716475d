"""Masks of attention as people write them."""

from __future__ import annotations

import pytest
import torch

from halfstep.lint.rules.mask_overflows_half import MaskOverflowsHalf
from tests.lint.marking import check_marked, fix_all

RULE = MaskOverflowsHalf()

IN_REGION = """
import math
import sys

import numpy as np
import torch
import torch.nn.functional as F

NEGATIVE = -1e9
LOWEST = torch.finfo(torch.float32).min

def attend(q, k, v, mask, bias, dtype):
    with torch.autocast("cuda", dtype=torch.float16):
        scores = q @ k.transpose(-2, -1)
        {}
    return out
"""


@pytest.mark.parametrize(
    "line",
    [
        "out = scores.masked_fill(mask == 0, -1e9)",
        "out = scores.masked_fill(~mask, value=-1e9)",
        "out = scores.masked_fill_(mask, -1e5)",
        "out = scores.masked_fill(mask, NEGATIVE)",
        "out = scores.masked_fill(mask, LOWEST)",
        "out = scores.masked_fill(mask, torch.finfo(torch.float32).min)",
        "out = scores.masked_fill(mask, torch.finfo(torch.bfloat16).min)",
        "out = scores.masked_fill(mask, -torch.finfo(torch.float).max)",
        "out = scores.masked_fill(mask, np.finfo(np.float32).min)",
        "out = scores.masked_fill(mask, -(2.0**20))",
        "out = torch.masked_fill(scores, mask, -1e9)",
        "out = torch.where(mask, scores, -1e9)",
        "out = torch.where(mask, torch.tensor(-1e9), scores)",
        "out = torch.where(mask, scores, torch.tensor(-1e9, device=scores.device))",
        "out = scores.where(mask, -1e9)",
        "scores[mask] = -1e9; out = scores",
        "scores[:, :4] = -1e9; out = scores",
        "out = torch.full_like(scores, -1e9)",
        "out = scores.new_full((2, 2), fill_value=-1e9)",
        "out = scores.clone().fill_(-1e9)",
        "out = torch.full((2, 2), -1e9, dtype=scores.dtype)",
        "out = F.pad(scores, (0, 1), value=-1e9)",
        "out = scores.clamp(min=-1e9)",
        "out = torch.clamp(scores, -1e6, 1e4)",
        "out = scores + (1.0 - mask.half()) * -1e9",
        "out = scores + (1 - mask.to(scores.dtype)) * -1e9",
        "out = torch.where(mask, scores - 1e9, scores)",
        "out = (scores / math.sqrt(q.size(-1))).masked_fill(mask, -1e9)",
        "out = (scores * 0.125 + scores).masked_fill(mask, -1e9)",
        "out = torch.bmm(q, k).masked_fill(mask, -1e9)",
        "out = torch.einsum('bid,bjd->bij', q, k).masked_fill(mask, -1e9)",
        "out = F.linear(q, k).masked_fill(mask, -1e9)",
        "out = scores.view(2, -1).tril().masked_fill(mask, -1e9)",
    ],
)
def test_masks_that_overflow(line: str) -> None:
    check_marked(IN_REGION.format(line + "  # <-"), RULE)


@pytest.mark.parametrize(
    "line",
    [
        "out = scores.masked_fill(mask, -65504)",
        "out = scores.masked_fill(mask, -1e4)",
        "out = scores.masked_fill(mask, float('-inf'))",
        "out = scores.masked_fill(mask, -math.inf)",
        "out = scores.masked_fill(mask, -torch.inf)",
        "out = scores.masked_fill(mask, torch.finfo(scores.dtype).min)",
        "out = scores.masked_fill(mask, torch.finfo(torch.float16).min)",
        "out = scores.masked_fill(mask, torch.finfo(dtype).min)",
        "out = scores.float().masked_fill(mask, -1e9)",
        "out = scores.to(torch.float32).masked_fill(mask, -1e9)",
        "out = torch.where(mask, scores.float(), -1e9)",
        "out = torch.where(mask, q, -1e9)",
        "out = (scores + bias).masked_fill(mask, -1e9)",  # the bias may be float32
        "out = scores.softmax(-1).masked_fill(mask, -1e9)",  # float32 on CUDA
        "out = scores + (1.0 - mask) * -1e9",
        "out = scores.argmax(-1).masked_fill(mask, -100000)",
        "out = torch.full((2, 2), -1e9)",
        "out = torch.full_like(scores, -1e9, dtype=torch.float32)",
        "out = torch.softmax(scores, -1, dtype=torch.float32).masked_fill(mask, -1e9)",
        "out = {}; out[0] = -1e9",
        "out = scores * 1e6",
        "out = q.masked_fill(mask, -1e9)",
    ],
)
def test_masks_that_do_not(line: str) -> None:
    check_marked(IN_REGION.format(line), RULE)


@pytest.mark.parametrize("value", [-1e9, -1e5, torch.finfo(torch.float32).min])
def test_torch_does_as_the_rule_says(value: float) -> None:
    scores, mask = torch.zeros(2, dtype=torch.float16), torch.tensor([True, False])
    with pytest.raises(RuntimeError, match="without overflow"):
        scores.masked_fill(mask, value)
    with pytest.raises(RuntimeError, match="without overflow"):
        torch.full_like(scores, value)
    assert torch.where(mask, value, scores).isinf().tolist() == [True, False]


@pytest.mark.parametrize(
    ("region", "fires"),
    [
        ('torch.autocast("cuda")', True),
        ("torch.cuda.amp.autocast()", True),
        ('torch.autocast(device_type="cuda", enabled=use_amp)', True),
        ('torch.autocast("cpu", dtype=torch.float16)', True),
        ('torch.autocast("cuda", dtype=torch.bfloat16 if use_bf16 else torch.float16)', True),
        ('torch.autocast("cuda", enabled=False)', False),
        ('torch.autocast("cpu")', False),
        ('torch.autocast("cuda", dtype=dtype)', False),
        ("torch.autocast(device)", False),
    ],
)
def test_regions(region: str, *, fires: bool) -> None:
    mark = "  # <-" if fires else ""
    check_marked(
        f"""
        import torch

        def attend(q, k, mask, use_amp, use_bf16, dtype, device):
            with {region}:
                scores = torch.matmul(q, k)
                return scores.masked_fill(mask, -1e9){mark}
        """,
        RULE,
    )


MODULE = """
import math

import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.drop = nn.Dropout(0.1)
        self.scale = config.head_dim ** -0.5

    def forward(self, x, mask=None):
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, 8, c // 8).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q * self.scale) @ k.transpose(-2, -1)
        if mask is not None:
            attn = attn.masked_fill(mask == 0, -1e9){mark}
        attn = self.drop(attn.softmax(dim=-1))
        return (attn @ v).transpose(1, 2).reshape(b, n, c)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.dim)
        self.attn = SelfAttention(config)

    def forward(self, x, mask=None):
        return x + self.attn(self.norm(x), mask)


class Encoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.depth)])

    def forward(self, x, mask):
        for block in self.blocks:
            x = block(x, mask)
        return x

"""


@pytest.mark.parametrize(
    ("training", "fires"),
    [
        (
            """
def main(config, loader, criterion):
    model = Encoder(config).cuda()
    model = torch.nn.parallel.DistributedDataParallel(model)
    scaler = torch.amp.GradScaler("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for x, mask, y in loader:
        with torch.autocast("cuda"):
            loss = criterion(model(x, mask), y)
        scaler.scale(loss).backward()
""",
            True,
        ),
        (
            """
def step(model, x, mask):
    with torch.autocast("cuda", dtype=torch.float16):
        return model(x, mask)

def main(config, loader):
    model = Encoder(config)
    for x, mask in loader:
        step(model, x, mask)
""",
            True,
        ),
        (
            """
class Trainer:
    def __init__(self, config):
        self.model = Encoder(config)

    def train_step(self, x, mask):
        with torch.autocast("cuda"):
            return self.model(x, mask)
""",
            True,
        ),
        (
            """
def main(config, x, mask):
    model = Encoder(config).half().eval()
    return model(x.half(), mask)
""",
            True,
        ),
        (
            """
def main(config, x, mask):
    model = Encoder(config)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return model(x, mask)
""",
            False,
        ),
        (
            """
def main(config, x, mask):
    model = Encoder(config).half().float()
    return model(x, mask)
""",
            False,
        ),
        (
            """
def main(model, x, mask):
    with torch.autocast("cuda"):
        return model(x, mask)
""",
            False,
        ),
    ],
)
def test_attention_that_is_called_in_a_region(training: str, *, fires: bool) -> None:
    check_marked(MODULE.replace("{mark}", "  # <-" if fires else "") + training, RULE)


def test_fixing_keeps_the_name_of_torch() -> None:
    code = """
    import torch as th

    def attend(q, k, mask):
        with th.autocast("cuda", dtype=th.half):
            scores = th.bmm(q, k)
            return scores.masked_fill(mask, 1e9)  # far away
    """
    assert "scores.masked_fill(mask, th.finfo(scores.dtype).max)  # far away" in fix_all(code, RULE)


def test_fixing_imports_torch_where_it_has_no_name() -> None:
    code = """
    from torch import autocast, bmm, float16

    def attend(q, k, mask):
        with autocast("cuda", dtype=float16):
            scores = bmm(q, k)
            return scores.masked_fill(mask, -1e9)
    """
    changed = fix_all(code, RULE)
    assert "import torch\n" in changed
    assert "torch.finfo(scores.dtype).min" in changed


BRANCHES = """
import torch

def scores(q, k, m, fp16):
    with torch.autocast("cuda"):
        s = q @ k.mT
        {}
"""


@pytest.mark.parametrize(
    "lines",
    [
        "if s.dtype == torch.float16:\n            s = s.masked_fill(m, -6e4)\n        else:\n            s = s.masked_fill(m, -1e9)",
        "if s.dtype != torch.float16:\n            s = s.masked_fill(m, -1e9)",
        "s = s.masked_fill(m, -6e4) if fp16 else s.masked_fill(m, -1e9)",
        "if not m:\n            s = s.masked_fill(m, -1e9)  # <-",
        "if fp16:\n            s = s.masked_fill(m, -1e9)  # <-",
        "if s.device == m.device:\n            s = s.masked_fill(m, -1e9)  # <-",
    ],
)
def test_a_branch_by_the_type_is_left_alone(lines: str) -> None:
    check_marked(BRANCHES.format(lines), RULE)
