from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import ConfigurationError, HalfstepError, InvalidTypeError
from halfstep.precision import DTYPES, PRECISIONS, parse_precision


def test_each_precision_has_its_dtype() -> None:
    assert PRECISIONS == ("fp32", "bf16", "fp16")
    assert dict(DTYPES) == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        DTYPES["fp32"] = torch.float64  # type: ignore[index]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_precision_parses_to_itself(precision: str) -> None:
    assert parse_precision(precision) == precision


@given(st.text().filter(lambda text: text not in PRECISIONS))
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"Unknown precision .* Allowed are fp32, bf16 and fp16"):
        parse_precision(text)


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        ("bf61", ConfigurationError, r"Unknown precision 'bf61'\. Allowed are fp32, bf16 and fp16\. Did you mean 'bf16'\?"),
        ("auto", ConfigurationError, r"Unknown precision 'auto'\. Allowed are fp32, bf16 and fp16\.$"),
        (" fp16", ConfigurationError, r"Unknown precision ' fp16'"),
        (16, InvalidTypeError, r"^A precision is named by a string, one of fp32, bf16 and fp16, not 16\.$"),
        (None, InvalidTypeError, r"not None\.$"),
        (torch.float16, InvalidTypeError, r"not torch\.float16\.$"),
        (["fp16"], InvalidTypeError, r"not \['fp16'\]\.$"),
    ],
)
def test_what_is_no_precision_is_refused(value: Any, error: type[HalfstepError], match: str) -> None:
    with pytest.raises(error, match=match):
        parse_precision(value)


def test_names_that_the_caller_accepts_besides_are_listed_and_suggested() -> None:
    with pytest.raises(ConfigurationError, match=r"'Auto'\. Allowed are auto, fp32, bf16 and fp16\. Did you mean 'auto'\?"):
        parse_precision("Auto", besides=("auto",))
    with pytest.raises(InvalidTypeError, match=r"one of auto, fp32, bf16 and fp16, not 1\."):
        parse_precision(1, besides=("auto",))  # type: ignore[arg-type]
