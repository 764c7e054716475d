"""What does a policy cost? Ten islands in a Transformer, written into its code and applied as a policy, side by side.

    python benchmarks/policy_overhead.py                      # eager and compiled
    python benchmarks/policy_overhead.py --mode eager --blocks 200

Each loop trains the same 12-layer Transformer from the same weights on the same batches, in bf16 autocast on the CPU, with ten of its
attention modules in fp32: once with `torch.autocast(enabled=False)` and casts in the model's code, once by
`Policy.parse("bf16; layers.0.attention=fp32; ...").apply(model)`. The loops take turns, in an order that is new for each block. Ratios are
taken block by block, against the loop written by hand in the same block; printed are their medians with 95 % intervals. A second copy of
the loop that is written by hand shows what the measurement itself is worth, and the model without islands what the islands cost.
"""

from __future__ import annotations

import argparse
import platform
import random
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Policy
from halfstep.comparison.statistics import median_interval

LAYERS = 12
ISLANDS = 10
WIDTH = 256
HEADS = 4
BATCH = 4
LENGTH = 64
VOCABULARY = 64
MODES = ("eager", "compile")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

Step = Callable[[tuple[Tensor, Tensor]], None]


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        """Shape (batch, length, width), in and out."""
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.project(values).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return result


class Layer(nn.Module):
    """One layer of the Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        """Shape (batch, length, width), in and out."""
        values = values + self.attention(self.norm1(values))
        result: Tensor = values + self.mlp(self.norm2(values))
        return result


class LayerByHand(Layer):
    """One layer with its attention in fp32, as torch's documentation has it."""

    def forward(self, values: Tensor) -> Tensor:
        """Shape (batch, length, width), in and out."""
        normed = self.norm1(values)
        with torch.autocast("cpu", enabled=False):
            attended = self.attention(normed.float())
        values = values + attended
        result: Tensor = values + self.mlp(self.norm2(values))
        return result


class Transformer(nn.Module):
    """A decoder-only Transformer.

    Args:
        by_hand: How many layers have their island in the code.
    """

    def __init__(self, *, by_hand: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(*[LayerByHand() if index < by_hand else Layer() for index in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token, shape (batch, length, vocabulary)."""
        result: Tensor = self.head(self.layers(self.embed(tokens)))
        return result


def make_batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Random tokens, and those that come next."""
    tokens = torch.randint(0, VOCABULARY, (count, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def make_step(model: nn.Module, *, mode: str) -> Step:
    """The loop that PyTorch's documentation teaches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    called = torch.compile(model, fullgraph=True) if mode == "compile" else model

    def step(batch: tuple[Tensor, Tensor]) -> None:
        tokens, following = batch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(called(tokens).flatten(0, 1), following.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_models() -> dict[str, nn.Module]:
    """The model of each loop, all with the same weights."""
    policy = Policy.parse("bf16" + "".join(f"; layers.{index}.attention=fp32" for index in range(ISLANDS)))
    models: dict[str, nn.Module] = {
        "islands by hand": Transformer(by_hand=ISLANDS),
        "by hand, again": Transformer(by_hand=ISLANDS),
        "islands by policy": Transformer(by_hand=0),
        "no islands": Transformer(by_hand=0),
    }
    first, *others = models.values()
    for model in others:
        model.load_state_dict(first.state_dict())
    policy.apply(models["islands by policy"])
    return models


def measure(*, mode: str, blocks: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds a step by some clock, for each loop and block of one step."""
    torch.manual_seed(0)
    models = make_models()
    steps = {name: make_step(model, mode=mode) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    batches = make_batches()
    order = random.Random(0)
    for number in range(-3, blocks):  # Three blocks to warm up, and to compile.
        for name in order.sample(list(steps), k=len(steps)):
            start = clock()
            steps[name](batches[number % len(batches)])
            if number >= 0:
                seconds[name].append(clock() - start)
    check_same_weights(models)
    return seconds


def check_same_weights(models: dict[str, nn.Module]) -> None:
    """Makes sure that the policy did the work of the islands that are written by hand: both end with the same weights, bit for bit."""
    expected = list(models["islands by hand"].parameters())
    for name in ("by hand, again", "islands by policy"):
        if not all(torch.equal(mine, own) for mine, own in zip(expected, models[name].parameters(), strict=True)):
            raise SystemExit(f"{name}: not the work of the islands that are written by hand, the weights differ.")


def report(mode: str, seconds: dict[str, list[float]]) -> None:
    """Prints one line for each loop."""
    by_hand = seconds["islands by hand"]
    print(f"\n{mode}, {LAYERS} layers of width {WIDTH}, {ISLANDS} islands, batches of {BATCH} x {LENGTH}, {len(by_hand)} steps of each")
    print(f"  {'loop':<20}{'ms a step':>12}   times the islands by hand, with its 95 % interval")
    for name, times in seconds.items():
        ratio = median_interval([own / hand for own, hand in zip(times, by_hand, strict=True)])
        print(f"  {name:<20}{median_interval(times).median * 1e3:>12.2f}   {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]")


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, action="append", help="what to measure; all when it is left out")
    parser.add_argument("--blocks", type=int, default=100, help="steps of each loop")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall", help="cpu, with one thread, on a machine that others use")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    where = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    print(f"{where}, {arguments.threads} thread(s), {arguments.clock} time", flush=True)
    for mode in arguments.mode or MODES:
        report(mode, measure(mode=mode, blocks=arguments.blocks, clock=CLOCKS[arguments.clock]))


if __name__ == "__main__":
    main()
