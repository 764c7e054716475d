"""The numbers of a step: at once on a CPU, late where they lie on a device."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from halfstep.records import StepRecord
from halfstep.watching.measures import Measures, gradient_norm, number_of, precision_of, scaled_down

pytestmark = pytest.mark.usefixtures("one_thread")

HAS_STATM = Path("/proc/self/statm").exists()


class TestNumbers:
    @pytest.mark.parametrize(
        ("tensor", "number"),
        [
            (torch.tensor(0.5), 0.5),
            (torch.tensor([[3]]), 3.0),
            (torch.tensor(True), 1.0),
            (torch.tensor(1 / 3, dtype=torch.float64), 1 / 3),
            (torch.tensor(0.1, dtype=torch.bfloat16), float(torch.tensor(0.1, dtype=torch.bfloat16))),
            (torch.tensor(torch.inf), math.inf),
            (torch.ones(2), math.nan),
            (torch.empty(0), math.nan),
            (torch.tensor(1 + 2j), math.nan),
        ],
    )
    def test_on_a_cpu_it_is_a_number(self, tensor: Tensor, number: float) -> None:
        found = number_of(tensor)
        assert type(found) is float
        assert repr(found) == repr(number)

    def test_elsewhere_it_is_a_tensor_that_nothing_writes_to(self) -> None:
        """A device that torch knows of and that has no memory stands for any."""
        assert math.isnan(number_of(torch.empty((), device="meta")))

        class Away(Tensor):
            @property
            def is_cpu(self) -> bool:  # type: ignore[override]
                return False

        written: Any = torch.tensor(2.0, requires_grad=True).as_subclass(Away)
        found = number_of(written)
        assert isinstance(found, Tensor)
        assert not found.requires_grad
        with torch.no_grad():
            written.fill_(7.0)
        assert found.item() == 2.0
        for other in (torch.ones(2), torch.tensor(1j), torch.empty(0)):
            assert math.isnan(number_of(other.as_subclass(Away)))

    @pytest.mark.parametrize(
        ("value", "scale", "result"),
        [(8.0, 4.0, 2.0), (torch.tensor(8.0), 4.0, 2.0), (8.0, torch.tensor(4.0), 2.0), (math.inf, 4.0, math.inf)],
    )
    def test_a_scale_is_taken_out(self, value: float | Tensor, scale: float | Tensor, result: float) -> None:
        assert float(scaled_down(value, scale)) == result

    def test_a_scale_of_zero_leaves_nothing_known(self) -> None:
        assert math.isnan(scaled_down(8.0, 0.0))

    @pytest.mark.parametrize(
        ("dtype", "name"),
        [(torch.float16, "fp16"), (torch.bfloat16, "bf16"), (torch.float32, "fp32"), (torch.float64, "fp32"), (None, "fp32")],
    )
    def test_precisions(self, dtype: torch.dtype | None, name: str) -> None:
        assert precision_of(dtype) == name


def with_gradients(*gradients: Tensor | None) -> list[nn.Parameter]:
    parameters = []
    for each in gradients:
        parameter = nn.Parameter(torch.zeros_like(each) if each is not None else torch.zeros(1))
        parameter.grad = each
        parameters.append(parameter)
    return parameters


class TestNorms:
    @given(
        st.lists(
            st.tuples(
                st.lists(st.floats(-1e4, 1e4, width=16), min_size=0, max_size=5),
                st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
            ),
            min_size=1,
            max_size=5,
        )
    )
    def test_it_is_that_of_a_float64_reference(self, values: list[tuple[list[float], torch.dtype]]) -> None:
        gradients = [torch.tensor(each, dtype=dtype) for each, dtype in values]
        reference = float(np.linalg.norm(np.concatenate([each.double().numpy() for each in gradients])))
        # Each tensor's norm has the precision of its type, and fp16 the range.
        loosest = max(torch.finfo(each.dtype).eps for each in gradients)
        tiny = max(float(torch.finfo(each.dtype).smallest_normal) for each in gradients)
        assert gradient_norm(with_gradients(*gradients)) == pytest.approx(reference, rel=4 * loosest, abs=tiny)

    def test_without_gradients_there_is_none(self) -> None:
        assert gradient_norm([]) is None
        assert gradient_norm(with_gradients(None, None)) is None
        assert gradient_norm(with_gradients(None, torch.tensor([3.0, 4.0]))) == 5.0

    @pytest.mark.parametrize("value", [torch.inf, torch.nan])
    def test_what_is_not_finite_shows(self, value: float) -> None:
        norm = gradient_norm(with_gradients(torch.ones(2), torch.tensor([1.0, value])))
        assert isinstance(norm, float)
        assert not math.isfinite(norm)

    def test_sparse_gradients_have_none(self) -> None:
        sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1, 2), (3, 2), check_invariants=True)
        assert gradient_norm(with_gradients(torch.ones(2), sparse)) is None


def record(measures: Measures, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": 3,
        "skipped": False,
        "scale": 128.0,
        "losses": [0.25],
        "norm": 2.0,
        "lr": 0.1,
        "seconds": 0.5,
        "memory": 4096,
        "precision": "fp16",
        "epoch": 2,
        "optimizer": "SGD",
        "scaler": "used",
    }
    made: Any = tuple({**values, **changes}.values())
    return measures.record(made)


def is_waiting(made: StepRecord) -> bool:
    try:
        object.__getattribute__(made, "loss")
    except AttributeError:
        return True
    return False


class TestRecords:
    def test_it_holds_what_it_was_given(self) -> None:
        made = record(Measures())
        expected = {"step": 3, "skipped": False, "scale": 128.0, "loss": 0.25, "grad_norm": 2.0, "lr": 0.1, "precision": "fp16"}
        assert {name: getattr(made, name) for name in expected} == expected
        assert (made.epoch, made.optimizer, made.scaler, made.step_time_s, made.memory_bytes) == (2, "SGD", "used", 0.5, 4096)
        assert not is_waiting(made)

    @pytest.mark.parametrize("losses", [[0.25, 0.5], [torch.tensor(0.25), 0.5], [torch.tensor(0.25), torch.tensor(0.5)]])
    def test_losses_are_added_up(self, losses: list[float | Tensor]) -> None:
        assert record(Measures(), losses=losses).loss == 0.75

    def test_without_a_loss_it_is_not_known(self) -> None:
        assert math.isnan(record(Measures(), losses=[]).loss)

    @pytest.mark.parametrize(
        ("name", "value", "field", "expected"),
        [
            ("skipped", torch.tensor(1.0), "skipped", True),
            ("skipped", torch.tensor(0.0), "skipped", False),
            ("scale", torch.tensor(64.0), "scale", 64.0),
            ("losses", [torch.tensor(0.5)], "loss", 0.5),
            ("norm", torch.tensor(3.0), "grad_norm", 3.0),
            ("lr", torch.tensor(0.01, dtype=torch.float64), "lr", 0.01),
        ],
    )
    def test_what_lies_on_a_device_is_read_when_it_is_asked_for(self, name: str, value: Any, field: str, expected: Any) -> None:
        made, other = record(Measures(), **{name: value}), record(Measures())
        found = getattr(made, field)
        assert (found, type(found)) == (expected, type(getattr(other, field)))
        same = [each for each in StepRecord.__dataclass_fields__ if each != field]
        assert [getattr(made, each) for each in same] == [getattr(other, each) for each in same]

    def test_the_values_of_all_records_come_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        measures, transfers, tolist = Measures(), [], Tensor.tolist

        def watched(tensor: Tensor) -> Any:
            transfers.append(tensor.numel())
            return tolist(tensor)

        monkeypatch.setattr(Tensor, "tolist", watched)
        made = [record(measures, losses=[torch.tensor(float(n))], norm=torch.tensor(float(n))) for n in range(5)]
        assert transfers == []
        assert [each.loss for each in made] == [each.grad_norm for each in made] == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert transfers == [10]


class TestMemory:
    @pytest.mark.skipif(not HAS_STATM, reason="only Linux has it")
    def test_on_a_cpu_it_is_what_the_process_holds(self) -> None:
        measures, weight = Measures(), torch.ones(1)
        found = measures.memory([weight])
        assert found == pytest.approx(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"), rel=0.2)
        measures.close()
        measures.close()
        assert measures.memory([weight]) is None

    def test_on_an_accelerator_it_is_the_allocators(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[object] = []

        def allocated(device: object) -> int:
            asked.append(device)
            return 77

        monkeypatch.setattr(torch.cuda, "max_memory_allocated", allocated)

        class OnCuda(Tensor):
            is_cuda, is_cpu, device = True, False, torch.device("cuda", 1)

        assert Measures().memory([torch.ones(1).as_subclass(OnCuda), torch.ones(1)]) == 77
        assert asked == [torch.device("cuda", 1)]

    @pytest.mark.parametrize("parameters", [[torch.empty(1, device="meta")], [], ["weight"]], ids=["another device", "none", "no tensor"])
    def test_elsewhere_it_is_not_known(self, parameters: list[object]) -> None:
        assert Measures().memory(parameters) is None

    def test_where_the_system_does_not_tell_there_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("halfstep.watching.measures._STATM", "/no/such/file")
        measures = Measures()
        assert measures.memory([torch.ones(1)]) is None
        measures.close()
