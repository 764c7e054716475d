"""Keywords of autocast, and what stands in the place of the device type."""

from __future__ import annotations

import inspect

import pytest
import torch

from halfstep.lint.rules.unknown_autocast_argument import UnknownAutocastArgument
from tests.lint.judging import findings, fixed, messages

RULES = [UnknownAutocastArgument()]
CODE = "import torch\n\nmodel.cuda()\nx = {}\n"


@pytest.mark.parametrize("name", [name for name in inspect.signature(torch.autocast).parameters if name != "self"])
def test_parameters_of_the_installed_torch_are_known(name: str) -> None:
    assert findings(CODE.format(f"torch.autocast({name}=value)"), RULES) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('torch.autocast("cuda", logits_to_softmax=True)', 'torch.autocast("cuda")'),
        ('torch.amp.autocast("cuda", torch.half, other=1)', 'torch.amp.autocast("cuda", torch.half)'),
        ('torch.autocast(device="cuda")', 'torch.autocast(device_type="cuda")'),
        ("torch.autocast(device=torch.device(name))", "torch.autocast(device_type=torch.device(name).type)"),
        ("torch.autocast(device=name)", "torch.autocast(device_type=torch.device(name).type)"),
        ('torch.autocast("cuda", torch_dtype=torch.half)', 'torch.autocast("cuda", dtype=torch.half)'),
        ('torch.autocast("cuda", enable=flag)', 'torch.autocast("cuda", enabled=flag)'),
        ('torch.autocast("cuda", enabeld=flag)', 'torch.autocast("cuda", enabled=flag)'),
        ('torch.autocast("cuda", cache=False)', 'torch.autocast("cuda", cache_enabled=False)'),
        ("torch.cuda.amp.autocast(flag, weights=1)", "torch.cuda.amp.autocast(flag)"),
        ("torch.autocast(torch.half)", 'torch.autocast("cuda", dtype=torch.half)'),
        ("torch.autocast(True)", 'torch.autocast("cuda", enabled=True)'),
        ('torch.autocast(torch.device("cuda"))', 'torch.autocast(torch.device("cuda").type)'),
        ('torch.autocast(device_type=torch.device("cuda"))', 'torch.autocast(device_type=torch.device("cuda").type)'),
        # What is meant is not clear, or another rule mends it.
        ('torch.autocast("cuda", precision="bf16")', None),
        ("torch.autocast(torch.half, True)", None),
        ('torch.cuda.amp.autocast(device_type="cuda")', None),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.autocast:FutureWarning")
def test_calls_and_what_they_become(old: str, new: str | None) -> None:
    assert len(findings(CODE.format(old), RULES)) == 1
    assert fixed(CODE.format(old), RULES) == CODE.format(new or old)
    with pytest.raises((TypeError, ValueError)):
        eval(old, {"torch": torch, "name": "cuda", "flag": True})


@pytest.mark.parametrize(
    "code",
    [
        'torch.autocast("cuda", torch.half, True, False)',
        'torch.autocast("cuda:0")',
        "torch.autocast(device)",
        "torch.autocast(device_type=device.type)",
        "torch.autocast(**options)",
        "torch.autocast(*options)",
        "torch.cuda.amp.autocast(enabled=True, dtype=torch.half, cache_enabled=True)",
        "other.autocast(logits_to_softmax=True)",
    ],
)
def test_what_is_right_or_unknown_is_left_alone(code: str) -> None:
    assert findings(CODE.format(code), RULES) == []


def test_several_keywords_are_told_one_by_one() -> None:
    found = messages(CODE.format('torch.autocast("cuda", one=1, two=2)'), RULES)
    assert [message.split("`")[3] for message in found] == ["one", "two"]


def test_a_partial_call_is_looked_at() -> None:
    code = "from functools import partial\nimport torch\n\nregion = partial(torch.autocast, 'cuda', flavour=1)\n"
    assert [line for line, _ in findings(code, RULES)] == [4]


def test_a_fallback_import_is_judged_by_both_of_its_names() -> None:
    code = "try:\n    from torch.amp import autocast\nexcept ImportError:\n    from torch.cuda.amp import autocast\n\nx = autocast({})\n"
    assert findings(code.format("device_type='cuda'"), RULES) == []
    assert len(findings(code.format("flavour=1"), RULES)) == 1
