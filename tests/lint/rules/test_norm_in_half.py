"""Norms, softmaxes and attention scores as people write them."""

from __future__ import annotations

import pytest
import torch

from halfstep.lint.rules.norm_in_half import NormInHalf
from tests.lint.marking import check_marked, fix_all

RULE = NormInHalf()

TEMPLATE = """
import math

import torch
import torch.nn.functional as F

def compute(a, b, scale, eps=1e-5):
    with torch.autocast({region}, dtype=torch.float16):
        x = a @ b
        y = a.half()
        {line}
    return out
"""


@pytest.mark.parametrize(
    "line",
    [
        "out = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)",
        "out = x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + eps)",
        "out = x / ((x * x).sum(-1, keepdim=True) + eps).sqrt()",
        "out = x / ((x * x).mean(-1, keepdim=True) + eps) ** 0.5",
        "out = (x - x.mean(-1)) / torch.sqrt(x.var(-1, unbiased=False) + eps)",
    ],
)
def test_norms_that_overflow_even_on_cuda(line: str) -> None:
    check_marked(TEMPLATE.format(region='"cuda"', line=line + "  # <-"), RULE)
    check_marked(TEMPLATE.format(region='"cpu"', line=line + "  # <-"), RULE)


@pytest.mark.parametrize(
    "line",
    [
        "out = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)",
        "out = x * torch.rsqrt((x**2).mean(-1, keepdim=True) + eps)",
        "out = x * torch.rsqrt(torch.pow(x, 2).mean(-1, keepdim=True) + eps)",
        "out = x / x.square().sum(-1, keepdim=True).sqrt()",
        "out = x.exp() / x.exp().sum(-1, keepdim=True)",
        "out = torch.exp(x) / torch.sum(torch.exp(x), dim=-1, keepdim=True)",
    ],
)
def test_norms_that_overflow_on_the_cpu_alone(line: str) -> None:
    check_marked(TEMPLATE.format(region='"cuda"', line=line), RULE)
    check_marked(TEMPLATE.format(region='"cpu"', line=line + "  # <-"), RULE)


@pytest.mark.parametrize(
    "line",
    [
        "out = (x * x).mean()",  # no norm: no root is taken of it
        "out = x.float() * torch.rsqrt((x.float() * x.float()).mean(-1, keepdim=True) + eps)",
        "out = a * torch.rsqrt((a * a).mean(-1, keepdim=True) + eps)",
        "out = F.layer_norm(x, (4,))",
        "out = x / x.std(-1, keepdim=True)",
        "out = torch.sqrt(x.mean())",
        "out = (x - x.amax()).exp() / (x - x.amax()).exp().sum()",
        "out = x / x.sum(-1, keepdim=True)",
    ],
)
def test_what_holds(line: str) -> None:
    check_marked(TEMPLATE.format(region='"cpu"', line=line), RULE)


@pytest.mark.parametrize(
    "lines",
    [
        ["s = (q @ k.transpose(-2, -1)) * 0.125  # <-"],
        ["s = q @ k.transpose(-2, -1) * self.scale  # <-"],
        ["s = (q @ k.mT) / math.sqrt(d)  # <-"],
        ["s = scale * (q @ k.transpose(-2, -1))  # <-"],
        ["s = torch.einsum('bhid,bhjd->bhij', q, k) * self.scale  # <-"],
        ["s = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.head_dim)  # <-"],
        ["s = torch.matmul(q, k.transpose(2, 3))", "s = s / math.sqrt(self.head_dim)  # <-"],
        ["s = torch.matmul(q, k.transpose(2, 3))", "s = s * self.scale + bias  # <-"],
        ["s = torch.bmm(q, k.transpose(1, 2))", "s *= 1.0"],
        ["s = q @ k.transpose(-2, -1)", "s = s.masked_fill(mask, float('-inf'))"],
        ["q = q * self.scale", "s = q @ k.transpose(-2, -1)"],
        ["s = (F.normalize(q) @ F.normalize(k).transpose(-2, -1)) * self.scale"],
        ["q, k = self.q_norm(q), self.k_norm(k)", "s = (q @ k.transpose(-2, -1)) * self.scale"],
        ["s = (q @ k.transpose(-2, -1)) * 8.0"],
        ["s = (q @ self.weight) * self.scale"],
        ["s = (q.float() @ k.float().transpose(-2, -1)) * self.scale  # <-"],  # cast to half by the region
    ],
)
def test_scores(lines: list[str]) -> None:
    body = "\n                ".join(lines)
    check_marked(
        f"""
        import math

        import torch
        import torch.nn.functional as F
        from torch import nn

        class Attention(nn.Module):
            def __init__(self, dim, heads):
                super().__init__()
                self.head_dim = dim // heads
                self.scale = self.head_dim ** -0.5
                self.q_norm = nn.LayerNorm(dim)
                self.k_norm = nn.LayerNorm(dim)
                self.weight = nn.Parameter(torch.ones(dim, dim))

            @torch.autocast("cuda", dtype=torch.float16)
            def forward(self, q, k, v, mask, bias, d, scale):
                {body}
                p = torch.softmax(s, dim=-1)
                return p @ v
        """,
        RULE,
    )


