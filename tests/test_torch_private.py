"""What halfstep uses of torch's private names, and that it uses no other: a new torch that changes one of them fails here, loudly."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep import _torch
from halfstep._torch import (
    BeforeEachOperation,
    buffer_count,
    check_and_unscale_,
    copy_all_,
    cpu_features,
    dense_parts,
    finish_sharded_backward,
    foreach_multiply_,
    foreach_norms,
    has_found_infs,
    own_buffers,
    quiet_profiler,
    record_found_inf,
    steps_are_observed,
    supports_device_verdict,
    torch_device_type,
    torch_scale,
    tree_leaves,
    tree_map,
    update_scale_,
    version_of,
)

SOURCES = Path(halfstep.__file__).parent


def attribute(path: str) -> Any:
    value: Any = torch
    for name in path.split(".")[1:]:
        value = getattr(value, name)
    return value


@pytest.mark.parametrize(
    "path",
    [
        "torch.cpu._is_avx512_bf16_supported",
        "torch.cpu._is_amx_fp16_supported",
        "torch.ops.mkldnn._is_mkldnn_bf16_supported",
        "torch._amp_foreach_non_finite_check_and_unscale_",
        "torch._amp_update_scale_",
        "torch._foreach_copy_",
        "torch.Tensor._indices",
        "torch.Tensor._values",
        "torch._foreach_mul_",
        "torch._foreach_norm",
        "torch.utils._pytree.tree_map",
        "torch.utils._pytree.tree_leaves",
        "torch.utils._python_dispatch.TorchDispatchMode",
    ],
)
def test_a_private_function_is_there(path: str) -> None:
    assert callable(attribute(path))


def test_a_scaler_of_torch_holds_what_is_read_from_it() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert torch_device_type(scaler) == "cpu"
    assert torch_scale(scaler) is None
    scaler.scale(torch.ones(()))
    scale = torch_scale(scaler)
    assert scale is not None
    assert scale.item() == 8.0
    assert not has_found_infs(scaler)
    owner = object()
    record_found_inf(scaler, owner, torch.zeros(()))
    record_found_inf(scaler, owner, torch.ones(()))
    assert has_found_infs(scaler)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert not has_found_infs(scaler)


def test_an_optimizer_of_torch_tells_what_is_read_from_it() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    plain, fused = torch.optim.SGD([weight]), torch.optim.SGD([weight], fused=True)
    assert (supports_device_verdict(plain), supports_device_verdict(fused)) == (False, True)
    assert not steps_are_observed(fused)
    torch.optim.lr_scheduler.ConstantLR(fused)
    assert not steps_are_observed(fused), "a scheduler only takes note that step() was called"
    fused.register_step_post_hook(lambda *_: None)
    assert steps_are_observed(fused)


def test_a_write_in_place_is_seen_in_the_version() -> None:
    tensor = torch.ones(2)
    before = version_of(tensor)
    tensor.add_(1)
    assert version_of(tensor) > before


def test_the_scale_moves_and_gradients_are_divided_by_torchs_kernels() -> None:
    gradients = [torch.tensor([8.0]), torch.tensor([4.0])]
    found, scale, tracker = torch.zeros(()), torch.tensor(8.0), torch.zeros((), dtype=torch.int32)
    check_and_unscale_(gradients, found_inf=found, inverse_scale=torch.tensor(0.125))
    assert ([each.item() for each in gradients], found.item()) == ([1.0, 0.5], 0.0)
    check_and_unscale_([torch.tensor([float("nan")])], found_inf=found, inverse_scale=torch.ones(()))
    assert found.item() == 1.0
    update_scale_(scale, tracker, found_inf=found, growth_factor=2.0, backoff_factor=0.5, growth_interval=1)
    assert scale.item() == 4.0
    update_scale_(scale, tracker, found_inf=torch.zeros(()), growth_factor=2.0, backoff_factor=0.5, growth_interval=1)
    assert scale.item() == 8.0
    target = torch.zeros(2)
    copy_all_([target], [torch.ones(2)])
    assert target.tolist() == [1.0, 1.0]


def test_private_answers_are_booleans() -> None:
    assert type(torch._C._has_mkldnn) is bool
    assert type(torch.cpu._is_avx512_bf16_supported()) is bool
    assert type(torch.cpu._is_amx_fp16_supported()) is bool
    assert type(torch.ops.mkldnn._is_mkldnn_bf16_supported()) is bool


class Machine(NamedTuple):
    capability: str
    avx512_bf16: bool = False
    amx_fp16: bool = False
    mkldnn: bool = True
    mkldnn_bf16: bool = True


@pytest.mark.parametrize(
    ("machine", "features"),
    [
        (Machine("AVX512", avx512_bf16=True, amx_fp16=True), {"bf16", "fp16"}),
        (Machine("AVX512", avx512_bf16=True), {"bf16"}),
        (Machine("AVX512"), set()),  # oneDNN says yes to bf16, and emulates it
        (Machine("AVX2", amx_fp16=False), set()),
        (Machine("SVE256"), {"bf16"}),
        (Machine("DEFAULT", avx512_bf16=True, amx_fp16=True, mkldnn_bf16=False), set()),
        (Machine("DEFAULT", mkldnn=False), set()),
    ],
)
def test_the_features_of_a_cpu(machine: Machine, features: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Mkldnn:
        @staticmethod
        def _is_mkldnn_bf16_supported() -> bool:
            return machine.mkldnn_bf16

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: machine.capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: machine.avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_fp16_supported", lambda: machine.amx_fp16)
    monkeypatch.setattr(torch._C, "_has_mkldnn", machine.mkldnn)
    monkeypatch.setattr(torch.ops, "mkldnn", Mkldnn)
    assert cpu_features() == features


def test_the_features_of_this_cpu_agree_with_its_flags() -> None:
    info = Path("/proc/cpuinfo")
    flags = info.read_text(encoding="utf-8").split() if info.exists() else []
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX") or not flags:
        pytest.skip("not an x86 machine with Linux")
    assert ("bf16" in cpu_features()) == ("avx512_bf16" in flags)


class TestBeforeEachOperation:
    def test_it_is_called_before_each_operation_forward_and_backward(self) -> None:
        assert issubclass(BeforeEachOperation, TorchDispatchMode)
        calls: list[int] = []
        weight = torch.ones(3, requires_grad=True)
        with BeforeEachOperation(lambda: calls.append(1)):
            loss = (weight * 2).sum()
            forward = len(calls)
            loss.backward()  # type: ignore[no-untyped-call]
        assert forward == 2
        assert len(calls) > forward
        assert weight.grad is not None
        assert weight.grad.tolist() == [2.0, 2.0, 2.0]
        after = len(calls)
        torch.ones(1) + 1
        assert len(calls) == after

    def test_it_may_raise_to_stop_the_work(self) -> None:
        def stop() -> None:
            raise TimeoutError("enough")

        with pytest.raises(TimeoutError, match="enough"), BeforeEachOperation(stop):
            torch.ones(1)
        assert (torch.ones(1) + 1).item() == 2.0

    def test_keyword_arguments_arrive(self) -> None:
        with BeforeEachOperation(lambda: None):
            assert torch.ones(2, 2).sum(dim=0, keepdim=True, dtype=torch.float64).dtype is torch.float64


class TestDenseParts:
    def test_a_strided_tensor_is_its_own_part(self) -> None:
        x = torch.ones(2, 3)
        (part,) = dense_parts(x.t())
        assert part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()

    def test_a_coo_tensor_needs_not_be_coalesced(self) -> None:
        sparse = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (2,), check_invariants=True)
        assert not sparse.is_coalesced()
        assert [part.tolist() for part in dense_parts(sparse)] == [[[0, 0]], [1.0, 2.0]]

    @pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta")
    @pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc])
    def test_a_compressed_tensor_has_three(self, layout: torch.layout) -> None:
        blocks = (1, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
        parts = dense_parts(torch.eye(2).to_sparse(layout=layout, blocksize=blocks))
        assert len(parts) == 3
        assert all(part.layout is torch.strided for part in parts)

    def test_an_opaque_tensor_has_none(self) -> None:
        if not torch._C._has_mkldnn:
            pytest.skip("this torch has no oneDNN")
        assert dense_parts(torch.ones(2, 2).to_mkldnn()) == ()


class TestTrees:
    def test_nests_keep_their_shape(self) -> None:
        class Pair(NamedTuple):
            a: Any
            b: Any

        tree = {"x": [1, (2, None)], "y": Pair(3, "s")}
        assert tree_map(lambda leaf: (leaf, 0)[0], tree) == tree
        assert tree_map(lambda leaf: leaf * 2 if isinstance(leaf, int) else leaf, tree) == {"x": [2, (4, None)], "y": Pair(6, "s")}

    def test_leaves_come_in_order(self) -> None:
        assert tree_leaves({"x": [1, (2, "s")], "y": 3}) == [1, 2, "s", 3]
        assert tree_leaves("text") == ["text"]
        assert tree_leaves([]) == []


class TestQuietProfiler:
    def test_it_sets_the_variable_of_kineto(self, monkeypatch: pytest.MonkeyPatch) -> None:
        environment: dict[str, str] = {}
        monkeypatch.setattr(os, "environ", environment)
        quiet_profiler()
        assert environment == {"KINETO_LOG_LEVEL": "6"}

    def test_a_value_of_the_user_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        environment = {"KINETO_LOG_LEVEL": "0"}
        monkeypatch.setattr(os, "environ", environment)
        quiet_profiler()
        assert environment == {"KINETO_LOG_LEVEL": "0"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def dotted(node: ast.expr) -> list[str]:
    """`torch.cpu._x` as `["torch", "cpu", "_x"]`; empty where the expression does not begin with a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [*reversed([*parts, node.id])] if isinstance(node, ast.Name) else []


