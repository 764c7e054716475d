"""Small models of many kinds, each with one training step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.cifar_resnet18 import ResNet18

__all__ = ["STEPS"]


class VitBlock(nn.Module):
    """Patches, attention, an MLP and a class head."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.place = nn.Parameter(torch.zeros(1, 5, 16))
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.place
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.mlp(self.norm2(x))
        scores: Tensor = self.head(x[:, 0])
        return scores


class UNet(nn.Module):
    """One level down and up, with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.middle = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8), nn.LeakyReLU(0.1))
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.head = nn.Conv2d(24, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down(x)
        b = self.middle(a)
        scores: Tensor = self.head(torch.cat([a, self.up(b), F.interpolate(b, scale_factor=2, mode="bilinear")], 1))
        return scores


class Recurrent(nn.Module):
    """Embeddings, an LSTM of two layers, and a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.lstm, self.gru = nn.LSTM(8, 8, 2, batch_first=True, dropout=0.1), nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 20)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.gru(self.lstm(self.embed(x))[0])[0])
        return scores


def resnet() -> Tensor:
    return F.cross_entropy(ResNet18()(torch.randn(2, 3, 16, 16)), torch.tensor([1, 3]))


def transformer() -> Tensor:
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    source, target = torch.randn(2, 6, 16), torch.randn(2, 5, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    return F.mse_loss(model(source, target, tgt_mask=mask), target)


def vit() -> Tensor:
    return F.cross_entropy(VitBlock()(torch.randn(2, 3, 8, 8)), torch.tensor([1, 3]), label_smoothing=0.1)


def recurrent() -> Tensor:
    tokens = torch.randint(20, (2, 5))
    return F.cross_entropy(Recurrent()(tokens).flatten(0, 1), tokens.flatten())


def unet() -> Tensor:
    scores = UNet()(torch.randn(2, 3, 8, 8))
    wanted = torch.randint(2, (2, 8, 8))
    chance = scores.softmax(1)[:, 1]
    dice = 1 - 2 * (chance * wanted).sum() / (chance.sum() + wanted.sum() + 1)
    loss: Tensor = F.cross_entropy(scores, wanted) + dice
    return loss


def gan() -> Tensor:
    make = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh())
    judge = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 16)), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    real, fake = torch.randn(4, 8), make(torch.randn(4, 4))
    ones = torch.ones(4, 1)
    loss: Tensor = (
        F.binary_cross_entropy_with_logits(judge(fake), ones) + F.softplus(judge(real)).mean() + F.softplus(-judge(fake.detach())).mean()
    )
    return loss


# Each makes a model from the seed that is set, runs it, and returns the loss.
STEPS: dict[str, Callable[[], Tensor]] = {
    "ResNet-18": resnet,
    "Transformer": transformer,
    "ViT block": vit,
    "LSTM and GRU": recurrent,
    "U-Net": unet,
    "GAN": gan,
}
