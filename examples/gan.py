"""A generator and a critic that learn to draw digits: two engines, one loss scaler, and a gradient penalty in mixed precision.

    python examples/gan.py                      # the precision that suits this machine
    python examples/gan.py --precision fp16     # with loss scaling: both networks share one scale

Each network has an engine of its own, since each has an optimizer that steps by itself: the critic four times for each step of the
generator. They share one loss scaler, whose scale then moves once per round and never under gradients that were computed with it.

The penalty of WGAN-GP (Gulrajani et al. 2017, equation 3) needs the gradient of the critic's output while the loss is being computed.
`amp.scale` and `amp.unscale` keep it within the range of fp16 and bring it back.
"""

from __future__ import annotations

import argparse
import math

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from halfstep import LossScaler, MixedPrecision

BATCH_SIZE = 64
CRITIC_STEPS = 4
LATENT = 16
PENALTY = 10.0
PIXELS = 64
SHADES = " .:-=+*#"


def make_networks() -> tuple[nn.Module, nn.Module]:
    """A generator from latent vectors to images, and a critic from images to scores."""
    generator = nn.Sequential(nn.Linear(LATENT, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, PIXELS), nn.Sigmoid())
    critic = nn.Sequential(nn.Linear(PIXELS, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    return generator, critic


def penalty(amp: MixedPrecision, real: Tensor, fake: Tensor) -> Tensor:
    """How far the critic's gradient is from length 1 between real and generated images: (batch, pixels) each, a scalar out."""
    share = torch.rand(len(real), 1)
    between = (share * real + (1 - share) * fake).requires_grad_()
    scores = amp.scale(amp.model(between).sum())
    (gradient,) = amp.unscale(torch.autograd.grad(scores, between, create_graph=True))
    lengths: Tensor = gradient.float().norm(dim=1)
    return (lengths - 1).pow(2).mean()


def draw(image: Tensor) -> str:
    """An image of 8 by 8 pixels from 0 to 1, in characters."""
    rows = (image.clamp(0, 1) * (len(SHADES) - 1)).round().int().view(8, 8).tolist()
    return "\n".join("".join(2 * SHADES[shade] for shade in row) for row in rows)


def main() -> None:
    """Trains for a while and shows what the generator draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="auto", choices=["auto", "fp32", "bf16", "fp16"])
    parser.add_argument("--steps", type=int, default=400, help="steps of the generator")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    images = torch.tensor(load_digits().data / 16, dtype=torch.float32)
    generator, critic = make_networks()
    scaler = LossScaler(init_scale=2.0**12) if arguments.precision in ("fp16", "auto") else None
    drawing = MixedPrecision(
        generator, torch.optim.AdamW(generator.parameters(), lr=1e-3, betas=(0.5, 0.9)), arguments.precision, scaler=scaler
    )
    judging = MixedPrecision(critic, torch.optim.AdamW(critic.parameters(), lr=1e-3, betas=(0.5, 0.9)), arguments.precision, scaler=scaler)

    def critics_loss(real: Tensor) -> Tensor:
        with torch.no_grad():
            fake = generator(torch.randn(len(real), LATENT)).float()
        gap: Tensor = critic(fake).mean() - critic(real).mean()
        return gap + PENALTY * penalty(judging, real, fake)

    def generators_loss() -> Tensor:
        loss: Tensor = -critic(generator(torch.randn(BATCH_SIZE, LATENT))).mean()
        return loss

    skips, distance = 0, math.nan
    for step in range(1, arguments.steps + 1):
        for _ in range(CRITIC_STEPS):
            record = judging.train_step(critics_loss, images[torch.randint(len(images), (BATCH_SIZE,))])
            skips += record.skipped
        skips += drawing.train_step(generators_loss).skipped
        distance = -record.loss
        if step % max(1, arguments.steps // 4) == 0:
            print(f"step {step}: distance {distance:.3f}, {skips} skipped, scale {record.scale:g} ({judging.precision})")
    with torch.no_grad():
        print(draw(generator(torch.randn(1, LATENT))[0]))


if __name__ == "__main__":
    main()
