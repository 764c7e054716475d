"""An engine's own state, and a step that was saved in the middle, in a run of another precision or with other settings."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep import LossScaler, MixedPrecision
from halfstep.checkpoint import load_checkpoint, save_checkpoint
from halfstep.checkpoint.planning import plan_for
from halfstep.checkpoint.reading import Loaded, read_file
from halfstep.engine import progress_of
from halfstep.errors import CheckpointError, HalfstepWarning
from halfstep.records import StepRecord
from tests.checkpoint.runs import noted

pytestmark = pytest.mark.usefixtures("one_thread")


def engine(precision: str = "fp16", *, bias: bool = True, **settings: Any) -> MixedPrecision:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1, bias=bias))
    if "fp16" in precision:
        settings.setdefault("scaler", LossScaler(init_scale=1024.0, growth_interval=4))
    return MixedPrecision(model, torch.optim.AdamW(model.parameters(), lr=0.01), precision, **settings)


def train(amp: MixedPrecision, steps: int, *, seed: int = 0) -> list[StepRecord | None]:
    numbers = torch.Generator().manual_seed(seed)
    records = []
    for _ in range(steps):
        x, y = torch.randn(8, 3, generator=numbers), torch.randn(8, 1, generator=numbers)
        with amp.autocast():
            loss = F.mse_loss(amp.model(x), y)
        amp.backward(loss)
        records.append(amp.step())
    return records


def saved(amp: MixedPrecision, folder: Path, steps: int = 3) -> Path:
    train(amp, steps)
    return save_checkpoint(folder / "saved.pt", amp, step=steps)


def scale(amp: MixedPrecision) -> tuple[float, int]:
    assert amp.scaler is not None
    return amp.scaler.get_scale(), amp.scaler.state_dict()["_growth_tracker"]


@pytest.mark.parametrize("here", ["bf16", "fp32"])
def test_from_fp16_to_what_needs_no_scale_and_back(here: str, tmp_path: Path) -> None:
    amp, other = engine(), engine(here)
    path = saved(amp, tmp_path)
    noted(path, other, f"saved in fp16, and this run goes on in {here}", f"{here} here needs none, so the scale is set aside")
    assert all(torch.equal(one, two) for one, two in zip(amp.model.parameters(), other.model.parameters(), strict=True))
    assert other.stats().steps == 3
    path = saved(other, tmp_path)
    back = engine(scaler=LossScaler(init_scale=64.0))
    noted(path, back, f"saved in {here}, and this run goes on in fp16", "without loss scaling; fp16 here starts with a fresh loss scale")
    assert scale(back) == (64.0, 0)
    assert [record.step for record in train(back, 2) if record] == [7, 8]


def test_another_policy_of_the_same_precision(tmp_path: Path) -> None:
    amp = engine()
    path = saved(amp, tmp_path)
    other = engine("fp16; 0=fp32")
    noted(path, other, r"saved in fp16, and this run goes on in fp16; 0=fp32")
    assert scale(other) == scale(amp)


def test_the_settings_of_the_scaler_are_those_of_this_run(tmp_path: Path) -> None:
    amp = engine()
    path = saved(amp, tmp_path)
    other = engine(scaler=LossScaler(init_scale=8.0, growth_interval=100, backoff_factor=0.25, hysteresis=2))
    noted(
        path,
        other,
        r"The loss scaler keeps the settings of this run: .*backoff_factor 0\.25 \(there 0\.5\), growth_interval 100 \(there 4\), .*"
        r"hysteresis 2 \(there 0\)",
    )
    assert scale(other) == scale(amp) == (1024.0, 3)
    assert isinstance(other.scaler, LossScaler)
    assert (other.scaler.settings.growth_interval, other.scaler.settings.hysteresis) == (100, 2)


def test_a_scale_above_what_this_run_allows(tmp_path: Path) -> None:
    path = saved(engine(), tmp_path)
    other = engine(scaler=LossScaler(init_scale=8.0, growth_interval=4, max_scale=256.0))
    noted(path, other, r"max_scale 256\.0 \(there None\)", r"loss scale 1024 lies outside .* max_scale=256\.0; the run goes on with 256")
    assert scale(other)[0] == 256.0


def test_a_fixed_scale(tmp_path: Path) -> None:
    path = saved(engine(), tmp_path)
    other = engine(scaler=LossScaler(init_scale=128.0, static=True, growth_interval=4))
    with pytest.warns(HalfstepWarning, match=r"static True \(there False\)"):
        load_checkpoint(path, other)
    assert other.scaler is not None
    assert other.scaler.get_scale() == 128.0
    assert train(other, 1)[0] is not None
    path = saved(other, tmp_path)
    with pytest.warns(HalfstepWarning, match=r"static False \(there True\)"):
        load_checkpoint(path, again := engine())
    assert scale(again)[0] == 128.0


def torchs(**settings: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{"init_scale": 16.0, "growth_interval": 4, **settings})


def test_a_scaler_of_torch(tmp_path: Path) -> None:
    ours, theirs = engine(), engine(scaler=torchs())
    path = saved(ours, tmp_path)
    load_checkpoint(path, theirs)
    assert scale(theirs) == scale(ours) == (1024.0, 3)
    assert [record.scale for record in train(theirs, 2) if record] == [1024.0, 2048.0]
    path = save_checkpoint(tmp_path / "theirs.pt", theirs, step=5)
    again = engine(scaler=LossScaler(growth_interval=9))
    noted(path, again, r"^The loss scaler keeps the settings of this run: growth_interval 9 \(there 4\)\.$")
    assert scale(again) == scale(theirs)
    noted(path, other := engine(scaler=torchs(growth_interval=2)), r"growth_interval 2 \(there 4\)")
    assert scale(other) == (2048.0, 1)


def test_fp16_whose_scaler_had_no_state(tmp_path: Path) -> None:
    with pytest.warns(HalfstepWarning, match="fp16 runs without loss scaling"):
        without = engine(scaler=torchs(enabled=False))
    path = saved(without, tmp_path)
    amp = engine()
    match = r"saved in fp16 without the state of a loss scaler, which this run has\. The loss scale would start afresh at 1024: steps are"
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(path, amp)
    noted(path, amp, r"gradients are lost\. It starts afresh", "fp16 here starts with a fresh loss scale", strict=False)
    assert scale(amp) == (1024.0, 0)


def middle(folder: Path, **settings: Any) -> Path:
    """Saved after 2 of 3 micro-batches."""
    return saved(engine(accumulate=3, **settings), folder, steps=5)


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        ({"accumulate": 4}, "this run has accumulate=4"),
        ({"precision": "bf16", "accumulate": 3}, "this run is in bf16, with gradients of another scale"),
        ({"accumulate": 3, "bias": False}, r"this model has no 2\.bias that its gradient could belong to"),
    ],
)
def test_a_step_that_cannot_be_gone_on_with(other: dict[str, Any], fault: str, tmp_path: Path) -> None:
    path = middle(tmp_path)
    amp = engine(**other)
    if "bias" not in other:
        with pytest.raises(CheckpointError, match=rf"saved after 2 of 3 micro-batches of a step, and {fault}\. Nothing was changed"):
            load_checkpoint(path, amp)
    with pytest.warns(HalfstepWarning) as said:
        load_checkpoint(path, amp, strict=False)
    given_up = [str(each.message) for each in said if re.search(rf"and {fault}\. That step is given up: its micro", str(each.message))]
    assert len(given_up) == 1
    progress = progress_of(amp)
    assert progress is None or not progress.micro_batches
    assert all(parameter.grad is None for parameter in amp.model.parameters())
    records = train(amp, 2 * amp.accumulate)
    assert [record.step for record in records if record] == [2, 3]


def test_another_scale_in_the_middle_of_a_step(tmp_path: Path) -> None:
    path = middle(tmp_path)
    amp = engine(accumulate=3, scaler=LossScaler(init_scale=8.0, growth_interval=4, max_scale=256.0))
    match = r"middle of a step, with gradients multiplied by a loss scale of 1024, and this run's is 256\. Nothing was changed"
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(path, amp)
    assert scale(amp)[0] == 8.0
    matches = [r"max_scale 256\.0", "lies outside", "That step is given up: its micro-batches are not learned from"]
    noted(path, amp, *matches, strict=False)
    assert [record.step for record in train(amp, 3) if record] == [2]


def test_what_the_given_up_step_wrote_into_buffers_stays_until_the_next_is_skipped(tmp_path: Path) -> None:
    path = middle(tmp_path)
    kept = torch.load(path, weights_only=True)
    amp = engine(accumulate=4)
    with pytest.warns(HalfstepWarning, match="given up"):
        load_checkpoint(path, amp, strict=False)
    mean = amp.model.state_dict()["1.running_mean"]
    before = kept["progress"]["buffers"]["1.running_mean"]
    assert torch.equal(mean, kept["model"]["1.running_mean"])
    assert not torch.equal(mean, before)


def test_accumulation_may_change_between_two_steps(tmp_path: Path) -> None:
    path = saved(engine(accumulate=3), tmp_path, steps=6)
    amp = engine(accumulate=2)
    assert load_checkpoint(path, amp).notes == ()
    assert [record.step for record in train(amp, 4) if record] == [3, 4]


def plan(loaded: Loaded, amp: MixedPrecision) -> tuple[list[str], Any]:
    made = plan_for({"": amp}, loaded, strict=True)
    return made.fitting.notes, made.random


def test_another_version_of_torch_and_another_device(tmp_path: Path) -> None:
    loaded = read_file(saved(engine(), tmp_path))
    elsewhere = replace(loaded, record=replace(loaded.record, torch="2.9.0", device="cuda"))
    notes, _ = plan(elsewhere, engine())
    assert notes == [
        f"It was saved with torch 2.9.0, and this run has {torch.__version__}: results may differ in the last bits.",
        "It was saved with the device type cuda, and this run has cpu: results may differ in the last bits.",
    ]


def test_more_devices_than_there_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = read_file(saved(engine(), tmp_path))
    loaded.tree["random"]["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    notes, random = plan(loaded, engine())
    assert notes == ["It holds the random state of 2 CUDA devices, and this process sees 1: what is drawn on the others is left out."]
    assert len(random.cuda) == 1


def test_what_another_number_of_processes_saved(tmp_path: Path) -> None:
    loaded = read_file(saved(engine(), tmp_path), rank=1, ranks=2)
    notes, random = plan(loaded, engine())
    assert len(notes) == 1
    assert re.match(r"It was saved by one process, and this run has another number, so it is not the same run: batches are put", notes[0])
    assert random is None
    many = replace(loaded, record=replace(loaded.record, ranks=4))
    assert plan(many, engine())[0][0].startswith("It was saved by 4 ranks, and this run has another number")


def test_a_step_that_another_number_of_processes_was_in(tmp_path: Path) -> None:
    loaded = read_file(middle(tmp_path), ranks=2)
    with pytest.raises(CheckpointError, match=r"after 2 of 3 micro-batches of a step, and this run has another number of ranks, whose"):
        plan(loaded, engine(accumulate=3))


class Table(nn.Module):
    table: torch.Tensor

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.table.sum()  # type: ignore[no-any-return]


def with_table(table: torch.Tensor) -> MixedPrecision:
    model = Table(table)
    return MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")


def test_buffers_that_are_in_no_state(tmp_path: Path) -> None:
    path = saved(with_table(torch.arange(3.0)), tmp_path)
    load_checkpoint(path, same := with_table(torch.zeros(3)))
    assert torch.equal(same.model.table, torch.arange(3.0))  # type: ignore[arg-type]
    for table, there in ((torch.ones(2), r"float32 of shape \(2,\)"), (torch.ones(3).double(), r"float64 of shape \(3,\)")):
        other = with_table(table)
        noted(
            path, other, rf"The buffer table, which .*, is float32 of shape \(3,\) in the checkpoint, and {there} in this run: it stays as"
        )
        assert torch.equal(other.model.table, table)  # type: ignore[arg-type]


def test_large_tables_that_are_in_no_state_are_made_anew(tmp_path: Path) -> None:
    path = saved(with_table(torch.zeros(65537)), tmp_path)
    assert torch.load(path, weights_only=True)["buffers"] == {}
    load_checkpoint(path, amp := with_table(torch.ones(65537)))
    assert torch.equal(amp.model.table, torch.ones(65537))  # type: ignore[arg-type]
