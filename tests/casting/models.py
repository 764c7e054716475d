"""Small models of the kinds that people train, each with a version that has its island written into its code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = [
    "BlockByHand",
    "Chain",
    "Checkpointed",
    "CheckpointedByHand",
    "Cubed",
    "CubedByHand",
    "LanguageModel",
    "LanguageModelByHand",
    "Residual",
    "Residuals",
    "ResidualsByHand",
    "Shared",
    "SharedByHand",
    "Translator",
    "TranslatorByHand",
    "UNet",
    "UNetByHand",
]


def off() -> torch.autocast:
    return torch.autocast("cpu", enabled=False)


class Translator(nn.Module):
    """An encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.core = nn.Transformer(8, 2, num_encoder_layers=1, num_decoder_layers=2, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        result: Tensor = self.head(self.core(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True))
        return result


class _DecoderLayerByHand(nn.TransformerDecoderLayer):
    def _mha_block(self, x: Tensor, mem: Tensor, attn_mask: Any, key_padding_mask: Any, is_causal: bool = False) -> Tensor:
        with off():
            memory = mem.float()
            attended = self.multihead_attn(
                x.float(), memory, memory, attn_mask=attn_mask, key_padding_mask=key_padding_mask, is_causal=is_causal, need_weights=False
            )[0]
        dropped: Tensor = self.dropout2(attended)
        return dropped


class TranslatorByHand(Translator):
    """The attention of the decoder to the encoder is an island, in each layer."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.core.decoder.layers:
            layer.__class__ = _DecoderLayerByHand


class Residual(nn.Module):
    """A block of a ResNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.bn1(self.conv1(images)))
        return torch.relu(self.bn2(self.conv2(hidden)) + images)


class BlockByHand(Residual):
    """All of it is an island."""

    def forward(self, images: Tensor) -> Tensor:
        with off():
            images = images.float()
            hidden = torch.relu(self.bn1(self.conv1(images)))
            return torch.relu(self.bn2(self.conv2(hidden)) + images)


class Residuals(nn.Module):
    """A ResNet of three blocks."""

    middle: type[Residual] = Residual

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(Residual(4), self.middle(4), Residual(4))
        self.head = nn.Linear(4, 5)

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(self.stem(images)).mean((2, 3)))
        return result


class ResidualsByHand(Residuals):
    """The block in the middle is an island."""

    middle = BlockByHand


class UNet(nn.Module):
    """Down, across and up again, with a connection past what lies below."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.across = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())
        self.up = nn.ConvTranspose2d(8, 3, 2, stride=2)
        self.last = nn.Conv2d(6, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        low = self.down(images)
        high = self.up(torch.cat([low, self.across(low)], 1))
        result: Tensor = self.last(torch.cat([images, high], 1))
        return result


class UNetByHand(UNet):
    """What lies at the bottom and what leads up from it are islands."""

    def forward(self, images: Tensor) -> Tensor:
        low = self.down(images)
        with off():
            across = self.across(low.float())
        joined = torch.cat([low, across], 1)
        with off():
            high = self.up(joined.float())
        result: Tensor = self.last(torch.cat([images, high], 1))
        return result


class LanguageModel(nn.Module):
    """An LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.inner = nn.Linear(8, 6)
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 11)

    def forward(self, tokens: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        outputs, state = self.lstm(self.inner(self.embed(tokens)))
        return self.head(outputs), state


class LanguageModelByHand(LanguageModel):
    """The LSTM is an island."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        inner = self.inner(self.embed(tokens))
        with off():
            outputs, state = self.lstm(inner.float())
        return self.head(outputs), state


class Shared(nn.Module):
    """One module in two places, and one weight in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.between = nn.Linear(6, 6)
        self.again = self.first
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.between.weight

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.tied(torch.tanh(self.again(torch.tanh(self.between(torch.tanh(self.first(inputs)))))))
        return result


class SharedByHand(Shared):
    """The module in two places is an island, and one of the two that share a weight."""

    def forward(self, inputs: Tensor) -> Tensor:
        with off():
            hidden = self.first(inputs.float())
        hidden = self.between(torch.tanh(hidden))
        hidden = torch.tanh(hidden)
        with off():
            hidden = self.again(hidden.float())
        hidden = torch.tanh(hidden)
        with off():
            result: Tensor = self.tied(hidden.float())
        return result


class Checkpointed(nn.Module):
    """A model that computes its middle again in the backward pass.

    Args:
        reentrant: Which of the two kinds of checkpoints.
    """

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(6, 6)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
        self.last = nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        hidden = checkpoint(self.middle, hidden, use_reentrant=self.reentrant)
        result: Tensor = self.last(hidden)
        return result


class CheckpointedByHand(Checkpointed):
    """The last layer of the middle is an island, within the checkpoint."""

    def forward(self, inputs: Tensor) -> Tensor:
        def middle(hidden: Tensor) -> Tensor:
            hidden = self.middle[1](self.middle[0](hidden))
            with off():
                result: Tensor = self.middle[2](hidden.float())
            return result

        hidden = self.first(inputs)
        hidden = checkpoint(middle, hidden, use_reentrant=self.reentrant)
        result: Tensor = self.last(hidden)
        return result


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(values, weight)
        return (values @ weight) ** 3

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        values, weight = ctx.saved_tensors
        slope = gradients[0] * 3 * (values @ weight) ** 2
        return slope @ weight.t(), values.t() @ slope


class _CubeLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = _Cube.apply(inputs, self.weight.to(inputs.dtype))  # type: ignore[no-untyped-call]
        return result


class Cubed(nn.Module):
    """A model with a custom autograd Function."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.cube = _CubeLayer()
        self.last = nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.last(self.cube(self.first(inputs)))
        return result


class CubedByHand(Cubed):
    """The Function is called in an island."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        with off():
            hidden = self.cube(hidden.float())
        result: Tensor = self.last(hidden)
        return result


class Chain(nn.Module):
    """Four linear layers, two and two in a container of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        self.b = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.b(self.a(inputs))
        return result
