"""What counts casts by means of torch's private names: a new torch that changes one of them fails here."""

from __future__ import annotations

import torch

from halfstep._torch import AfterEachCast


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
