"""Transformers with one planted fault each: a single operation of the step in fp16 overflows, and in fp32 all is finite.

A plant says what overflows and where. What comes before it in the step is that of a healthy model.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, final, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.records.trace import Phase
from halfstep.task import Task, TaskFactory
from tests.diagnosis.detours import DETOURS, Detour

__all__ = ["KINDS", "LAYERS", "PLACES", "Place", "Plant", "Transformer", "healthy_task", "planted_task", "plants"]

LAYERS = 12
WIDTH, INNER, HEADS = 32, 64, 4
WORDS, LENGTH, BATCH, BATCHES = 64, 16, 4, 4

# The linear layers of a block: a plant sits in or behind one of them.
Place = Literal["attn.q", "attn.k", "attn.v", "attn.out", "ffn.up", "ffn.down"]
PLACES: Final[tuple[Place, ...]] = get_args(Place)

NormOrder = Literal["pre", "post"]

# What can overflow besides the detours: the products of a linear layer with large weights, and both products of attention.
KINDS: Final = ("large linear", "scores", "context", *DETOURS)

_OWN: Final = {
    "large linear": ("aten.addmm.default", 1.5e5, 3e5),
    "scores": ("aten.bmm.default", 4e2, 1e3),
    "context": ("aten.bmm.default", 2e2, 4e2),
}

# The parts of a detour that begin at zero: a step of the usual size would blow up what they are multiplied by.
_ZEROS: Final = ("gate", "up.weight")


class Attention(nn.Module):
    """Causal attention, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.temperature = math.sqrt(WIDTH // HEADS)
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._split(linear(x)) for linear in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(-2, -1)) / self.temperature
        context = self.weigh(scores, v)
        mixed: Tensor = self.out(context.transpose(1, 2).flatten(2))
        return mixed

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)

    def weigh(self, scores: Tensor, values: Tensor) -> Tensor:
        """The values, weighted by the scores."""
        return scores.masked_fill(self.mask, -math.inf).softmax(-1) @ values


@final
class LinearAttention(Attention):
    """Attention whose weights are not normalized before the sum, but afterwards."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def weigh(self, scores: Tensor, values: Tensor) -> Tensor:
        """The values, weighted by the scores."""
        weights = torch.sigmoid(scores).masked_fill(self.mask, 0) * 2e4
        return torch.matmul(weights, values * self.factor) / (1e4 * LENGTH * self.factor)


@final
class FeedForward(nn.Module):
    """Two layers with GELU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gelu, self.down = nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.gelu(self.up(x)))
        return y


@final
class Block(nn.Module):
    """Attention and a feed-forward network, each with a norm before or behind it."""

    def __init__(self, order: NormOrder) -> None:
        super().__init__()
        self.order = order
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.ffn = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        for part, norm in ((self.attn, self.norm1), (self.ffn, self.norm2)):
            x = x + part(norm(x)) if self.order == "pre" else norm(x + part(x))
        return x


