"""Guards as people write them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from halfstep.lint.rules.epsilon_vanishes_in_half import EpsilonVanishesInHalf
from tests.lint.marking import check_marked, fix_all

RULE = EpsilonVanishesInHalf()

ON_CUDA = """
import torch
import torch.nn.functional as F

EPS = 1e-8

def guarded(layer, a, b, y):
    x = a.half()
    with torch.autocast("cuda", dtype=torch.float16):
        z = a @ b
        {}
"""

OUTSIDE = """
import torch
import torch.nn.functional as F

def guarded(a, b, eps=1e-12, tiny=1e-9):
    x, z = a.half(), b.to(torch.float16)
    {}
"""


@pytest.mark.parametrize(
    "line",
    [
        "out = z / (z.abs().amax(-1, keepdim=True) + 1e-8)",
        "out = z / (1e-8 + z.amax())",
        "out = torch.log(torch.sigmoid(z) + 1e-8)",
        "out = (z.sigmoid() + EPS).log()",
        "out = y / z.clamp(min=1e-8)",
        "out = y / torch.clamp(z, min=1e-10)",
        "out = y / torch.clamp_min(z, 1e-10)",
        "out = y / z.clamp(1e-9, 1.0)",
        "out = torch.sqrt(z.mean() + 1e-12)",
        "out = (z.amax() - z.amin() + 1e-8).reciprocal()",
        "out = 1.0 / (F.relu(z) + 2.0**-25)",
    ],
)
def test_guards_that_vanish_under_cuda_autocast(line: str) -> None:
    check_marked(ON_CUDA.format(line + "  # <-"), RULE)


@pytest.mark.parametrize(
    "line",
    [
        "out = z / (z.sum() + 1e-8)",
        "out = z / (z.norm(dim=-1, keepdim=True) + 1e-8)",
        "out = torch.log(z.softmax(-1) + 1e-8)",
        "out = torch.rsqrt(z.pow(2).mean(-1) + 1e-8)",
        "out = torch.rsqrt((z**2).mean(-1) + 1e-8)",
        "out = F.normalize(z, dim=-1)",
        "out = F.cosine_similarity(z, z)",
        "out = z / (z.float().amax() + 1e-8)",
        "out = z / (z.amax() + 1e-6)",
        "out = z / (z.amax() + 6e-8)",
        "out = z / z.clamp(min=torch.finfo(z.dtype).tiny)",
        "out = y / (y.amax() + 1e-8)",
        "out = layer(z) + 1e-8",
        "out = torch.cumsum(z, 0) + 1e-8",
    ],
)
def test_guards_that_do_not(line: str) -> None:
    check_marked(ON_CUDA.format(line), RULE)


@pytest.mark.parametrize(
    "line",
    [
        "out = F.normalize(x)",
        "out = F.normalize(x, dim=-1, eps=1e-8)",
        "out = F.normalize(x, 2, -1, 1e-10)",
        "out = F.cosine_similarity(x, z)",
        "out = torch.cosine_similarity(x, z, dim=-1)",
        "out = z / (z.sum() + 1e-8)",
        "out = z / (z.norm() + 1e-8)",
        "out = torch.log(z.softmax(-1) + 1e-8)",
        "out = z / (z.amax() + eps)",
        "out = z / z.clamp(min=tiny)",
    ],
)
def test_guards_that_vanish_outside_of_autocast(line: str) -> None:
    check_marked(OUTSIDE.format(line + "  # <-"), RULE)


@pytest.mark.parametrize(
    "line",
    [
        "out = F.normalize(x.float())",
        "out = F.normalize(x, eps=1e-6)",
        "out = F.normalize(a)",
        "out = F.normalize(x.bfloat16())",
        "out = F.layer_norm(x, (4,), eps=1e-12)",
        "out = z / (z.double().sum() + 1e-8)",
    ],
)
def test_guards_that_hold_outside_of_autocast(line: str) -> None:
    check_marked(OUTSIDE.format(line), RULE)


def test_a_guard_that_is_passed_as_a_function() -> None:
    check_marked(
        """
        import torch

        head = torch.nn.Linear(4, 1)

        def ratio(dtype, guard):
            with torch.autocast("cpu", dtype=dtype):
                s = head(torch.ones(4, 4)).squeeze(-1)
                return (s - s.min()) / guard(s.max() - s.min())

        for guard in (
            lambda d: d + 1e-8,  # <-
            lambda d: d.clamp(min=1e-8),  # <-
            lambda d: d.clamp(min=torch.finfo(d.dtype).tiny),
            lambda d: d.float() + 1e-8,
        ):
            for dtype in (torch.bfloat16, torch.float16):
                print(ratio(dtype, guard))
        """,
        RULE,
    )


def test_a_guard_from_a_table_of_names_and_functions() -> None:
    check_marked(
        """
        import torch

        def ratio(x, dtype, guard):
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                s = torch.nn.functional.linear(x, x)
                return s / guard(s.amax())

        for name, guard in (
            ("added", lambda d: d + 1e-8),  # <-
            ("in float32", lambda d: d.float() + 1e-8),
        ):
            print(name, [ratio(torch.ones(2, 2), dtype, guard) for dtype in (None, torch.float16)])
        for name, guard in (("added", lambda d: d + 1e-8), ("none", lambda d: d)):
            print(name, [ratio(torch.ones(2, 2), dtype, guard) for dtype in (None, torch.bfloat16)])
        """,
        RULE,
    )


def test_only_types_that_are_reached_together() -> None:
    check_marked(
        """
        import torch

        def ratio(x, dtype, guard):
            y = x.to(dtype)
            return y / (y.amax() + guard)

        ratio(torch.ones(3), torch.float16, 1e-4)
        ratio(torch.ones(3), torch.bfloat16, 1e-8)
        """,
        RULE,
    )


def test_a_half_model_and_its_own_norm() -> None:
    check_marked(
        """
        import torch
        from torch import nn

        class Head(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(8, 8)

            def forward(self, x):
                y = self.fc(x)
                return y / (y.norm(dim=-1, keepdim=True) + 1e-8)  # <-

        model = Head().cuda().half().eval()
        print(model(torch.ones(1, 8).cuda().half()))
        """,
        RULE,
    )


@pytest.mark.parametrize("epsilon", [1e-8, 1e-12, 2.0**-25])
def test_torch_does_as_the_rule_says(epsilon: float) -> None:
    zero = torch.zeros(2, dtype=torch.float16)
    assert (zero + epsilon).tolist() == [0.0, 0.0]
    assert zero.clamp(min=epsilon).tolist() == [0.0, 0.0]
    assert F.normalize(zero, dim=0, eps=epsilon).isnan().all()
    assert (zero.bfloat16() + epsilon).all()


def test_the_fix_computes_in_float32() -> None:
    code = """
    import torch
    import torch.nn.functional as F

    def similarity(a, b):
        a, b = a.half(), b.half()
        low, high = a.amin(), a.amax()
        a = a / (high - low + 1e-9)
        return F.cosine_similarity(a, b)
    """
    changed = fix_all(code, RULE)
    assert "a = a / ((high - low).float() + 1e-9)" in changed
    assert "return F.cosine_similarity(a.float(), b.float())" in changed


@pytest.mark.parametrize("base", ["(Rate)", "(Other, Rate)", ""])
def test_a_sum_that_a_base_class_counts_up_is_not_known(base: str) -> None:
    check_marked(
        f"""
        class Rate:
            'in half'
            def update(self, wrong, total):
                self.wrong += wrong
                self.total += total

        class Share{base}:
            def compute(self):
                return self.wrong / (self.total + 1e-8)
        """,
        RULE,
    )


def test_a_branch_by_the_type_is_left_alone() -> None:
    check_marked(OUTSIDE.format("if x.dtype == torch.float32:\n        out = x / (x.sum() + 1e-8)"), RULE)
    check_marked(OUTSIDE.format("if x.device == b.device:\n        out = x / (x.sum() + 1e-8)  # <-"), RULE)
