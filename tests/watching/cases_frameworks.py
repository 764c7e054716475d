"""Loops that belong to Accelerate, Lightning and the Trainer of transformers, which were talked into scaling on a CPU."""

# Loops read as their users write them, and the frameworks are optional.
# mypy: disable-error-code="no-untyped-call, misc"

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

from tests.watching.case import case
from tests.watching.data import classification, regression

# What the frameworks warn of: loaders without workers, few batches, missing loggers, and names that became old.
NOISE = (".*",)
SKIPS = 2.0**21


def accelerate() -> tuple[Any]:
    return (pytest.importorskip("accelerate"),)


@contextmanager
def accelerators(library: Any) -> Iterator[None]:
    """Accelerate keeps its precision for the whole process."""
    state = library.state
    for moment in range(2):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
        if moment == 0:
            yield


def accelerated(library: Any, *, precision: str, scale: float | None, clip: bool, windows: int = 1) -> list[float]:
    x, y = regression(16, 4, 2)
    with accelerators(library):
        accelerator = library.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=windows)
        if scale is not None:
            accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=scale), True
        net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        opt = torch.optim.AdamW(net.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.LinearLR(opt, 0.5, total_iters=6)
        loader = DataLoader(TensorDataset(x, y), batch_size=8)
        net, opt, schedule, loader = accelerator.prepare(net, opt, schedule, loader)
        losses = []
        for _ in range(6):
            for xs, ys in loader:
                with accelerator.accumulate(net):
                    with accelerator.autocast():
                        loss = F.mse_loss(net(xs).float(), ys)
                    accelerator.backward(loss)
                    if clip and accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(net.parameters(), 1.0)
                    opt.step()
                    schedule.step()
                    opt.zero_grad()
            losses.append(loss.item())
    return losses


@case(before=accelerate, ignores=NOISE)
def accelerate_in_fp16(library: Any) -> list[float]:
    return accelerated(library, precision="fp16", scale=256.0, clip=True)


@case(before=accelerate, ignores=NOISE)
def accelerate_in_fp16_with_skips(library: Any) -> list[float]:
    return accelerated(library, precision="fp16", scale=SKIPS, clip=False)


@case(before=accelerate, ignores=NOISE)
def accelerate_that_accumulates(library: Any) -> list[float]:
    return accelerated(library, precision="fp16", scale=64.0, clip=True, windows=2)


@case(before=accelerate, ignores=NOISE)
def accelerate_in_bf16(library: Any) -> list[float]:
    return accelerated(library, precision="bf16", scale=None, clip=True)


@case(before=accelerate, ignores=NOISE)
def accelerate_and_a_function_of_torch_that_clips(library: Any) -> list[float]:
    x, y = regression(8, 4, 2)
    with accelerators(library):
        accelerator = library.Accelerator(cpu=True, mixed_precision="fp16")
        accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=256.0), True
        net, opt = accelerator.prepare(model := nn.Linear(4, 2), torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        for _ in range(4):
            with accelerator.autocast():
                loss = F.mse_loss(net(x).float(), y)
            accelerator.backward(loss)
            clip_grad_norm_(net.parameters(), 1.0)  # alert: clip_before_unscale
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
    return losses


def fabric() -> tuple[Any, Any]:
    return pytest.importorskip("lightning.fabric"), pytest.importorskip("lightning.fabric.plugins")


@case(before=fabric, ignores=NOISE)
def fabric_in_fp16(library: Any, plugins: Any) -> list[float]:
    x, y = classification(12, 5, 3)
    plugin = plugins.MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=512.0))
    run = library.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    net, opt = run.setup(model := nn.Linear(5, 3), torch.optim.SGD(model.parameters(), lr=0.2))
    losses = []
    for _ in range(5):
        loss = F.cross_entropy(net(x), y)
        run.backward(loss)
        run.clip_gradients(net, opt, max_norm=1.0, error_if_nonfinite=False)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


@case(before=fabric, ignores=NOISE)
def fabric_in_bf16(library: Any, plugins: Any) -> list[float]:
    x, y = regression(8, 4, 1)
    run = library.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    net, opt = run.setup(model := nn.Linear(4, 1), torch.optim.AdamW(model.parameters(), lr=0.05, fused=True))
    losses = []
    for _ in range(5):
        loss = F.mse_loss(net(x), y)
        opt.zero_grad()
        run.backward(loss)
        opt.step()
        losses.append(loss.item())
    return losses


@case(before=fabric, ignores=NOISE)
def fabric_whose_schedule_never_waits(library: Any, plugins: Any) -> list[float]:
    x, y = regression(8, 4, 1)
    plugin = plugins.MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=SKIPS))
    run = library.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    net, opt = run.setup(model := nn.Linear(4, 1), torch.optim.AdamW(model.parameters(), lr=0.05))
    schedule = torch.optim.lr_scheduler.LinearLR(opt.optimizer, 0.1, total_iters=10)
    losses = []
    for _ in range(12):
        loss = F.mse_loss(net(x), y)
        opt.zero_grad()
        run.backward(loss)
        opt.step()
        schedule.step()  # alert: schedule_moved_on_skip
        losses.append(loss.item())
    return losses


