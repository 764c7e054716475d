"""The casts of a rehearsal are those of the target: operation by operation, beside fake tensors of CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.numerics import list_treatments, rehearse
from tests.numerics.cast_cases import CASES
from tests.numerics.fake_cuda import HALVES, Call, Recording, overload_names, run_overload
from tests.numerics.overload_cases import SKIPPED

# What CUDA does in one operation and a CPU in another form, and why it is the same.
OTHER_FORMS = {
    "aten._softmax.default": "CUDA's kernel takes half and returns fp32 (half_to_float), where a CPU casts first",
    "aten._log_softmax.default": "CUDA's kernel takes half and returns fp32 (half_to_float), where a CPU casts first",
    "aten.norm.ScalarOpt_dim_dtype": "CUDA's autocast names the dtype fp32, where the CPU's casts to it",
    "aten.norm.ScalarOpt_dtype": "CUDA's autocast names the dtype fp32, where the CPU's casts to it",
    "prim.device.default": "asks a fake tensor for its device",
}
_NORMS = {"aten.norm.ScalarOpt_dim_dtype": "aten.norm.ScalarOpt_dim", "aten.norm.ScalarOpt_dtype": "aten.norm.Scalar"}


def normal(calls: list[Any]) -> list[Call]:
    """Calls with CUDA's forms put as a CPU's, without those that have nothing to do with floating dtypes."""
    found: list[Call] = []
    for name, given, returned in calls:
        if name == "prim.device.default" or not (given or returned):
            continue
        short = _NORMS.get(name, name)
        is_widening = given != returned and returned == ["float32"] and len(given) == 1
        if name in OTHER_FORMS and is_widening:
            found.append(("aten._to_copy.default", given, returned))
        found.append((short, returned if name in OTHER_FORMS and is_widening else given, returned))
    return found


@pytest.fixture(scope="module")
def on_cuda() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.numerics.fake_cuda"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", CASES)
def test_code_runs_the_operations_of_the_target_in_its_dtypes(name: str, half: str, on_cuda: dict[str, Any]) -> None:
    make, run = CASES[name]
    inputs = make()
    with rehearse("cuda"), Recording() as recording:
        run(lambda **options: torch.autocast("cpu", dtype=HALVES[half], **options), *inputs)
    expected = normal(on_cuda["cases"][half][name])
    assert normal(recording.calls) == expected
    assert any(half in given for _, given, _ in expected)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", overload_names())
@pytest.mark.filterwarnings("ignore:.*is deprecated:UserWarning", "ignore:Using torch.cross without:UserWarning")
def test_each_overload_meets_the_dtypes_that_it_meets_on_the_target(name: str, half: str, on_cuda: dict[str, Any]) -> None:
    dtype = HALVES[half]
    with rehearse("cuda"):
        found = run_overload(name, dtype, opened=lambda: torch.autocast("cpu", dtype=dtype), place=lambda value: value)
    expected = on_cuda["overloads"][half][name]
    assert {mix: normal(calls) for mix, calls in found.items()} == {mix: normal(calls) for mix, calls in expected.items()}


def test_what_is_skipped_is_treated_by_the_target() -> None:
    assert SKIPPED.keys() <= list_treatments("cuda").keys()


def test_what_is_banned_is_refused_in_the_words_of_the_target(on_cuda: dict[str, Any]) -> None:
    x = torch.full((2,), 0.5)
    with pytest.raises(RuntimeError, match="unsafe to autocast") as caught, rehearse("cuda"), torch.autocast("cpu"):
        F.binary_cross_entropy(x, x)
    assert str(caught.value) == on_cuda["banned"]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_layers_are_given_half_alone(kind: type[nn.Module]) -> None:
    """CUDA has kernels of its own for them, all of which are given half."""
    layer = kind(3, 4)
    with rehearse("cuda"), Recording() as recording, torch.autocast("cpu", dtype=torch.float16):
        layer(torch.randn(2, 3))
    computing = [call for call in recording.calls if call[0] != "aten._to_copy.default" and "float16" in call[2]]
    assert computing
    assert all(set(given) == {"float16"} for _, given, _ in computing if given)


def test_fused_attention_takes_and_returns_half() -> None:
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    with rehearse("cuda"), Recording() as recording, torch.autocast("cpu", dtype=torch.float16):
        F.scaled_dot_product_attention(q, q, q)
    fused = [call for call in recording.calls if "attention" in call[0]]
    assert fused == [("aten._scaled_dot_product_flash_attention_for_cpu.default", ["float16"] * 3, ["float16", "float32"])]
