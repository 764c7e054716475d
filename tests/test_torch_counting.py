"""What counts casts and calls by means of torch's private names: a new torch that changes one of them fails here."""

from __future__ import annotations

import pytest
import torch

from halfstep._torch import AfterEachCast, Overload, before_autocast_calls


def test_the_conversion_is_there() -> None:
    assert str(torch.ops.aten._to_copy.default) == "aten._to_copy.default"


def test_a_conversion_is_seen_forward_and_backward_with_what_it_made() -> None:
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    x = torch.ones(2, requires_grad=True)
    with AfterEachCast(lambda source, result: seen.append((source.dtype, result.dtype))):
        x.half().sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [(torch.float32, torch.float16), (torch.float16, torch.float32)]
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        # One that autocast lowers, one that it raises to fp32, and one of which it says nothing.
        ("aten::linear", lambda x: torch.nn.functional.linear(x, x)),
        ("aten::softmax.int", lambda x: x.softmax(0)),
        ("aten::relu", torch.relu),
    ],
)
def test_calls_that_meet_autocast_are_seen_and_do_what_they_did(name: str, call: torch.nn.Module) -> None:
    x = torch.randn(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = call(x)
    seen: list[int] = []
    take_back = before_autocast_calls(Overload.named(name), lambda: seen.append(1), device_type="cpu")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = call(x)
        assert seen == [1]
        assert out.dtype is expected.dtype
        assert torch.equal(out, expected)
        call(x)
        assert seen == [1], "autocast was off"
    finally:
        take_back()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(call(x), expected)
    assert seen == [1]
