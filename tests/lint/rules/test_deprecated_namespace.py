"""Every way to write an old name, and what it becomes."""

from __future__ import annotations

import warnings
from textwrap import dedent

import pytest
import torch

from halfstep.lint.moving import HOMES
from halfstep.lint.rules.deprecated_namespace import DeprecatedNamespace
from tests.lint.judging import findings, fixed, messages

RULES = [DeprecatedNamespace()]


def lines(code: str) -> list[int]:
    return [line for line, _ in findings(dedent(code).lstrip(), RULES)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("torch.cuda.amp.autocast()", 'torch.amp.autocast("cuda")'),
        ("torch.cpu.amp.autocast()", 'torch.amp.autocast("cpu")'),
        ("torch.cuda.amp.autocast(False)", 'torch.amp.autocast("cuda", enabled=False)'),
        ("torch.cuda.amp.autocast(flag, torch.bfloat16)", 'torch.amp.autocast("cuda", enabled=flag, dtype=torch.bfloat16)'),
        ("torch.cuda.amp.autocast(flag, cache_enabled=False)", 'torch.amp.autocast("cuda", cache_enabled=False, enabled=flag)'),
        ("torch.cuda.amp.autocast(enabled=flag)", 'torch.amp.autocast("cuda", enabled=flag)'),
        ("torch.cuda.amp.autocast(**options)", 'torch.amp.autocast("cuda", **options)'),
        ("torch.cuda.amp.autocast_mode.autocast()", 'torch.amp.autocast("cuda")'),
        ("torch.cuda.amp.autocast(device_type='cuda')", "torch.amp.autocast(device_type='cuda')"),
        ("torch.cuda.amp.GradScaler()", 'torch.amp.GradScaler("cuda")'),
        ("torch.cpu.amp.GradScaler(init_scale=2.0)", 'torch.amp.GradScaler("cpu", init_scale=2.0)'),
        ("torch.cuda.amp.GradScaler(2.0**10, 2.0, 0.5)", 'torch.amp.GradScaler("cuda", 2.0**10, 2.0, 0.5)'),
        ("torch.cuda.amp.grad_scaler.GradScaler(enabled=flag)", 'torch.amp.GradScaler("cuda", enabled=flag)'),
        ("torch.cuda.amp.custom_fwd(function)", 'torch.amp.custom_fwd(function, device_type="cuda")'),
        ("torch.cuda.amp.custom_bwd(function)", 'torch.amp.custom_bwd(function, device_type="cuda")'),
        ("isinstance(flag, torch.cuda.amp.GradScaler)", "isinstance(flag, torch.amp.GradScaler)"),
        ("partial(torch.cuda.amp.autocast, enabled=False)", 'partial(torch.amp.autocast, enabled=False, device_type="cuda")'),
        ("partial(torch.cuda.amp.GradScaler, enabled=flag)", 'partial(torch.amp.GradScaler, enabled=flag, device="cuda")'),
        ("torch.get_autocast_gpu_dtype()", 'torch.get_autocast_dtype("cuda")'),
        ("torch.get_autocast_cpu_dtype()", 'torch.get_autocast_dtype("cpu")'),
        ("torch.is_autocast_cpu_enabled()", 'torch.is_autocast_enabled("cpu")'),
        ("torch.set_autocast_cpu_enabled(flag)", 'torch.set_autocast_enabled("cpu", flag)'),
        ("torch.set_autocast_gpu_dtype(torch.half)", 'torch.set_autocast_dtype("cuda", torch.half)'),
        ("torch.get_autocast_xla_dtype()", 'torch.get_autocast_dtype("xla")'),
        # Where it is not clear what is meant.
        ("torch.cuda.amp.autocast(*options)", None),
        ("torch.cuda.amp.autocast(torch.bfloat16)", None),
        ("torch.cuda.amp.autocast('cuda')", None),
        ("torch.cuda.amp.autocast_mode._cast(flag, torch.half)", None),
        ("partial(torch.cuda.amp.GradScaler, 2.0**10)", None),
    ],
)
def test_a_use_is_found_and_moved(old: str, new: str | None) -> None:
    code = "from functools import partial\n\nimport torch\n\n\ndef f(flag, options, function):\n    return {}\n"
    assert lines(code.format(old)) == [7]
    assert fixed(code.format(old), RULES) == code.format(new or old)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "from torch.cuda.amp import GradScaler as GS, autocast\ns = GS(enabled=True)\nwith autocast():\n    pass\n",
            'from torch.amp import GradScaler as GS, autocast\ns = GS("cuda", enabled=True)\nwith autocast("cuda"):\n    pass\n',
        ),
        (
            "import torch.cuda.amp as amp\ns = amp.GradScaler()\nwith amp.autocast(False):\n    pass\n",
            'import torch.amp as amp\ns = amp.GradScaler("cuda")\nwith amp.autocast("cuda", enabled=False):\n    pass\n',
        ),
        (
            "from torch.cuda import Stream, amp\nwith amp.autocast():\n    pass\n",
            'from torch.cuda import Stream\nfrom torch import amp\nwith amp.autocast("cuda"):\n    pass\n',
        ),
        (
            "import torch as th\nx = th.cuda.amp.autocast()\n",
            'import torch as th\nx = th.amp.autocast("cuda")\n',
        ),
        (
            "from torch import cuda\nx = cuda.amp.autocast()\n",
            'import torch\nfrom torch import cuda\nx = torch.amp.autocast("cuda")\n',
        ),
        (
            "from torch.cuda.amp.grad_scaler import GradScaler, OptState\ns = GradScaler()\n",
            'from torch.amp import GradScaler\nfrom torch.cuda.amp.grad_scaler import OptState\ns = GradScaler("cuda")\n',
        ),
        (
            "from torch import get_autocast_gpu_dtype, nn\nx = get_autocast_gpu_dtype()\n",
            'from torch import get_autocast_dtype, nn\nx = get_autocast_dtype("cuda")\n',
        ),
        (
            "from torch.cuda.amp import (\n    autocast,  # half\n    custom_fwd,\n)\n\n@custom_fwd\n@autocast()\ndef f(x):\n    pass\n",
            "from torch.amp import (\n    autocast,  # half\n    custom_fwd,\n)\n\n"
            '@custom_fwd(device_type="cuda")\n@autocast("cuda")\ndef f(x):\n    pass\n',
        ),
        (
            "def f():\n    from torch.cuda.amp import autocast\n    return autocast()\n\ndef g(autocast):\n    return autocast()\n",
            'def f():\n    from torch.amp import autocast\n    return autocast("cuda")\n\ndef g(autocast):\n    return autocast()\n',
        ),
        (
            "from torch.cuda.amp import GradScaler\n\ndef f(x: GradScaler | None) -> GradScaler:\n    y: GradScaler = x\n    return y\n",
            "from torch.amp import GradScaler\n\ndef f(x: GradScaler | None) -> GradScaler:\n    y: GradScaler = x\n    return y\n",
        ),
        (
            "import torch\namp = torch.cuda.amp\nx = amp.autocast()\n",
            'import torch\namp = torch.cuda.amp\nx = torch.amp.autocast("cuda")\n',
        ),
        (
            "from torch.cuda.amp import *\nx = autocast()\n",
            'import torch\nfrom torch.cuda.amp import *\nx = torch.amp.autocast("cuda")\n',
        ),
    ],
)
def test_imports_move_with_their_uses(old: str, new: str) -> None:
    assert fixed(old, RULES) == new
    assert lines(new) == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch\n\nclass Scaler(torch.cuda.amp.GradScaler):\n    pass\n",
        "import torch\n\nautocast = torch.cuda.amp.autocast\nwith autocast():\n    pass\n",
        "from torch.cuda.amp import autocast\n\n__all__ = ['autocast']\nx = autocast()\n",
        "from torch.cuda.amp import autocast\n\nregister(autocast)\nx = autocast()\n",
        "from functools import partial\nimport torch\n\nregion = partial(torch.cuda.amp.autocast, dtype=half)\nx = region(True)\n",
        "from torch.cuda.amp import autocast\nfrom torch.cuda.amp import autocast\nx = autocast()\n",
    ],
)
def test_what_others_may_depend_on_stays(code: str) -> None:
    assert len(lines(code)) == 1
    assert fixed(code, RULES) == code


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    import torch.cuda.amp as amp\nexcept ImportError:\n    amp = None\nx = amp.autocast()\n",
        "try:\n    from torch.amp import autocast\nexcept ImportError:\n    from torch.cuda.amp import autocast\nx = autocast()\n",
        "try:\n    scaler = torch.amp.GradScaler('cuda')\nexcept (AttributeError, TypeError):\n    scaler = torch.cuda.amp.GradScaler()\n",
        "TORCH_2_4 = check_version(torch.__version__, '2.4.0')\nx = f('cuda') if TORCH_2_4 else torch.cuda.amp.autocast()\n",
        "NEW = is_greater(torch.version, '2.4')\nif not NEW:\n    x = torch.cuda.amp.autocast()\n",
        "def f():\n    if hasattr(torch.amp, 'GradScaler'):\n        return new()\n    return torch.cuda.amp.GradScaler()\n",
        "if is_torch_version('<', '2.4'):\n    def f():\n        return torch.cuda.amp.GradScaler()\n",
        "known = {torch.amp.autocast: 'new', torch.cuda.amp.autocast: 'old'}\n",
        "assert kind in [torch.cuda.amp.autocast, torch.cpu.amp.autocast]\n",
        "if kind is torch.cuda.amp.autocast:\n    pass\n",
        "torch.cuda.amp.autocast = patched\n",
        "x = torch.cuda.amp.common.amp_definitely_not_available()\n",
        "x = torch.is_autocast_enabled()\ntorch.set_autocast_enabled(True)\n",
        "mock.patch('torch.cuda.amp.autocast')\n",
    ],
)
def test_code_for_old_versions_and_mere_mentions_are_left_alone(code: str) -> None:
    assert lines(f"import torch\n\n{code}") == []


