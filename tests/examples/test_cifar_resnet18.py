"""The image example: its network, its data and the promise that the seed decides everything."""

from __future__ import annotations

import builtins
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep.task import Task, load_task

EXAMPLE = Path(__file__).parents[2] / "examples" / "cifar_resnet18.py"


@pytest.fixture(autouse=True)
def _no_cifar_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HALFSTEP_DATA", str(tmp_path))


@pytest.fixture(scope="module")
def factory() -> Callable[[int], Task]:
    return load_task(f"{EXAMPLE}:task")


@pytest.fixture
def module(factory: Callable[[int], Task]) -> ModuleType:
    return sys.modules[factory.__module__]


def first_batch(task: Task) -> tuple[Tensor, Tensor]:
    images, labels = next(iter(task.batches))
    return images, labels


def few(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    images, labels = batch
    return images[:4], labels[:4]


def test_the_network_is_resnet_18_with_the_standard_names(factory: Callable[[int], Task]) -> None:
    model = factory(0).model
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_173_962
    names = set(model.state_dict())
    assert {"conv1.weight", "bn1.running_mean", "layer1.0.conv1.weight", "layer4.1.bn2.weight", "fc.bias"} <= names
    assert {"layer2.0.downsample.0.weight", "layer2.0.downsample.1.weight"} <= names
    assert model.get_submodule("conv1").stride == (1, 1)
    assert model.get_submodule("layer4")(model.get_submodule("layer3")(torch.zeros(1, 128, 16, 16))).shape == (1, 512, 4, 4)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_the_optimizer_is_the_usual_one_over_all_parameters(factory: Callable[[int], Task]) -> None:
    task = factory(0)
    (group,) = task.optimizer.param_groups
    assert isinstance(task.optimizer, torch.optim.SGD)
    assert (group["momentum"], group["weight_decay"], group["nesterov"]) == (0.9, 5e-4, True)
    assert {id(parameter) for parameter in group["params"]} == {id(parameter) for parameter in task.model.parameters()}


def test_a_batch_holds_64_normalised_digits_of_32_by_32_in_three_channels(factory: Callable[[int], Task]) -> None:
    images, labels = first_batch(factory(0))
    assert images.shape == (64, 3, 32, 32)
    assert images.dtype == torch.float32
    assert images.is_contiguous()
    assert images.mean().abs() < 0.1
    assert 0.8 < images.std() < 1.1
    assert torch.equal(images[:, 0], images[:, 2])
    assert labels.shape == (64,)
    assert labels.dtype == torch.int64
    assert set(labels.tolist()) <= set(range(10))


def test_held_out_digits_are_not_trained_on(module: ModuleType) -> None:
    training, held_out = module.digits(train=True), module.digits(train=False)
    assert (len(training), len(held_out)) == (1500, 297)
    seen = {image.numpy().tobytes() for image in training.tensors[0][:, 0]}
    assert seen.isdisjoint(image.numpy().tobytes() for image in held_out.tensors[0][:, 0])


def test_the_same_seed_gives_the_same_bits(factory: Callable[[int], Task]) -> None:
    one = factory(3)
    torch.rand(5)  # What else draws from torch's global generator must not matter.
    other = factory(3)
    for (name, left), right in zip(one.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        assert torch.equal(left, right), name
    for left, right in zip(first_batch(one), first_batch(other), strict=True):
        assert torch.equal(left, right)


def test_another_seed_gives_other_weights_and_another_order(factory: Callable[[int], Task]) -> None:
    one, other = factory(0), factory(1)
    assert not torch.equal(one.model.state_dict()["conv1.weight"], other.model.state_dict()["conv1.weight"])
    assert not torch.equal(first_batch(one)[1], first_batch(other)[1])


def test_a_second_epoch_has_another_order(factory: Callable[[int], Task]) -> None:
    task = factory(0)
    assert not torch.equal(first_batch(task)[1], first_batch(task)[1])


def test_an_untrained_model_knows_nothing_and_one_step_teaches_it_something(factory: Callable[[int], Task]) -> None:
    task = factory(0)
    batch = few(first_batch(task))
    before = task.loss(task.model, batch)
    assert before.shape == ()
    assert before.item() == pytest.approx(math.log(10), abs=0.5)
    before.backward()  # type: ignore[no-untyped-call]
    task.optimizer.step()
    assert task.loss(task.model, batch).item() < before.item()


def test_accuracy_counts_right_answers(module: ModuleType) -> None:
    class FirstPixel(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.one_hot(x[:, 0, 0, 0].long(), 10).float()

    images = torch.arange(4.0).reshape(4, 1, 1, 1)
    dataset = torch.utils.data.TensorDataset(images, torch.tensor([0, 1, 2, 9]))
    assert module.accuracy(FirstPixel(), dataset, device=torch.device("cpu")) == 0.75


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'torchvision'"), RuntimeError("operator torchvision::nms does not exist")]
)
def test_digits_are_used_with_a_warning_when_torchvision_cannot_be_imported(
    error: Exception, factory: Callable[[int], Task], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    plain_import = builtins.__import__

    def broken_import(name: str, *args: Any, **kwargs: Any) -> ModuleType:
        if name.partition(".")[0] == "torchvision":
            raise error
        return plain_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", broken_import)
    with pytest.warns(UserWarning, match=f"using digits instead: {error}"):
        task = factory(0)
    images, _ = first_batch(task)
    assert torch.equal(images[:, 0], images[:, 1])


def test_torchvision_is_not_imported_when_cifar_10_is_not_on_disk(factory: Callable[[int], Task], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)  # To import it now raises ImportError, and then there would be a warning.
    images, _ = first_batch(factory(0))
    assert torch.equal(images[:, 0], images[:, 1])


class FakeCIFAR10(torch.utils.data.Dataset[Any]):
    """128 images; the channels of each hold 0, 1 and 2."""

    def __init__(self, root: str, *, train: bool, download: bool, transform: Callable[[Any], Tensor]) -> None:
        assert (Path(root) / "cifar-10-batches-py").is_dir()
        assert not download
        self.train = train
        self.transform = transform

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(torch.arange(3.0).reshape(3, 1, 1).expand(3, 32, 32)), index % 10


class FakeToTensor:
    def __call__(self, image: Tensor) -> Tensor:
        return image


class FakeNormalize:
    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        assert len(mean) == len(std) == 3

    def __call__(self, image: Tensor) -> Tensor:
        return image * 100


class FakeCompose:
    def __init__(self, transforms: list[Callable[[Tensor], Tensor]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Tensor) -> Tensor:
        for transform in self.transforms:
            image = transform(image)
        return image


@pytest.fixture
def _torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    package, datasets, transforms = (ModuleType(f"torchvision{suffix}") for suffix in ("", ".datasets", ".transforms"))
    vars(datasets).update(CIFAR10=FakeCIFAR10)
    vars(transforms).update(ToTensor=FakeToTensor, Normalize=FakeNormalize, Compose=FakeCompose)
    vars(package).update(datasets=datasets, transforms=transforms)
    for module in (package, datasets, transforms):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("_torchvision")
def test_cifar_10_is_used_when_torchvision_and_the_data_are_there(
    factory: Callable[[int], Task], module: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    images, labels = first_batch(factory(0))
    assert images.shape == (64, 3, 32, 32)
    assert images[0, :, 0, 0].tolist() == [0, 100, 200]
    assert labels.shape == (64,)
    assert module.load_images(train=True).train
    assert not module.load_images(train=False).train


@pytest.mark.usefixtures("_torchvision")
def test_cifar_10_is_looked_for_in_the_folder_data_by_default(module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HALFSTEP_DATA")
    monkeypatch.chdir(tmp_path)
    assert isinstance(module.load_images(train=True), torch.utils.data.TensorDataset)
    (tmp_path / "data" / "cifar-10-batches-py").mkdir(parents=True)
    assert isinstance(module.load_images(train=True), FakeCIFAR10)
