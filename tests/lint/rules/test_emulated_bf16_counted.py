"""Where the answer to is_bf16_supported() decides."""

from __future__ import annotations

import pytest

from halfstep.lint.rules.emulated_bf16_counted import EmulatedBf16Counted
from tests.lint.judging import findings, fixed

RULES = [EmulatedBf16Counted()]
ASKS = "torch.cuda.is_bf16_supported()"


@pytest.mark.parametrize(
    "code",
    [
        f"dtype = 'bf16' if torch.cuda.is_available() and {ASKS} else 'fp16'",
        f"def supported():\n    return {ASKS}",
        f"use_scaler = not {ASKS}",
        f"config = dict(bf16={ASKS}, fp16=not bf16)",
    ],
)
def test_bare_calls_are_found(code: str) -> None:
    code = f"import torch\n\n{code}\n"
    assert len(findings(code, RULES)) == 1
    assert fixed(code, RULES) == code.replace("is_bf16_supported()", "is_bf16_supported(including_emulation=False)")


@pytest.mark.parametrize(
    "code",
    [
        "ok = torch.cuda.is_bf16_supported(including_emulation=False)",
        "ok = torch.cuda.is_bf16_supported(True)",
        "ok = torch.cuda.is_bf16_supported",
        "ok = torch.xpu.is_bf16_supported()",
        f"ok = {ASKS} and torch.cuda.get_device_capability() >= (8, 0)",
        f"ok = torch.cuda.get_device_properties(0).major >= 8 and {ASKS}",
        f"capability = torch.cuda.get_device_capability()\nok = {ASKS} if capability[0] >= 8 else False",
        f"ok = {ASKS} and torch.cuda.is_bf16_supported(including_emulation=False)",
        f"assert {ASKS}, 'no bf16'",
        f"if wanted and not {ASKS}:\n    raise RuntimeError('no bf16')",
        f"@pytest.mark.skipif(not {ASKS}, reason='no bf16')\ndef test(): pass",
    ],
)
def test_calls_that_ask_for_more_or_need_less_are_left_alone(code: str) -> None:
    assert findings(f"import torch\n\n{code}\n", RULES) == []