@final
class Transformer(nn.Module):
    """A language model of twelve layers."""

    def __init__(self, order: NormOrder) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH) / 2)
        self.blocks = nn.ModuleList(Block(order) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of shape (batch, length, words)."""
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


@final
class Projected(nn.Module):
    """A linear layer with a detour behind it."""

    def __init__(self, linear: nn.Linear, detour: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = linear
        self.detour = detour

    def forward(self, x: Tensor) -> Tensor:
        return self.detour(self.linear(x))


@final
class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """What overflows, and where.

    Attributes:
        kind: One of `KINDS`.
        layer: The number of the block, from 0.
        place: The linear layer that it is in or behind; `scores` and `context` have none of their own, and ignore it.
        factor: How large the numbers are that overflow.
        order: Where the norms of all blocks are.
        inline: Whether a detour is a part of the module that calls the linear layer, and no module of its own.
    """

    kind: str
    layer: int
    place: Place
    factor: float
    order: NormOrder
    inline: bool

    @property
    def phase(self) -> Phase:
        """The pass in which it overflows."""
        return DETOURS[self.kind].phase if self.kind in DETOURS else "forward"

    @property
    def expected_op(self) -> str:
        """The operation that a diagnosis is to name."""
        return DETOURS[self.kind].op if self.kind in DETOURS else _OWN[self.kind][0]

    @property
    def expected_module(self) -> str:
        """The path of its module."""
        if self.kind in ("scores", "context"):
            return f"blocks.{self.layer}.attn"
        where = f"blocks.{self.layer}.{self.place}"
        if self.kind == "large linear":
            return where
        child = DETOURS[self.kind].child
        where = where if self.inline else f"{where}.detour"
        return f"{where}.{child}" if child else where

    @property
    def expected_phase(self) -> Phase:
        """The pass that a diagnosis is to name."""
        return self.phase

    @property
    def is_hidden(self) -> bool:
        """Whether loss and gradients stay finite, although the operation overflows."""
        return self.kind in DETOURS and DETOURS[self.kind].is_hidden


def plants(count: int, seed: int) -> list[Plant]:
    """Random plants: each kind as often as any other, in random places, with random factors."""
    chance = random.Random(seed)
    found: list[Plant] = []
    while len(found) < count:
        found += [_draw(kind, chance) for kind in chance.sample(KINDS, k=len(KINDS))]
    return found[:count]


def _draw(kind: str, chance: random.Random) -> Plant:
    detour = DETOURS.get(kind)
    low, high = (detour.low, detour.high) if detour else _OWN[kind][1:]
    return Plant(
        kind=kind,
        layer=chance.randrange(LAYERS),
        place=chance.choice(PLACES),
        factor=math.exp(chance.uniform(math.log(low), math.log(high))),
        order=chance.choice(("pre", "post")),
        inline=detour is not None and detour.function is not None and chance.random() < 0.5,
    )


def planted_task(plant: Plant) -> TaskFactory:
    """A task whose model has the plant from the beginning."""

    def task(seed: int) -> Task:
        return _task(seed, order=plant.order, plant=plant)

    task.__qualname__ = f"{plant.kind} in {plant.expected_module}"
    return task


def healthy_task(seed: int) -> Task:
    """A task without a plant. Norms come first where the seed is even, and last where it is odd."""
    return _task(seed, order="post" if seed % 2 else "pre")


def _task(seed: int, *, order: NormOrder, plant: Plant | None = None) -> Task:
    torch.manual_seed(seed)
    model = Transformer(order)
    batches = [(torch.randint(0, WORDS, (BATCH, LENGTH)), torch.randint(0, WORDS, (BATCH, LENGTH))) for _ in range(BATCHES)]
    if plant is not None:  # It comes last, so that all else is as without it.
        _set(plant, model)
    zeros = [weight for name, weight in model.named_parameters() if _begins_at_zero(name)]
    others = [weight for name, weight in model.named_parameters() if not _begins_at_zero(name)]
    groups: list[dict[str, Any]] = [{"params": others}, *([{"params": zeros, "lr": 1e-12}] if zeros else [])]
    return Task(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=1e-4),
        loss=_loss,
        batches=batches,
    )


def _begins_at_zero(name: str) -> bool:
    return ".detour." in name and name.endswith(_ZEROS)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    scores: Tensor = model(tokens)
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


@torch.no_grad()
def _set(plant: Plant, model: Transformer) -> None:
    block = model.get_submodule(f"blocks.{plant.layer}")
    assert isinstance(block, Block)
    if plant.kind == "scores":
        block.attn.q.weight.mul_(plant.factor)
        block.attn.k.weight.mul_(plant.factor)
        block.attn.temperature *= plant.factor**2
    elif plant.kind == "context":
        block.attn = LinearAttention(plant.factor)
    else:
        linear = block.get_submodule(plant.place)
        assert isinstance(linear, nn.Linear)
        if plant.kind == "large linear":
            linear.weight.mul_(plant.factor)
        else:
            block.set_submodule(plant.place, Projected(linear, _made(plant, DETOURS[plant.kind], linear.out_features)))


def _made(plant: Plant, detour: Detour, width: int) -> Callable[[Tensor], Tensor]:
    if detour.module is not None:
        return detour.module(width, plant.factor)
    function = detour.function
    assert function is not None

    def apply(x: Tensor) -> Tensor:
        return function(x, plant.factor)

    return apply if plant.inline else Applied(apply)