def test_both_names_of_one_import_are_told_and_mended_at_once() -> None:
    code = "from torch.cuda.amp import GradScaler, autocast\n\nscaler = GradScaler()\nx, y = autocast(), autocast()\nz = autocast()\n"
    assert messages(code, RULES) == [
        '`torch.cuda.amp.GradScaler` is deprecated since torch 2.4: its use in line 3 warns. Use `torch.amp.GradScaler("cuda")`.',
        '`torch.cuda.amp.autocast` is deprecated since torch 2.4: its use in lines 4 and 5 warns. Use `torch.amp.autocast("cuda")`.',
    ]


@pytest.mark.parametrize("old", sorted(name for name in HOMES if name != "torch.cuda.amp.autocast_mode._cast"))
def test_the_installed_torch_warns_about_the_old_name_and_not_the_new(old: str) -> None:
    home = HOMES[old]
    arguments: list[object] = []
    if home.kind == "mark":
        arguments = [len]
    elif ".set_" in old:
        arguments = [torch.get_autocast_dtype(home.device) if old.endswith("dtype") else False]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        _find(old)(*arguments)
    assert any("deprecated" in str(warning.message) for warning in seen)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if home.kind == "mark":
            _find(home.new)(*arguments, device_type=home.device)
        else:
            _find(home.new)(home.device, *arguments)
    assert not any("deprecated" in str(warning.message) for warning in seen)


def _find(name: str) -> type:
    found: object = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    assert callable(found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            "from torch.cuda.amp import GradScaler\n\ndef f(scaler: GradScaler | None = None) -> list[GradScaler]:\n    pass\n",
            "`torch.cuda.amp.GradScaler` is deprecated since torch 2.4. Here it stands in annotations only, which give no warning. "
            "`torch.amp.GradScaler` takes its place.",
        ),
        (
            "from torch.cuda.amp import GradScaler\n\ndef f(scaler: GradScaler):\n    pass\n\nf(GradScaler())\n",
            '`torch.cuda.amp.GradScaler` is deprecated since torch 2.4: its use in line 6 warns. Use `torch.amp.GradScaler("cuda")`.',
        ),
        (
            "import torch\n\nscaler: torch.cuda.amp.GradScaler | None = None\n",
            "`torch.cuda.amp.GradScaler` is deprecated since torch 2.4 and is only an annotation here, which gives no warning. "
            "`torch.amp.GradScaler` takes its place.",
        ),
    ],
)
def test_an_annotation_gives_no_warning(code: str, expected: str) -> None:
    assert messages(code, RULES) == [expected]
