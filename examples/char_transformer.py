"""A small Transformer that learns to write Python's documentation, character by character, as a task that halfstep can measure.

Which precision trains it fastest on this machine, and does it still learn the same?

    halfstep compare examples/char_transformer.py:task

Train it for a while in the precision that halfstep chooses, and read what it then writes:

    python examples/char_transformer.py --steps 200

The text is real English that is on every machine which runs this file: the topics of Python's own `help()`, such as help("assert"),
close to half a million characters. It differs a little between versions of Python.

Everything follows from the seed: the weights and the pieces of text that are drawn.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import MixedPrecision, Task

BATCH_SIZE = 32
CONTEXT = 128
LEARNING_RATE = 1e-3
N_HEADS = 4
N_LAYERS = 4
WIDTH = 256

TEXT = "\n\n".join(topics.values())
VOCABULARY = sorted(set(TEXT))
INDEX = {character: index for index, character in enumerate(VOCABULARY)}


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each normalised first and added to what came in (pre-norm)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = x + self.attend(self.norm1(x))
        change: Tensor = self.mlp(self.norm2(x))
        return x + change

    def attend(self, x: Tensor) -> Tensor:
        """What each position gathers from itself and the positions before it: (batch, length, width) in and out."""
        queries, keys, values = self.qkv(x).unflatten(-1, (3, N_HEADS, -1)).permute(2, 0, 3, 1, 4)
        gathered = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        out: Tensor = self.projection(gathered.transpose(1, 2).flatten(2))
        return out


class CharTransformer(nn.Module):
    """A decoder-only Transformer: for each character of a text, the logits of the character that follows.

    Takes indices of shape (batch, length), length at most `CONTEXT`, and returns logits of shape (batch, length, vocabulary).
    """

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(VOCABULARY), WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(N_LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(VOCABULARY), bias=False)

    def forward(self, indices: Tensor) -> Tensor:  # noqa: D102
        positions = torch.arange(indices.shape[1], device=indices.device)
        x = self.characters(indices) + self.positions(positions)
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def draw_batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of the text and, for each of their characters, the next one, without an end; both of shape (batch, context)."""
    text = torch.tensor([INDEX[character] for character in TEXT])
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - CONTEXT, (BATCH_SIZE, 1), generator=generator)
        pieces = text[starts + torch.arange(CONTEXT + 1)]
        yield pieces[:, :-1], pieces[:, 1:]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The cross-entropy of the next character, averaged over all positions."""
    characters, following = batch
    return F.cross_entropy(model(characters).flatten(0, 1), following.flatten())


def task(seed: int) -> Task:
    """The training problem that halfstep measures. Everything random in it follows from the seed."""
    torch.manual_seed(seed)
    model = CharTransformer()
    return Task(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE),
        loss=loss,
        batches=draw_batches(seed),
    )


@torch.no_grad()
def write(model: nn.Module, prompt: str, *, length: int, device: torch.device) -> str:
    """The prompt and what the model writes after it, each character drawn from the probabilities that the model gives."""
    model.eval()
    indices = torch.tensor([[INDEX[character] for character in prompt]], device=device)
    for _ in range(length):
        logits = model(indices[:, -CONTEXT:])[:, -1]
        following = torch.multinomial(logits.softmax(dim=-1), num_samples=1)
        indices = torch.cat([indices, following], dim=1)
    return "".join(VOCABULARY[index] for index in indices[0].tolist())


def main() -> None:
    """Trains for a few steps and shows what the model then writes."""
    parser = argparse.ArgumentParser(description="Train a character-level Transformer in mixed precision.")
    parser.add_argument("--precision", default="auto", help="auto, fp32, bf16 or fp16 (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="decides the weights and the pieces of text (default: %(default)s)")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    problem = task(args.seed)
    model = problem.model.to(device)
    amp = MixedPrecision(model, problem.optimizer, precision=args.precision)
    for characters, following in islice(problem.batches, args.steps):
        batch = (characters.to(device), following.to(device))
        record = amp.train_step(problem.loss, model, batch)
        if record.step % 10 == 0:
            note = "  skipped" if record.skipped else ""
            print(f"step {record.step:4d}  {record.precision}  loss {record.loss:.3f}  {record.step_time_s:.2f} s{note}", flush=True)
    print(write(model, "The ", length=200, device=device))


if __name__ == "__main__":
    main()
