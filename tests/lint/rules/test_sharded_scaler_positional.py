"""The order of ShardedGradScaler's arguments."""

from __future__ import annotations

import inspect

import pytest
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from halfstep.lint.rules.sharded_scaler_positional import ShardedScalerPositional
from tests.lint.judging import findings, fixed

RULES = [ShardedScalerPositional()]
CODE = "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler\n\nscaler = ShardedGradScaler({})\n"


def test_the_installed_torch_has_the_order_that_the_rule_is_about() -> None:
    assert list(inspect.signature(ShardedGradScaler).parameters)[:5] == [
        "device",
        "init_scale",
        "backoff_factor",
        "growth_factor",
        "growth_interval",
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"cuda", 2.0**16, 2.0, 0.5', '"cuda", init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5'),
        ('"cuda", 1024, 1.5, 0.9, 50', '"cuda", init_scale=1024, growth_factor=1.5, backoff_factor=0.9, growth_interval=50'),
        ("device, scale, 2.0, 0.5", "device, init_scale=scale, growth_factor=2.0, backoff_factor=0.5"),
        ('"cuda", s, growth, backoff', '"cuda", init_scale=s, growth_factor=growth, backoff_factor=backoff'),
        ("65536.0", "init_scale=65536.0"),
        ("65536.0, enabled=True", "enabled=True, init_scale=65536.0"),
        ("1024.0, 2.0, 0.5, 100", "init_scale=1024.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=100"),
        ("1024.0, 0.5, 2.0", "init_scale=1024.0, backoff_factor=0.5, growth_factor=2.0"),
        ("cfg.init_scale", "init_scale=cfg.init_scale"),
        # Shown to be wrong, but not what is right.
        ("1024.0, a, b, c", None),
        ('"cuda", s, growth, b', None),
    ],
)
def test_arguments_in_wrong_places(old: str, new: str | None) -> None:
    assert len(findings(CODE.format(old), RULES)) == 1
    assert fixed(CODE.format(old), RULES) == CODE.format(new or old)


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        '"cuda"',
        '"cuda", 1024.0',
        '"cuda", 1024.0, 0.5, 2.0',
        '"cuda", s, backoff, growth',
        "device",
        "*options",
        "a, b, c, d",
        "init_scale=2.0",
    ],
)
def test_arguments_in_right_or_unknown_places(arguments: str) -> None:
    assert findings(CODE.format(arguments), RULES) == []


def test_the_class_of_another_library_is_left_alone() -> None:
    code = "from fairscale.optim.grad_scaler import ShardedGradScaler\n\nscaler = ShardedGradScaler(1024.0, 2.0, 0.5)\n"
    assert findings(code, RULES) == []
