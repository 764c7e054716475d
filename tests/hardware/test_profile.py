from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.engine import MixedPrecision
from halfstep.hardware import StepProfile, profile_step, static_memory
from halfstep.numerics import lowered_ops

CPU = torch.device("cpu")
MIB = 2**20
SGD = torch.optim.SGD


def profiled(step: Any) -> StepProfile:
    _, profile = profile_step(step, device=CPU, lowered=lowered_ops())
    return profile


def seen_best(step: Any, share: Callable[[StepProfile], float]) -> float:
    """The largest of several measurements: on a shared machine any operation may lose milliseconds to another program."""
    return max(share(profiled(step)) for _ in range(5))


def mib(count: float) -> Tensor:
    return torch.empty(int(count * MIB), dtype=torch.uint8)


class TestPeak:
    def test_what_is_held_at_once_counts(self) -> None:
        def step() -> None:
            first = mib(3)
            second = mib(5)  # 8 MiB are held here
            del first
            third = mib(2)
            del second, third
            mib(7)

        assert profiled(step).peak_bytes == pytest.approx(8 * MIB, rel=0.01)

    def test_what_is_freed_before_the_next_allocation_does_not_add_up(self) -> None:
        def step() -> None:
            for _ in range(20):
                mib(1)

        assert profiled(step).peak_bytes == pytest.approx(MIB, rel=0.01)

    def test_memory_from_before_the_step_is_neither_counted_nor_subtracted_when_it_is_freed(self) -> None:
        held = [mib(16)]

        def step() -> None:
            mib(4)
            held.clear()
            mib(6)

        assert profiled(step).peak_bytes == pytest.approx(6 * MIB, rel=0.01)

    def test_what_the_step_returns_is_held(self) -> None:
        result, profile = profile_step(lambda: mib(2), device=CPU, lowered=frozenset())
        assert result.numel() == 2 * MIB
        assert profile.peak_bytes == pytest.approx(2 * MIB, rel=0.01)

    def test_memory_of_the_backward_pass_counts(self) -> None:
        weight = nn.Parameter(torch.ones(256, 1024))  # 1 MiB

        def step() -> None:
            (weight * 1.0).sum().backward()  # type: ignore[no-untyped-call]

        # The product is freed before the gradient, 1 MiB, is made of an expanded scalar.
        assert MIB <= profiled(step).peak_bytes <= 2.1 * MIB

    # The tracker sees tensors; the allocator also sees what oneDNN's bf16 products lay out anew for themselves.
    @pytest.mark.parametrize(("precision", "scratch"), [("fp32", 0.0), ("bf16", 0.15)])
    @pytest.mark.parametrize("optimizer", [SGD, torch.optim.AdamW])
    def test_it_agrees_with_the_memory_tracker_of_torch(self, optimizer: Any, precision: str, scratch: float) -> None:
        tracker_module = pytest.importorskip("torch.distributed._tools.mem_tracker")
        peaks = []
        for tracked in (True, False):
            model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64))
            made = optimizer(model.parameters(), lr=0.01)
            amp = MixedPrecision(model, made, precision)
            x = torch.randn(512, 256)

            def step(amp: MixedPrecision = amp, model: nn.Module = model, x: Tensor = x) -> None:
                amp.train_step(lambda: model(x).float().square().mean())

            step()
            if tracked:
                tracker = tracker_module.MemTracker()
                tracker.track_external(model, made, x)
                with tracker:
                    step()
                peaks.append(tracker.get_tracker_snapshot("peak")[CPU]["Total"])
            else:
                peaks.append(static_memory(model=model, optimizer=made, batch=x).total + profiled(step).peak_bytes)
        assert 0.93 < peaks[1] / peaks[0] < 1.05 + scratch


class TestShares:
    def test_matrix_products_are_lowered_and_elementwise_work_is_not(self) -> None:
        a = torch.randn(384, 384)
        assert seen_best(lambda: a @ a @ a @ a, lambda profile: profile.lowered_share) > 0.9
        assert seen_best(lambda: a @ a @ a @ a, lambda profile: profile.slowest_share) > 0.9
        products = profiled(lambda: a @ a @ a @ a)
        elementwise = profiled(lambda: (a.relu() + a).exp().sum())
        assert products.slowest == "mm"
        assert elementwise.lowered_share == 0.0
        assert elementwise.cast_share == products.cast_share == 0.0

    @pytest.mark.parametrize("operation", ["convolution", "attention"])
    def test_the_backward_pass_of_a_lowered_operation_is_lowered_too(self, operation: str) -> None:
        conv = nn.Conv2d(8, 16, 3)
        x = torch.randn(8, 8, 24, 24, requires_grad=True)
        q = torch.randn(2, 4, 128, 32, requires_grad=True)

        def share() -> float:
            out = (
                conv(x)
                if operation == "convolution"
                else nn.functional.scaled_dot_product_attention(q, torch.ones_like(q), torch.ones_like(q))
            )
            grad = torch.ones_like(out)
            return profiled(lambda: torch.autograd.grad(out, x if operation == "convolution" else q, grad)).lowered_share

        assert max(share() for _ in range(5)) > 0.8

    def test_casts_show_under_autocast_alone(self) -> None:
        model = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.Linear(256, 256))
        x = torch.randn(64, 256)

        def step() -> None:
            model(x).float().sum().backward()

        def lowered() -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                step()

        assert profiled(step).cast_share == 0.0
        assert 0.0 < profiled(lowered).cast_share < 1.0

    def test_nothing_counts_twice(self) -> None:
        """`linear` calls `addmm` or `mm` in it, all of them lowered; a share above 1 would be their sum."""
        model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
        x = torch.randn(256, 512)
        assert seen_best(lambda: model(x).sum().backward(), lambda profile: profile.lowered_share) > 0.5
        profile = profiled(lambda: model(x).sum().backward())
        assert 0.0 < profile.lowered_share <= 1.0
        assert 0.0 <= profile.cast_share <= 1.0
        assert 0.0 < profile.slowest_share <= 1.0
        assert profile.lowered_share + profile.cast_share <= 1.0

    def test_operations_are_those_that_the_code_calls(self) -> None:
        a = torch.randn(64, 64)
        profile = profiled(lambda: [torch.nn.functional.linear(a, a) for _ in range(5)])
        assert profile.operations == 5
        assert profile.mean_operation_us == pytest.approx(profile.total_us / 5)

    def test_a_step_that_does_nothing_has_no_operation(self) -> None:
        profile = profiled(lambda: None)
        assert (profile.peak_bytes, profile.operations, profile.lowered_share, profile.slowest) == (0, 0, 0.0, "")

    def test_an_error_in_the_step_passes_through_and_the_profiler_can_start_again(self) -> None:
        def fails() -> None:
            raise ValueError("in the step")

        with pytest.raises(ValueError, match="in the step"):
            profiled(fails)
        assert profiled(lambda: torch.ones(2) + 1).operations > 0