def lightning() -> tuple[Any, Any]:
    return pytest.importorskip("lightning.pytorch"), pytest.importorskip("lightning.pytorch.plugins.precision")


def lit(library: Any) -> Any:
    """A model of Lightning's that remembers its losses."""

    class Lit(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
            self.losses: list[float] = []

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss = F.mse_loss(self.net(batch[0]).float(), batch[1])
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, _: int) -> Any:
            return F.mse_loss(self.net(batch[0]).float(), batch[1])

        def configure_optimizers(self) -> Any:
            opt = torch.optim.AdamW(self.parameters(), lr=0.02)
            return [opt], [torch.optim.lr_scheduler.ExponentialLR(opt, 0.95)]

    return Lit


def fitted(library: Any, model: Any, **settings: Any) -> list[float]:
    x, y = regression(16, 4, 1)
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = library.Trainer(accelerator="cpu", devices=1, max_epochs=3, **quiet, **settings)
    trainer.fit(model, loader, loader)
    losses: list[float] = model.losses[::2]  # of one batch
    return losses


@case(before=lightning, ignores=NOISE)
def lightning_in_fp16(library: Any, plugins: Any) -> list[float]:
    plugin = plugins.MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=256.0))
    return fitted(library, lit(library)(), plugins=plugin, gradient_clip_val=1.0)


@case(before=lightning, ignores=NOISE)
def lightning_that_accumulates(library: Any, plugins: Any) -> list[float]:
    plugin = plugins.MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))
    return fitted(library, lit(library)(), plugins=plugin, accumulate_grad_batches=2)


@case(before=lightning, ignores=NOISE)
def lightning_in_bf16(library: Any, plugins: Any) -> list[float]:
    return fitted(library, lit(library)(), precision="bf16-mixed", gradient_clip_val=1.0)


@case(before=lightning, ignores=NOISE)
def lightning_that_clips_too_early(library: Any, plugins: Any) -> list[float]:
    class Early(lit(library)):
        def on_after_backward(self) -> None:
            clip_grad_norm_(self.parameters(), 0.5)  # alert: clip_before_unscale

    plugin = plugins.MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=256.0))
    return fitted(library, Early(), plugins=plugin)


def transformers() -> tuple[Any, Any]:
    return pytest.importorskip("transformers"), pytest.importorskip("accelerate")


def trainers(library: Any, scale: float | None) -> Any:
    """The Trainer, with a scaler that works on a CPU."""

    class Scaling(library.Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            if scale is not None:
                self.accelerator.scaler, self.accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=scale), True

    return Scaling


def finetuned(library: Any, kind: Any, **settings: Any) -> list[float]:
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = library.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=8)
    model = library.BertForSequenceClassification(config)
    ids = torch.arange(32).view(8, 4) % 20
    rows = [{"input_ids": row, "labels": int(row[0] > 9)} for row in ids]
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
        arguments = library.TrainingArguments(
            folder, use_cpu=True, max_steps=8, per_device_train_batch_size=4, learning_rate=0.02, **quiet, **settings
        )
        trainer = kind(model=model, args=arguments, train_dataset=rows)
        trainer.remove_callback(library.PrinterCallback)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@case(before=transformers, ignores=NOISE)
def transformers_in_fp16(library: Any, accelerate: Any) -> list[float]:
    with accelerators(accelerate):
        return finetuned(library, trainers(library, 256.0), fp16=True)


@case(before=transformers, ignores=NOISE)
def transformers_that_accumulates(library: Any, accelerate: Any) -> list[float]:
    with accelerators(accelerate):
        return finetuned(library, trainers(library, 64.0), fp16=True, gradient_accumulation_steps=2, max_grad_norm=0.5)


@case(before=transformers, ignores=NOISE)
def transformers_in_bf16(library: Any, accelerate: Any) -> list[float]:
    with accelerators(accelerate):
        return finetuned(library, trainers(library, None), bf16=True)


@case(before=transformers, ignores=NOISE)
def transformers_that_measures_too_early(library: Any, accelerate: Any) -> list[float]:
    norms: list[float] = []

    class Measuring(trainers(library, 256.0)):
        def training_step(self, model: nn.Module, *arguments: Any, **settings: Any) -> Any:
            loss = super().training_step(model, *arguments, **settings)
            norms.append(sum(p.grad.norm().item() for p in model.parameters() if p.grad is not None))  # alert: scaled_norm_logged
            return loss

    with accelerators(accelerate):
        return finetuned(library, Measuring, fp16=True)
