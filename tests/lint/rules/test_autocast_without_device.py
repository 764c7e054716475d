"""Which device type a fix puts in."""

from __future__ import annotations

import pytest

from halfstep.lint.module import parse_module
from halfstep.lint.rules.autocast_without_device import AutocastWithoutDevice
from tests.lint.judging import findings, fixed

RULE = AutocastWithoutDevice()
RULES = [RULE]


@pytest.mark.parametrize(
    ("before", "device", "safety"),
    [
        ("model.cuda()", '"cuda"', "safe"),
        ('model.to("cuda:1")', '"cuda"', "safe"),
        ('model.to("cpu")', '"cpu"', "safe"),
        ('model.to("mps")', '"mps"', "safe"),
        ("pass", '"cuda"', "unsafe"),
        ('device = torch.device("cuda" if torch.cuda.is_available() else "cpu")', "device.type", "safe"),
        ('device = "cuda:0" if torch.cuda.is_available() else "cpu"', "torch.device(device).type", "unsafe"),
        ("device = pick()", "torch.device(device).type", "unsafe"),
        ("model.to(args.device)", "torch.device(args.device).type", "unsafe"),
    ],
)
def test_the_device_that_the_file_shows(before: str, device: str, safety: str) -> None:
    code = f"import torch\n\n{before}\nwith torch.autocast(dtype=torch.half):\n    pass\n"
    (finding,) = RULE.check(parse_module(code))
    assert finding.fix is not None
    assert finding.fix.safety == safety
    assert fixed(code, RULES) == code.replace("(dtype", f"({device}, dtype")


@pytest.mark.parametrize(
    "call",
    [
        "torch.autocast()",
        "torch.amp.autocast(enabled=flag)",
        "torch.amp.autocast_mode.autocast(dtype=torch.half, cache_enabled=False)",
    ],
)
def test_calls_without_a_device(call: str) -> None:
    assert [line for line, _ in findings(f"import torch\n\nx = {call}\n", RULES)] == [3]


@pytest.mark.parametrize(
    "call",
    [
        'torch.autocast("cuda")',
        "torch.autocast(device_type=kind)",
        "torch.autocast(**options)",
        "torch.autocast(*options)",
        "torch.autocast(device='cuda')",
        "torch.cuda.amp.autocast(enabled=flag)",
        "accelerator.autocast()",
        "torch.is_autocast_enabled()",
    ],
)
def test_calls_that_have_one_or_are_not_known(call: str) -> None:
    assert findings(f"import torch\n\nx = {call}\n", RULES) == []


def test_a_name_that_may_be_the_old_class_is_left_alone() -> None:
    code = (
        "try:\n    from torch.cuda.amp import autocast\nexcept ImportError:\n    from torch import autocast\n\nwith autocast():\n    pass\n"
    )
    assert findings(code, RULES) == []
