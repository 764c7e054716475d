from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from halfstep.errors import ConfigurationError, HalfstepError
from halfstep.numerics import TARGETS, list_treatments, lowered_ops, treatment_of
from halfstep.numerics.oplists import _CPU_ONLY, _CUDA_ONLY, dtype_setters

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


def overloads(key: str) -> set[str]:
    """The overloads of aten with a kernel of their own for a dispatch key."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::") and has(name, key)}


class TestTreatments:
    @pytest.mark.parametrize("target", TARGETS)
    def test_what_is_listed_is_what_the_dispatcher_says_is_registered(self, target: str) -> None:
        """A new torch that lists an operation elsewhere, or in another way, fails here."""
        listed = set(list_treatments(target))
        if target == "cuda":
            listed -= {"_cudnn_rnn"}  # It comes with CUDA builds alone.
        assert listed == overloads(f"Autocast{target.upper()}") - {"_cudnn_rnn"}
        assert len(listed) > 100

    def test_every_name_is_an_overload_of_aten(self) -> None:
        names = {name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names()}
        assert [name for target in TARGETS for name in list_treatments(target) if name not in names | {"_cudnn_rnn"}] == []

    @pytest.mark.parametrize(
        ("name", "cuda", "cpu"),
        [
            ("linear", "lower", "lower"),
            ("softmax.int", "fp32", "as_is"),
            ("layer_norm", "fp32", "as_is"),
            ("norm.ScalarOpt_dim", "fp32", "as_is"),
            ("mse_loss", "fp32", "fp32"),
            ("addcmul", "promote", "as_is"),
            ("cat", "as_is", "promote"),
            ("grid_sampler", "promote", "fp32"),
            ("avg_pool3d", "as_is", "fp32"),
            ("binary_cross_entropy", "banned", "fp32"),
            ("relu", "as_is", "as_is"),
        ],
    )
    def test_what_is_known_of_some(self, name: str, cuda: str, cpu: str) -> None:
        assert (treatment_of(name), treatment_of(name, target="cpu")) == (cuda, cpu)

    def test_the_kernels_of_the_cpu_do_what_was_found_out(self) -> None:
        """Told by the dtypes of results, of operations that are handed real arguments."""
        half, full = torch.ones(4, 4, dtype=torch.bfloat16), torch.ones(4, 4)
        calls = {"mm": (half, full), "mse_loss": (half, half), "cat": ([half, full],), "trace": (half,)}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for name, arguments in calls.items():
                expected = {"lower": torch.bfloat16, "fp32": torch.float32, "promote": torch.float32}
                assert getattr(torch.ops.aten, name)(*arguments).dtype is expected[treatment_of(name, target="cpu")]

    def test_what_all_lower_is_in_the_names_of_what_is_lowered(self) -> None:
        for target in TARGETS:
            lowered = {name.partition(".")[0] for name, treatment in list_treatments(target).items() if treatment == "lower"}
            assert lowered <= lowered_ops()

    def test_those_that_are_told_a_dtype_have_an_argument_for_it(self) -> None:
        assert "softmax.int" in dtype_setters()
        for name in dtype_setters():
            operation, _, overload = name.partition(".")
            schema = getattr(getattr(torch.ops.aten, operation), overload or "default")._schema
            assert [argument.name for argument in schema.arguments if argument.name == "dtype"] == ["dtype"]

    @pytest.mark.parametrize("spelling", ["softmax.int", "aten::softmax.int", "aten.softmax.int"])
    def test_names_are_taken_in_every_spelling(self, spelling: str) -> None:
        assert treatment_of(spelling) == "fp32"
        assert treatment_of("aten.linear.default") == "lower"

    def test_an_operation_that_does_not_exist_is_an_error(self) -> None:
        with pytest.raises(ConfigurationError, match=r"has no operation aten::sofmax\. Did you mean '_softmax' or 'softmax'"):
            treatment_of("sofmax")

    def test_a_target_without_lists_is_an_error(self) -> None:
        with pytest.raises(ConfigurationError, match="known for cuda, cpu, xpu, mtia and maia, not for 'mps'"):
            list_treatments("mps")

    def test_nobody_can_change_them(self) -> None:
        with pytest.raises(TypeError):
            list_treatments("cuda")["linear"] = "fp32"  # type: ignore[index]
