"""torch computes a Transformer layer from its weights in an evaluation, and would pass over the islands in it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep import Policy


class FastPaths(TorchDispatchMode):
    """Counts the layers that torch computes at once."""

    count: int

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += int(func._schema.name == "aten::_transformer_encoder_layer_fwd")
        return func(*args, **(kwargs or {}))


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()


def fast_layers(model: nn.Module, *, autocast: bool) -> int:
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1))
    paths = FastPaths()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), paths:
        model(x)
    return paths.count


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16; layers.0.self_attn=fp32", 1),
        ("bf16; layers.*.norm1=fp32", 0),
        ("fp32; layers.1.linear1=bf16", 1),
        ("bf16; layers.0=fp32", 2),  # The whole layer is one island: torch may compute it at once.
        ("pure bf16", 2),
        ("pure bf16; torch.nn.LayerNorm=fp32", 0),
    ],
)
def test_layers_with_islands_inside_call_them(text: str, expected: int, autocast: bool) -> None:
    model = encoder()
    assert fast_layers(model, autocast=autocast) == 2
    before = pickle.dumps(model)
    with Policy.parse(text).apply(model):
        assert fast_layers(model, autocast=autocast) == expected
        assert pickle.dumps(model) == before
    assert fast_layers(model, autocast=autocast) == 2
    assert [layer.activation_relu_or_gelu for layer in model.layers] == [1, 1]