def test_scores_that_go_into_no_softmax_are_left_alone() -> None:
    check_marked(
        """
        import torch
        import torch.nn.functional as F

        def contrast(image, text, labels, scale):
            with torch.autocast("cuda"):
                logits = (image @ text.t()) * scale
                return F.cross_entropy(logits, labels)
        """,
        RULE,
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("s = (q @ k.mT) * 0.125", "s = (q * 0.125) @ k.mT"),
        ("s = (q @ k.mT) / d**0.5", "s = (q / (d**0.5)) @ k.mT"),
        ("s = 0.125 * ((q + b) @ k.mT)", "s = ((q + b) * 0.125) @ k.mT"),
        ("s = torch.matmul(q, k.mT) * 0.125", "s = torch.matmul(q * 0.125, k.mT)"),
        ("s = torch.einsum('id,jd->ij', q, k) * 0.125", "s = torch.einsum('id,jd->ij', q * 0.125, k)"),
    ],
)
def test_the_fix_scales_the_queries(before: str, after: str) -> None:
    code = """
    import torch

    @torch.autocast("cuda", dtype=torch.float16)
    def attend(q, k, b, d):
        {}
        return s.softmax(-1)
    """
    changed = fix_all(code.format(before), RULE)
    assert after in changed


def test_torch_does_as_the_rule_says() -> None:
    big = torch.full((2,), 300.0, dtype=torch.float16)
    assert (big * big).isinf().all()
    assert (big * torch.rsqrt((big * big).mean() + 1e-5)).tolist() == [0.0, 0.0]
    assert torch.tensor(11.1, dtype=torch.float16).exp().isinf()
    q = torch.full((1, 64, 128), 60.0, dtype=torch.float16)
    scale = 128**-0.5
    assert ((q @ q.mT) * scale).softmax(-1).isnan().all()
    assert ((q * scale) @ q.mT).isfinite().all()


def test_an_equation_that_has_the_name_of_the_queries_in_it() -> None:
    code = """
    import torch

    def attend(q, k):
        with torch.autocast("cuda", dtype=torch.float16):
            return (torch.einsum("qd,kd->qk", q, k) * 0.125).softmax(-1)
    """
    assert 'torch.einsum("qd,kd->qk", q * 0.125, k)' in fix_all(code, RULE)


def test_attention_of_a_language_model() -> None:
    check_marked(
        """
        import math

        import torch
        from torch import nn

        class SelfAttention(nn.Module):
            def __init__(self, config):
                super().__init__()
                self.head_size = config.hidden_size // config.heads
                self.query = nn.Linear(config.hidden_size, config.hidden_size)
                self.key = nn.Linear(config.hidden_size, config.hidden_size)

            def split(self, x):
                return x.view(*x.size()[:-1], 12, self.head_size).permute(0, 2, 1, 3)

            def forward(self, hidden, mask):
                query = self.split(self.query(hidden))
                key = self.split(self.key(hidden))
                scores = torch.matmul(query, key.transpose(-1, -2))
                scores = scores / math.sqrt(self.head_size)  # <-
                scores = scores + mask
                return nn.Softmax(dim=-1)(scores)

        def evaluate(config, loader):
            model = SelfAttention(config)
            for hidden, mask in loader:
                with torch.no_grad(), torch.cuda.amp.autocast():
                    print(model(hidden, mask))
        """,
        RULE,
    )
