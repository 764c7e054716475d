from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import MixedPrecision
from halfstep.archive import verify
from halfstep.checkpoint import load_checkpoint, save_checkpoint
from halfstep.checkpoint.trees import named, tensors_in
from halfstep.errors import CheckpointError, ConfigurationError, HalfstepError, InvalidTypeError
from tests.checkpoint.cases import Complex, SparseWords, Tied, engine, fp16_accumulated, gan, loop, mlp, with_model
from tests.checkpoint.runs import Build, Run, trained
from tests.checkpoint.shelves import names

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run() -> Run:
    return fp16_accumulated()


def amp_of(run: Run) -> MixedPrecision:
    assert isinstance(run.engines, MixedPrecision)
    return run.engines


@pytest.mark.parametrize("mmap", [False, True])
def test_others_can_read_it(mmap: bool, run: Run, tmp_path: Path) -> None:
    trained(run, 0, 4)
    path = save_checkpoint(str(tmp_path / "a.pt"), run.engines, step=4, extra={"x": 1})
    assert path == tmp_path / "a.pt"
    tree = torch.load(path, weights_only=True, mmap=mmap)
    assert list(tree)[:3] == ["format", "step", "model"]
    assert (tree["format"], tree["step"], tree["extra"]) == ("halfstep checkpoint 1", 4, {"x": 1})
    model, optimizer = amp_of(run).model, amp_of(run).optimizer
    assert {name: value.tolist() for name, value in tree["model"].items()} == {k: v.tolist() for k, v in model.state_dict().items()}
    mlp().load_state_dict(tree["model"])
    torch.optim.AdamW(model.parameters()).load_state_dict(tree["optimizer"])
    assert tree["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    subprocess.run([sys.executable, "-m", "zipfile", "-t", path], check=True, capture_output=True)


def test_what_it_says_about_itself(run: Run, tmp_path: Path) -> None:
    trained(run, 0, 11)
    path = save_checkpoint(tmp_path / "a.pt", run.engines, step=11)
    record = verify(path)
    (one,) = record.engines
    assert (record.step, record.ranks, record.rank, record.device, record.torch) == (11, 1, 0, "cpu", torch.__version__)
    assert (one.name, one.precision, one.policy, one.steps, one.skips) == ("", "fp16", "fp16", 3, 1)
    assert (one.micro_batches, one.accumulate) == (2, 3)
    parts = {part.name: part for part in record.parts}
    assert {"model", "optimizer", "scheduler", "amp", "setup", "progress", "random", "extra"} <= parts.keys()
    assert parts["model"].tensors == 9
    assert parts["extra"].bytes == 0
    assert load_checkpoint(path, fp16_accumulated().engines).record == record


def test_several_engines_have_names(tmp_path: Path) -> None:
    run = gan()
    path = save_checkpoint(tmp_path / "a.pt", run.engines, step=0)
    tree = torch.load(path, weights_only=True)
    assert {"generator.model", "discriminator.optimizer", "discriminator.amp"} <= tree.keys()
    assert [each.name for each in verify(path).engines] == ["generator", "discriminator"]


MODELS: dict[str, Build] = {
    "tied": with_model(Tied),
    "complex": with_model(Complex, precision="fp32"),
    "sparse": with_model(SparseWords, sparse=True, precision="bf16", max_grad_norm=None),
}


@pytest.mark.parametrize("name", MODELS)
def test_where_it_says_a_tensor_lies_it_lies(name: str, tmp_path: Path) -> None:
    run = MODELS[name]()
    trained(run, 0, 5)
    path = save_checkpoint(tmp_path / "a.pt", run.engines, step=5, extra={"part": torch.arange(9)[3:6], "none": torch.zeros(0)})
    with zipfile.ZipFile(path) as archive:
        held = {info.filename.split("/", 1)[1]: archive.read(info) for info in archive.infolist()}
    tree = torch.load(path, weights_only=True)
    places = {named(place): tensor for place, tensor in tensors_in(tree)}
    records = verify(path).tensors
    assert [record.name for record in records] == list(places)
    for record in records:
        tensor = places[record.name]
        assert (record.shape, f"torch.{record.dtype}") == (tuple(tensor.shape), str(tensor.dtype))
        parts = [tensor._indices(), tensor._values()] if tensor.is_sparse else [tensor]
        assert [held[storage] for storage in record.storage.split(",")] == [memory(part) for part in parts]


def memory(tensor: Tensor) -> bytes:
    """All that lies where a tensor does."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()


def test_an_older_one_is_replaced_at_once(run: Run, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "a.pt", run.engines, step=1)
    with path.open("rb") as reader:
        before = reader.read(1000)
        save_checkpoint(path, run.engines, step=2)
        reader.seek(0)
        assert reader.read(1000) == before
    assert verify(path).step == 2
    assert names(tmp_path) == ["a.pt"]


@pytest.mark.skipif(not hasattr(os, "symlink") or sys.platform == "win32", reason="no links")
def test_a_link_stays_one(run: Run, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.pt"
    link.symlink_to(tmp_path / "real" / "a.pt")
    save_checkpoint(link, run.engines, step=1)
    assert link.is_symlink()
    assert names(tmp_path / "real") == ["a.pt"]
    assert load_checkpoint(link, run.engines).step == 1


def test_nothing_is_drawn_and_no_gradient_is_touched(run: Run, tmp_path: Path) -> None:
    trained(run, 0, 4)
    parameters = list(amp_of(run).model.parameters())
    gradients: list[Any] = [parameter.grad for parameter in parameters]
    versions = [gradient._version for gradient in gradients]
    before = torch.get_rng_state()
    save_checkpoint(tmp_path / "a.pt", run.engines, step=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is gradient for parameter, gradient in zip(parameters, gradients, strict=True))
    assert [gradient._version for gradient in gradients] == versions


save: Any = save_checkpoint
load: Any = load_checkpoint

Call = Callable[[Any, Path], Any]
CALLS: dict[str, tuple[Call, type[HalfstepError], str]] = {
    "model": (lambda amp, at: save(at / "a.pt", amp.model, step=1), InvalidTypeError, "not a Sequential"),
    "list": (lambda amp, at: save(at / "a.pt", [amp], step=1), InvalidTypeError, r"takes a halfstep\.MixedPrecision, .* not a list"),
    "none": (lambda amp, at: save(at / "a.pt", {}, step=1), ConfigurationError, "was given no engine"),
    "name": (lambda amp, at: save(at / "a.pt", {"a b": amp}, step=1), ConfigurationError, "'a b' cannot be the name of an engine"),
    "taken": (lambda amp, at: save(at / "a.pt", {"random": amp}, step=1), ConfigurationError, r"'random' cannot be .* other than"),
    "number": (lambda amp, at: save(at / "a.pt", {1: amp}, step=1), ConfigurationError, "1 cannot be the name"),
    "step": (lambda amp, at: save(at / "a.pt", amp, step=True), InvalidTypeError, r"step is a whole number, .* not True"),
    "negative": (lambda amp, at: save(at / "a.pt", amp, step=-3), ConfigurationError, "step is -3; allowed are whole numbers from 0"),
    "extra": (lambda amp, at: save(at / "a.pt", amp, step=1, extra=[1]), InvalidTypeError, r"extra is a dictionary .* not a list"),
    "path": (lambda amp, at: save(3, amp, step=1), InvalidTypeError, r"takes a path, as text or as a pathlib\.Path, not a int"),
    "no path": (lambda amp, at: save("", amp, step=1), CheckpointError, "no name for a checkpoint"),
    "folder": (lambda amp, at: save(at, amp, step=1), CheckpointError, "is a folder: it is not replaced"),
    "no folder": (lambda amp, at: save(at / "no" / "a.pt", amp, step=1), CheckpointError, r"Cannot write .*: No such file or directory"),
    "load": (lambda amp, at: load(at / "a.pt", amp.model), InvalidTypeError, r"load_checkpoint\(path, amp, \.\.\.\) takes a halfstep"),
    "load nothing": (lambda amp, at: load(at / "a.pt", amp), CheckpointError, r"There is no checkpoint at .*a\.pt"),
    "strict": (lambda amp, at: load(at / "a.pt", amp, strict=1), InvalidTypeError, r"strict=\.\.\.\) takes True or False, not 1"),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments(name: str, tmp_path: Path) -> None:
    call, error, match = CALLS[name]
    model = nn.Sequential(nn.Linear(6, 1))
    amp: Any = loop(engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")).engines
    with pytest.raises(error, match=match):
        call(amp, tmp_path)
    assert names(tmp_path) == []
