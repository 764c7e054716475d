"""The JSON of a comparison: other programs read it, so its keys are a promise."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from halfstep.errors import RecordFormatError
from halfstep.records import (
    SCHEMA,
    Comparison,
    Device,
    Interval,
    MemoryParts,
    PrecisionRun,
    Settings,
    Verdict,
)
from tests.strategies import comparisons

FP32 = PrecisionRun(
    precision="fp32",
    step_time_ms=Interval(median=10.0, low=9.5, high=10.5),
    samples_per_s=3200.0,
    peak_memory_mib=512.0,
    memory_source="cuda_allocator",
    first_loss=2.5,
    final_loss=0.5,
    skipped_steps=0,
    final_scale=None,
    steps=40,
    memory=MemoryParts(parameters=100.0, optimizer=200.0, batch=12.0, step=200.0),
    step_times_ms=(9.5, 10.0, 10.5),
    losses=((2.5, 0.5),),
    skipped_at=((),),
    note="",
)
FP16 = replace(FP32, precision="fp16", first_loss=math.nan, final_loss=math.inf, skipped_steps=2, final_scale=32768.0, skipped_at=((1, 2),))
COMPARISON = Comparison(
    schema=SCHEMA,
    task="examples/mlp.py:task",
    device=Device(type="cuda", name="H200", native=("fp32", "bf16", "fp16"), threads=8, torch="2.13.0", python="3.11.7"),
    settings=Settings(steps=20, warmup=5, seeds=(0, 1), batch_size=32, channels_last=False, compile=False, loss_scale="dynamic"),
    runs=(FP32, FP16),
    verdicts=(
        Verdict(
            precision="fp16",
            baseline="fp32",
            speedup=Interval(median=1.5, low=1.4, high=1.6),
            memory_ratio=0.5,
            loss_parity="worse",
            reason="The loss is not finite.",
        ),
    ),
    conclusion="Stay with fp32.",
    interrupted=False,
)
PLAIN: dict[str, Any] = json.loads(COMPARISON.to_json())

# What other programs may rely on, in this order. Keys may be added.
CONTRACT = ["schema", "task", "device", "runs", "verdicts"]
DEVICE_CONTRACT = ["type", "name"]
RUN_CONTRACT = [
    "precision",
    "step_time_ms",
    "samples_per_s",
    "peak_memory_mib",
    "memory_source",
    "first_loss",
    "final_loss",
    "skipped_steps",
    "final_scale",
    "steps",
]
VERDICT_CONTRACT = ["precision", "baseline", "speedup", "memory_ratio", "loss_parity", "reason"]
INTERVAL_CONTRACT = ["median", "low", "high"]


@pytest.mark.parametrize(
    ("plain", "contract"),
    [
        pytest.param(PLAIN, CONTRACT, id="comparison"),
        pytest.param(PLAIN["device"], DEVICE_CONTRACT, id="device"),
        pytest.param(PLAIN["runs"][0], RUN_CONTRACT, id="run"),
        pytest.param(PLAIN["runs"][1], RUN_CONTRACT, id="second run"),
        pytest.param(PLAIN["runs"][0]["step_time_ms"], INTERVAL_CONTRACT, id="step_time_ms"),
        pytest.param(PLAIN["verdicts"][0], VERDICT_CONTRACT, id="verdict"),
        pytest.param(PLAIN["verdicts"][0]["speedup"], INTERVAL_CONTRACT, id="speedup"),
    ],
)
def test_the_keys_of_the_contract_stand_in_their_order(plain: dict[str, Any], contract: list[str]) -> None:
    assert [key for key in plain if key in contract] == contract


def test_the_values_of_the_contract_have_their_types() -> None:
    assert PLAIN["schema"] == 1
    assert PLAIN["task"] == "examples/mlp.py:task"
    assert PLAIN["device"] == {
        "type": "cuda",
        "name": "H200",
        "native": ["fp32", "bf16", "fp16"],
        "threads": 8,
        "torch": "2.13.0",
        "python": "3.11.7",
    }
    assert [run["precision"] for run in PLAIN["runs"]] == ["fp32", "fp16"]
    assert {key: PLAIN["runs"][1][key] for key in RUN_CONTRACT} == {
        "precision": "fp16",
        "step_time_ms": {"median": 10.0, "low": 9.5, "high": 10.5},
        "samples_per_s": 3200.0,
        "peak_memory_mib": 512.0,
        "memory_source": "cuda_allocator",
        "first_loss": "NaN",
        "final_loss": "Infinity",
        "skipped_steps": 2,
        "final_scale": 32768.0,
        "steps": 40,
    }
    assert PLAIN["verdicts"] == [
        {
            "precision": "fp16",
            "baseline": "fp32",
            "speedup": {"median": 1.5, "low": 1.4, "high": 1.6},
            "memory_ratio": 0.5,
            "loss_parity": "worse",
            "reason": "The loss is not finite.",
        }
    ]


@pytest.mark.parametrize("key", ["step_time_ms", "samples_per_s", "peak_memory_mib", "first_loss", "final_loss", "final_scale", "memory"])
def test_what_was_not_measured_is_null(key: str) -> None:
    changed: dict[str, Any] = {key: None}
    run = replace(FP32, **changed)
    assert json.loads(run.to_json())[key] is None
    assert PrecisionRun.from_json(run.to_json()) == run


def test_a_comparison_from_before_there_were_rehearsals_was_none() -> None:
    assert PLAIN["target"] == ""
    older = {key: value for key, value in PLAIN.items() if key not in ("target", "policies")}
    assert Comparison.from_json(json.dumps(older)) == COMPARISON


def test_a_rehearsal_names_its_target() -> None:
    rehearsed = replace(COMPARISON, target="cuda")
    assert json.loads(rehearsed.to_json())["target"] == "cuda"
    assert Comparison.from_json(rehearsed.to_json()) == rehearsed


@pytest.mark.parametrize("schema", [0, 2, -1, 10**30])
@pytest.mark.parametrize("rest", [PLAIN, {}, {**PLAIN, "runs": "moved to another file"}], ids=["same", "empty", "changed"])
def test_another_schema_is_named_before_any_field(schema: int, rest: dict[str, Any]) -> None:
    text = json.dumps({**rest, "schema": schema})
    with pytest.raises(RecordFormatError, match=f"has schema {schema}; this halfstep reads schema 1. Read it with the halfstep that"):
        Comparison.from_json(text)


@pytest.mark.parametrize("schema", [True, "1", 1.0, None, []])
def test_a_schema_that_is_no_whole_number_is_a_wrong_field(schema: object) -> None:
    with pytest.raises(RecordFormatError, match=r"a whole number was expected, not .* @ \$\.schema"):
        Comparison.from_json(json.dumps({**PLAIN, "schema": schema}))


def test_a_comparison_without_a_schema_is_refused() -> None:
    with pytest.raises(RecordFormatError, match=r"required field missing @ \$\.schema"):
        Comparison.from_json(json.dumps({key: value for key, value in PLAIN.items() if key != "schema"}))


def test_a_fault_deep_inside_is_located() -> None:
    plain = json.loads(COMPARISON.to_json())
    plain["runs"][1]["losses"][0][1] = "diverged"
    with pytest.raises(RecordFormatError, match=r"a number was expected, not 'diverged' @ \$\.runs\[1\]\.losses\[0\]\[1\]\.$"):
        Comparison.from_json(json.dumps(plain))


@given(comparison=comparisons())
def test_reading_twice_gives_the_same_text(comparison: Comparison) -> None:
    text = comparison.to_json()
    assert Comparison.from_json(text).to_json() == text
    assert text.encode().decode() == text


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (Interval(median=2.104, low=1.96, high=2.2), "2.10 [1.96, 2.20]"),
        (Interval(median=math.nan, low=-math.inf, high=math.inf), "nan [-inf, inf]"),
        (Interval(median=-0.001, low=-1.0, high=1234.5), "-0.00 [-1.00, 1234.50]"),
    ],
)
def test_an_interval_prints_with_two_decimals(interval: Interval, text: str) -> None:
    assert str(interval) == text
