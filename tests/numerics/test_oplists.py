from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from halfstep.errors import HalfstepError
from halfstep.numerics import lowered_ops
from halfstep.numerics.oplists import _CPU_ONLY, _CUDA_ONLY

HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"


@pytest.fixture
def fresh() -> Iterator[None]:
    lowered_ops.cache_clear()
    yield
    lowered_ops.cache_clear()


def registered(key: str) -> set[str]:
    """The names, without overload, of the aten operations with a kernel of their own for a dispatch key."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return {name.removeprefix("aten::").partition(".")[0] for name in names if has(name, key)}


@pytest.mark.parametrize("name", ["linear", "conv2d", "conv1d", "conv_transpose2d", "matmul", "bmm", "mm", "addmm", "baddbmm", "prelu"])
def test_products_are_lowered(name: str) -> None:
    assert name in lowered_ops()


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "batch_norm", "add", "exp", "sum", "mse_loss", "deprecated", "input", "_"])
def test_other_operations_are_not(name: str) -> None:
    assert name not in lowered_ops()


def test_every_name_is_an_operation_of_aten() -> None:
    assert [name for name in sorted(lowered_ops()) if not hasattr(torch.ops.aten, name)] == []


def test_the_header_is_read_to_its_end() -> None:
    """The names, counted another way than the parser does: line by line until one that does not continue."""
    lines = HEADER.read_text(encoding="utf-8").splitlines()
    start = lines.index(next(line for line in lines if line.startswith("#define AT_FORALL_LOWER_PRECISION_FP(")))
    names = []
    for line in lines[start + 1 :]:
        found = re.search(r"_\((\w+)", line)
        assert found is not None
        names.append(found.group(1))
        if not line.rstrip().endswith("\\"):
            break
    assert len(names) > 20
    assert lowered_ops() == set(names) | _CPU_ONLY | _CUDA_ONLY


def test_the_dispatcher_has_a_cuda_kernel_for_each_name_of_the_header() -> None:
    assert lowered_ops() - _CPU_ONLY - {"_cudnn_rnn"} <= registered("AutocastCUDA")  # cuDNN's RNN comes with CUDA builds alone


def test_the_dispatcher_has_a_cpu_kernel_for_what_the_header_lacks() -> None:
    assert registered("AutocastCPU") >= _CPU_ONLY
    assert not _CPU_ONLY & registered("AutocastCUDA")


@pytest.mark.parametrize("name", sorted(_CPU_ONLY - {"mkldnn_rnn_layer"}))
def test_what_cpu_autocast_adds_is_lowered(name: str) -> None:
    a = torch.ones(4, 4)
    x = torch.ones(1, 2, 4)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        if name == "_addmm_activation":
            out = torch.ops.aten._addmm_activation(a[0], a, a)
        else:
            out = torch.ops.aten._native_multi_head_attention(x, x, x, 4, 1, torch.ones(12, 4), torch.ones(12), a, a[0])[0]
    assert out.dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["trace", "linalg_svdvals", "nanquantile", "cat", "stack"])
def test_other_operations_that_cpu_autocast_registers_are_not_lowered(name: str) -> None:
    """It casts them to fp32, or to the widest type among their arguments."""
    a = torch.ones(4, 4)
    arguments = {"nanquantile": (a, 0.5), "cat": ([a, a],), "stack": ([a, a],)}.get(name, (a,))
    assert name in registered("AutocastCPU") - lowered_ops()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert getattr(torch.ops.aten, name)(*arguments).dtype is torch.float32


@pytest.mark.usefixtures("fresh")
def test_the_header_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = lowered_ops()
    monkeypatch.setattr(torch, "__file__", "/nowhere/__init__.py")
    assert lowered_ops() is first


@pytest.mark.usefixtures("fresh")
def test_a_torch_without_the_header_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(
        HalfstepError, match=r"torch .* comes without include/ATen/autocast_mode\.h, which lists the operations of autocast"
    ):
        lowered_ops()


@pytest.mark.usefixtures("fresh")
def test_a_header_without_the_macro_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = tmp_path / "include/ATen/autocast_mode.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define AT_FORALL_FP32(_) \\\n  _(acos)\n\n", encoding="utf-8")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(HalfstepError, match=r"autocast_mode\.h of torch .* has no macro AT_FORALL_LOWER_PRECISION_FP"):
        lowered_ops()


@pytest.mark.usefixtures("fresh")
def test_a_macro_that_lists_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = tmp_path / "include/ATen/autocast_mode.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define AT_FORALL_LOWER_PRECISION_FP(_) OTHER(_)\n\n", encoding="utf-8")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(HalfstepError, match=r"macro AT_FORALL_LOWER_PRECISION_FP .* lists nothing"):
        lowered_ops()
