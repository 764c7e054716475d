"""ResNet-18 on 32x32 images: the classic convolutional network, as a task that halfstep can measure.

Which precision trains it fastest on this machine, and does it still learn the same?

    halfstep compare examples/cifar_resnet18.py:task --channels-last

Train it for a while in the precision that halfstep chooses, and see how many held-out images it then recognises:

    python examples/cifar_resnet18.py --steps 40

The images are CIFAR-10's when torchvision is installed and the data set lies in ./data, or in the folder that HALFSTEP_DATA names.
Otherwise they are the 1,797 handwritten digits that come with scikit-learn, enlarged from 8x8 to 32x32 and repeated in three
channels: real images that need no download, and the same amount of arithmetic a step. Both have ten classes.

Everything follows from the seed: the weights and the order of the images.
"""

from __future__ import annotations

import argparse
import os
import warnings
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from halfstep import MixedPrecision, Task

BATCH_SIZE = 64
LEARNING_RATE = 0.01
N_CLASSES = 10
N_HELD_OUT_DIGITS = 297  # of 1,797


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al., 2015, "Deep Residual Learning for Image Recognition")."""

    def __init__(self, n_in: int, n_out: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.downsample = nn.Sequential()  # passes its input through
        if stride != 1 or n_in != n_out:
            self.downsample = nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride=stride, bias=False), nn.BatchNorm2d(n_out))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.downsample(x))


class ResNet18(nn.Module):
    """ResNet-18 for small images: the first convolution is 3x3 with stride 1, and no max-pooling follows it.

    Takes images of shape (batch, 3, height, width) and returns logits of shape (batch, n_classes).
    """

    def __init__(self, n_classes: int = N_CLASSES) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, stride=1), BasicBlock(64, 64, stride=1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, stride=2), BasicBlock(128, 128, stride=1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, stride=2), BasicBlock(256, 256, stride=1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, stride=2), BasicBlock(512, 512, stride=1))
        self.fc = nn.Linear(512, n_classes)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


def digits(*, train: bool) -> TensorDataset:
    """scikit-learn's handwritten digits as 32x32 images in three channels: those to train on, or those held out."""
    bundle = load_digits()
    images = torch.from_numpy(bundle.images).float().unsqueeze(1)
    images = (images - images.mean()) / images.std()
    images = F.interpolate(images, size=32, mode="bilinear").expand(-1, 3, -1, -1)
    labels = torch.from_numpy(bundle.target)
    part = slice(None, -N_HELD_OUT_DIGITS) if train else slice(-N_HELD_OUT_DIGITS, None)
    return TensorDataset(images[part], labels[part])


def cifar10(*, train: bool, folder: Path) -> Dataset[Any]:
    """CIFAR-10 from a folder that already holds it."""
    from torchvision import datasets, transforms  # noqa: PLC0415 (optional)

    normalize = transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    transform = transforms.Compose([transforms.ToTensor(), normalize])
    dataset: Dataset[Any] = datasets.CIFAR10(str(folder), train=train, download=False, transform=transform)
    return dataset


def load_images(*, train: bool) -> Dataset[Any]:
    """CIFAR-10 where it can be had without a download, otherwise the digits."""
    folder = Path(os.environ.get("HALFSTEP_DATA", "data"))
    if (folder / "cifar-10-batches-py").is_dir():
        try:
            return cifar10(train=train, folder=folder)
        except (ImportError, RuntimeError) as error:  # a torchvision built for another torch raises RuntimeError
            warnings.warn(f"CIFAR-10 in {folder} cannot be read; using digits instead: {error}", stacklevel=2)
    return digits(train=train)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The cross-entropy of a batch of images and labels."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def task(seed: int) -> Task:
    """The training problem that halfstep measures. Everything random in it follows from the seed."""
    torch.manual_seed(seed)
    model = ResNet18()
    order = torch.Generator().manual_seed(seed)
    return Task(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=True),
        loss=loss,
        batches=DataLoader(load_images(train=True), batch_size=BATCH_SIZE, shuffle=True, drop_last=True, generator=order),
    )


@torch.no_grad()
def accuracy(model: nn.Module, images: Dataset[Any], *, device: torch.device) -> float:
    """The share of images that the model recognises, from 0 to 1."""
    model.eval()
    hits = [model(pixels.to(device)).argmax(dim=1).cpu() == labels for pixels, labels in DataLoader(images, batch_size=256)]
    return torch.cat(hits).float().mean().item()


def main() -> None:
    """Trains for a few steps and tells how many held-out images the model then recognises."""
    parser = argparse.ArgumentParser(description="Train ResNet-18 in mixed precision.")
    parser.add_argument("--precision", default="auto", help="auto, fp32, bf16 or fp16 (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="decides the weights and the order of the images (default: %(default)s)")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    problem = task(args.seed)
    # Convolutions are fastest where the channels of a pixel lie side by side, in the model's weights and in the images.
    model = problem.model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    amp = MixedPrecision(model, problem.optimizer, precision=args.precision)
    epochs = chain.from_iterable(repeat(problem.batches))
    for images, labels in islice(epochs, args.steps):
        batch = (images.to(device, memory_format=torch.channels_last), labels.to(device))
        record = amp.train_step(problem.loss, model, batch)
        if record.step % 5 == 0:
            note = "  skipped" if record.skipped else ""
            print(f"step {record.step:4d}  {record.precision}  loss {record.loss:.3f}  {record.step_time_s:.2f} s{note}", flush=True)
    print(f"accuracy on held-out images: {accuracy(model, load_images(train=False), device=device):.1%}")


if __name__ == "__main__":
    main()