SCRIPT = """
import torch
from halfstep.hardware import profile_step
for _ in range(2):
    _, seen = profile_step(lambda: torch.ones(9) + 1, device=torch.device("cpu"), lowered=frozenset())
    assert seen.operations
"""


def test_the_profiler_writes_nothing() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class TestStaticMemory:
    def test_each_part_is_weighed(self) -> None:
        model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(3, 8)).sum().backward()
        optimizer.step()
        memory = static_memory(
            model=model, optimizer=optimizer, batch=(torch.zeros(3, 8), {"y": torch.zeros(3, dtype=torch.int64)}, "name")
        )
        trainable = (8 * 4 + 4 + 4 + 4) * 4
        assert memory.parameters == trainable + 2 * 4 * 4 + 8  # running mean and variance, and the count of batches
        assert memory.optimizer == 2 * trainable + 4 * 4  # a step counter for each of four parameters
        assert memory.batch == 3 * 8 * 4 + 3 * 8
        assert memory.total == memory.parameters + memory.optimizer + memory.batch

    def test_views_of_one_storage_count_once(self) -> None:
        x = torch.zeros(100)
        memory = static_memory(model=nn.ReLU(), optimizer=SGD([torch.zeros(1)]), batch=[x, x[:50], x.reshape(10, 10), x.detach()])
        assert memory.batch == 400

    def test_tied_weights_count_once(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].weight = nn.Parameter(next(model.parameters()).detach())
        assert static_memory(model=model, optimizer=SGD(model.parameters()), batch=None).parameters == 64

    def test_a_batch_that_is_a_parameter_counts_as_a_parameter(self) -> None:
        model = nn.Linear(4, 4, bias=False)
        memory = static_memory(model=model, optimizer=SGD(model.parameters()), batch=model.weight)
        assert (memory.parameters, memory.batch) == (64, 0)

    @pytest.mark.parametrize(
        ("sparse", "expected"),
        [
            (
                torch.sparse_coo_tensor(torch.tensor([[0, 1, 1], [2, 0, 2]]), torch.ones(3), (2, 3), check_invariants=True),
                2 * 3 * 8 + 3 * 4,
            ),
            (torch.sparse_coo_tensor(torch.tensor([[1, 1], [2, 2]]), torch.ones(2), (2, 3), check_invariants=True), 2 * 2 * 8 + 2 * 4),
        ],
        ids=["coo", "coo with duplicates"],
    )
    def test_sparse_tensors_weigh_what_their_parts_weigh(self, sparse: Tensor, expected: int) -> None:
        assert static_memory(model=nn.ReLU(), optimizer=SGD([torch.zeros(1)]), batch=sparse).batch == expected

    @pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta")
    @pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc])
    def test_compressed_tensors_weigh_what_their_parts_weigh(self, layout: torch.layout) -> None:
        shape = (2, 2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else (2,)
        compressed, plain = torch.tensor([0, 1, 2]), torch.tensor([0, 1])
        size = (4, 4) if len(shape) == 3 else (2, 2)
        sparse = torch.sparse_compressed_tensor(compressed, plain, torch.ones(shape), size, layout=layout, check_invariants=True)
        expected = (3 + 2) * 8 + torch.Size(shape).numel() * 4
        assert static_memory(model=nn.ReLU(), optimizer=SGD([torch.zeros(1)]), batch=[sparse, sparse]).batch == expected

    def test_a_batch_that_is_a_slice_weighs_no_more_than_itself(self) -> None:
        model = nn.Linear(4, 4, bias=False)
        found = static_memory(model=model, optimizer=torch.optim.SGD(model.parameters()), batch=torch.zeros(1000, 4)[:8])
        assert found.batch == 8 * 4 * 4

    def test_a_batch_that_is_expanded_weighs_what_is_stored(self) -> None:
        model = nn.Linear(4, 4, bias=False)
        found = static_memory(model=model, optimizer=torch.optim.SGD(model.parameters()), batch=torch.zeros(4).expand(100, 4))
        assert found.batch == 4 * 4

    def test_an_empty_batch_weighs_nothing(self) -> None:
        assert static_memory(model=nn.ReLU(), optimizer=SGD([torch.zeros(1)]), batch=(torch.zeros(0), None)).batch == 0
