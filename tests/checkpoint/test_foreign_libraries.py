"""Files as Accelerate, the Trainer of transformers, Lightning and Fabric write them."""

# Loops read as their users write them, and the frameworks are optional.
# mypy: disable-error-code="no-untyped-call, misc"

from __future__ import annotations

import argparse
from collections import defaultdict, deque
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep.checkpoint import import_scaler_state
from halfstep.scaler import LossScaler
from tests.checkpoint.loops import AFTER, follow, scaler
from tests.watching.cases_frameworks import accelerate, accelerators, fabric, lightning, trainers, transformers

# What the frameworks warn of: loaders without workers, few batches, missing loggers, and names that became old.
pytestmark = pytest.mark.filterwarnings("ignore:::(?!halfstep|tests)")


def go_on_from(*sources: Path, theirs: torch.amp.GradScaler, key: str) -> None:
    """Scalers that import what was saved move as the one that was never stopped."""
    before = theirs.state_dict()
    assert before["_growth_tracker"] > 0, "the run left no trace in its scaler"
    kinds = (LossScaler, torch.amp.GradScaler)
    scalers = [kind("cpu", growth_interval=before["growth_interval"]) for kind in kinds for _ in sources]
    for mine, source in zip(scalers, sources * 2, strict=True):
        imported = import_scaler_state(source, mine)
        assert (imported.key, imported.scale, imported.growth_tracker) == (key, before["scale"], before["_growth_tracker"])
    whole = follow(theirs, AFTER)
    assert all(follow(mine, AFTER) == whole for mine in scalers)


def test_accelerate(tmp_path: Path) -> None:
    (library,) = accelerate()
    with accelerators(library):
        accelerator = library.Accelerator(cpu=True, mixed_precision="fp16")
        accelerator.scaler, accelerator.native_amp = scaler(), True
        net = nn.Linear(4, 2)
        net, opt = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
        for factor in (1.0, float("inf"), 1.0):
            accelerator.backward(net(torch.ones(3, 4)).float().sum() * factor)
            opt.step()
            opt.zero_grad()
        accelerator.save_state(str(tmp_path / "saved"))
    go_on_from(tmp_path / "saved", tmp_path / "saved" / "scaler.pt", theirs=accelerator.scaler, key="")


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    library, accelerate_ = transformers()
    with accelerators(accelerate_):
        sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        model = library.BertForSequenceClassification(library.BertConfig(**sizes, max_position_embeddings=8))
        rows = [{"input_ids": torch.arange(4) + row, "labels": row % 2} for row in range(8)]
        arguments = library.TrainingArguments(
            str(tmp_path),
            use_cpu=True,
            fp16=True,
            max_steps=3,
            save_steps=2,
            per_device_train_batch_size=4,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = trainers(library, 256.0)(model=model, args=arguments, train_dataset=rows)
        trainer.remove_callback(library.PrinterCallback)
        trainer.train()
    mine = LossScaler("cpu")
    assert import_scaler_state(tmp_path / "checkpoint-2", mine).growth_tracker == 2
    go_on_from(tmp_path / "checkpoint-3", theirs=trainer.accelerator.scaler, key="")


class Size(Enum):
    SMALL = "small"


class Settings(dict[str, Any]):
    pass


class Layout:
    def __init__(self) -> None:
        self.depth = 3


def lit(library: Any) -> Any:
    class Net(library.LightningModule):
        def __init__(self, **settings: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss: Tensor = self.net(batch[0]).float().sum()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.02)

    return Net


def test_lightning(tmp_path: Path) -> None:
    library, plugins = lightning()
    settings = {
        "layout": Layout(),
        "size": Size.SMALL,
        "nested": Settings(rate=0.5, more=Settings()),
        "parsed": argparse.Namespace(seed=3),
        "counts": defaultdict(list, {"a": [1]}),
        "queue": deque([1, 2], maxlen=3),
        "where": tmp_path,
        "activation": nn.functional.relu,
        "criterion": nn.Sequential(nn.Linear(2, 2)),
        "dtype": torch.float16,
    }
    plugin = plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler())
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = library.Trainer(accelerator="cpu", devices=1, max_epochs=1, plugins=plugin, **quiet)
    trainer.fit(lit(library)(**settings), DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2))
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    with pytest.raises(Exception, match="Weights only load failed"):
        torch.load(path, weights_only=True)
    go_on_from(path, theirs=plugin.scaler, key="MixedPrecision")


def test_fabric(tmp_path: Path) -> None:
    library, plugins = fabric()
    plugin = plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler())
    run = library.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    net, opt = run.setup(model := nn.Linear(5, 3), torch.optim.SGD(model.parameters(), lr=0.2))
    for factor in (1.0, float("inf"), 1.0):
        run.backward(net(torch.ones(2, 5)).float().sum() * factor)
        opt.step()
        opt.zero_grad()
    run.save(tmp_path / "fabric.ckpt", {"model": net, "optimizer": opt, "step": 3, "precision": plugin.state_dict()})
    go_on_from(tmp_path / "fabric.ckpt", theirs=plugin.scaler, key="precision")