def torch_imports(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """The line, the full path and the name in the module of each thing that is imported from torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            within = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                path = within + alias.name
                if path.split(".")[0] == "torch":
                    yield node.lineno, path, alias.asname or (alias.name if within else "torch")


def own_names(tree: ast.Module) -> Iterator[str]:
    """What a module defines: its functions, classes and fields, and the attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted(node)[0:1] in (["self"], ["cls"]):
            yield node.attr
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


# Named tuples' documented methods, and parts of Python itself: of `sys`, documented, and of `runpy`, which `python -m` calls.
PYTHONS = frozenset({"_replace", "_asdict", "_fields", "_getframe", "_run_module_as_main", "_Error"})


def private_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The private names that a module takes from torch: attributes of what it imported from there, and the imports themselves.

    Also any private attribute that the module does not define: the object may well be a tensor, a scaler or an optimizer.
    """
    imports = list(torch_imports(tree))
    yield from ((line, path) for line, path, _ in imports if any(map(is_private, path.split("."))))
    from_torch, own = {"torch", *(name for *_, name in imports)}, set(own_names(tree)) | PYTHONS
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            names = dotted(node)
            if (names and names[0] in from_torch) or node.attr not in own:
                yield node.lineno, ".".join(names) or f"(...).{node.attr}"


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    found = [
        f"{path.relative_to(SOURCES)}:{line}: {name}"
        for path in sorted(SOURCES.rglob("*.py"))
        if path.parent != SOURCES / "_torch"
        for line, name in private_uses(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == [], "move these into halfstep/_torch, each with its reason:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch._C._has_mkldnn",
        "import torch\ntorch.cpu._is_x()",
        "import torch as t\nt.utils._pytree",
        "import torch.utils._pytree",
        "from torch.utils import _pytree",
        "from torch.utils._pytree import tree_map",
        "from torch import nn\nnn.Module._call_impl",
        "from torch import amp as a\na._x",
        "def f(scaler):\n    return scaler._scale",
        "def f(x):\n    return x.sum()._values()",
    ],
)
def test_the_search_finds_a_private_name(code: str) -> None:
    assert list(private_uses(ast.parse(code))) != []


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.nn.Module.__init__",
        "class A:\n    def _f(self):\n        self._x = 1\n        return self._x\ndef g(a):\n    return a._x + a._f()",
        "from halfstep._torch import tree_map",
        "import _thread",
    ],
)
def test_the_search_leaves_other_names_alone(code: str) -> None:
    assert list(private_uses(ast.parse(code))) == []


def test_every_private_name_is_explained() -> None:
    assert isinstance(_torch, ModuleType)
    seen = 0
    for path in Path(str(_torch.__file__)).parent.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and list(private_uses(ast.Module([node], []))):
                seen += 1
                text = ast.get_docstring(node) or ""
                assert "Private:" in text, f"{node.name} does not say which private name it uses, and why"
    assert seen > 10


class TestForeach:
    def test_norms_are_those_of_each_tensor(self) -> None:
        norms = foreach_norms([torch.tensor([3.0, 4.0]), torch.zeros(0), torch.tensor(-2.0)])
        assert [norm.item() for norm in norms] == [5.0, 0.0, 2.0]

    def test_norms_are_computed_in_a_wider_type(self) -> None:
        norms = foreach_norms([torch.tensor([3e30, 4e30]), torch.full((4,), 6e4, dtype=torch.float16)], dtype=torch.float64)
        assert [norm.dtype for norm in norms] == [torch.float64] * 2
        assert [norm.item() for norm in norms] == [pytest.approx(5e30), 120000.0]

    def test_a_factor_is_multiplied_in_place(self) -> None:
        tensors = [torch.ones(2), torch.tensor(3.0), torch.zeros(0)]
        foreach_multiply_(tensors, torch.tensor(0.5))
        assert [tensor.tolist() for tensor in tensors] == [[0.5, 0.5], 1.5, []]


class TestFinishShardedBackward:
    """That it reduces what waits is tested on several ranks, in tests/distributed/test_sync.py."""

    def test_the_names_are_there(self) -> None:
        from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 - slow to import
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, FSDPStateContext  # noqa: PLC0415

        assert callable(FSDPModule._get_fsdp_state)
        assert callable(FSDPState._root_post_backward_final_callback)
        assert FSDPState()._is_root is None
        assert FSDPState()._state_ctx.is_last_backward is True
        assert FSDPStateContext().is_last_backward is True

    @pytest.mark.parametrize("root", [True, False, None])
    def test_only_the_outermost_module_finishes(self, root: bool | None) -> None:
        last = []
        context = SimpleNamespace(is_last_backward=False)
        state = SimpleNamespace(
            _is_root=root, _state_ctx=context, _root_post_backward_final_callback=lambda: last.append(context.is_last_backward)
        )
        assert finish_sharded_backward(SimpleNamespace(_get_fsdp_state=lambda: state))
        assert last == ([True] if root else [])
        assert context.is_last_backward is False

    def test_another_torch_is_noticed(self) -> None:
        assert not finish_sharded_backward(torch.nn.Linear(1, 1))
        assert not finish_sharded_backward(SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(_is_root=True)))


def test_the_buffers_of_a_module_with_those_that_are_none() -> None:
    inner = torch.nn.BatchNorm1d(2)
    module = torch.nn.Sequential(inner)
    module.register_buffer("empty", None)
    assert {**own_buffers(module)} == {"empty": None}
    assert own_buffers(inner)["running_mean"] is inner.running_mean
    assert list(own_buffers(inner)) == [name for name, _ in inner.named_buffers()]
    assert buffer_count(module.modules()) == 4
