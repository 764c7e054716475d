"""The private names of torch that watching a loop stands on: each test fails loudly when a new torch changes one."""

# `Tensor.backward` has no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
import torch.optim.optimizer as module
from torch import Tensor, nn
from torch.utils.data import DataLoader

from halfstep._torch.watching import (
    CLIPPING,
    NORMS,
    hook_all_steps,
    is_given_enabled,
    loader_iterators,
    override_region,
    region_dtype,
    region_is_enabled,
    region_keeps_casts,
    saved_factors,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def weight(*values: float) -> nn.Parameter:
    made = nn.Parameter(torch.tensor(values))
    made.grad = made.detach().clone()
    return made


class TestClipping:
    @pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad.clip_grad_norm_])
    @pytest.mark.parametrize("foreach", [None, True, False])
    def test_it_passes_through_both_functions(self, clip: Any, foreach: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[tuple[str, Any]] = []
        for name, (owner, function) in {"clip": CLIPPING, "norm": NORMS}.items():
            original = getattr(owner, function)

            def seen(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
                calls.append((name, (*args, *kwargs.values())))
                return original(*args, **kwargs)

            monkeypatch.setattr(owner, function, seen)
        parameters = [weight(3.0), weight(4.0)]
        total = clip(parameters, 2.5, norm_type=2.0, foreach=foreach)
        (norm, of), (cut, (given, limit, found, *_)) = calls
        assert (norm, cut) == ("norm", "clip")
        assert [each.item() for each in of[0]] == pytest.approx([1.5, 2.0], rel=1e-5)  # The gradients, which were clipped since.
        assert of[1] == 2.0
        assert [id(each) for each in given] == [id(each) for each in parameters]
        assert (limit, float(found), float(total)) == (2.5, 5.0, 5.0)

    def test_their_parameters_are_called_so(self) -> None:
        assert [*inspect.signature(getattr(*CLIPPING)).parameters][:3] == ["parameters", "max_norm", "total_norm"]
        assert [*inspect.signature(getattr(*NORMS)).parameters][:2] == ["tensors", "norm_type"]

    def test_one_tensor_or_an_iterator_may_be_clipped(self) -> None:
        clip = getattr(*CLIPPING)
        single = weight(8.0)
        clip(single, 2.0, torch.tensor(8.0))
        several = [weight(8.0), weight(4.0)]
        clip(several, 2.0, torch.tensor(8.0))
        gradients: list[Any] = [single.grad, *(each.grad for each in several)]
        assert [each.item() for each in gradients] == pytest.approx([2.0, 2.0, 1.0], rel=1e-4)


class TestRegions:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None])
    @pytest.mark.parametrize("enabled", [True, False])
    @pytest.mark.parametrize("cache", [True, False, None])
    def test_what_a_region_holds_is_what_it_was_given(self, dtype: torch.dtype | None, enabled: bool, cache: bool | None) -> None:
        region = torch.autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=cache)
        assert region.device == "cpu"
        assert region_dtype(region) is (dtype or torch.get_autocast_dtype("cpu"))
        assert region_is_enabled(region) is enabled
        assert region_keeps_casts(region) is (cache is not False)

    def test_a_region_for_a_device_that_is_not_there_is_switched_off(self) -> None:
        if torch.cuda.is_available():
            pytest.skip("there is one")
        with pytest.warns(UserWarning, match="CUDA is not available"):
            region = torch.autocast("cuda", dtype=torch.float16)
        assert not region_is_enabled(region)

    @pytest.mark.parametrize(("dtype", "computed"), [(torch.bfloat16, torch.bfloat16), (None, torch.float32)])
    def test_a_region_computes_in_what_it_is_told_to(self, dtype: torch.dtype | None, computed: torch.dtype) -> None:
        region = torch.autocast("cpu", dtype=torch.float16)
        x = torch.ones(2, 2)
        put_back = override_region(region, dtype)
        with region:
            put_back()
            assert (x @ x).dtype is computed
        assert (region_dtype(region), region_is_enabled(region)) == (torch.float16, True)
        with region:
            assert (x @ x).dtype is torch.float16

    def test_arguments_stand_where_they_are_looked_for(self) -> None:
        assert [*inspect.signature(torch.autocast.__init__).parameters] == ["self", "device_type", "dtype", "enabled", "cache_enabled"]
        assert is_given_enabled(("cpu",), {})
        assert is_given_enabled(("cpu", torch.float16, True), {})
        assert not is_given_enabled(("cpu", torch.float16, False), {})
        assert not is_given_enabled(("cpu",), {"enabled": False})

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_the_classes_of_old_are_subclasses_that_pass_through_its_methods(self, device: str) -> None:
        kind: Any = getattr(torch, device).amp.autocast
        assert issubclass(kind, torch.autocast)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            region: Any = kind()
        assert region.device == device
        for name in ("__enter__", "__exit__", "__call__"):
            assert "super()" in inspect.getsource(vars(kind)[name])


class TestLoaders:
    @pytest.mark.parametrize("name", ["_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"])
    def test_all_batches_come_from_the_next_of_one_class(self, name: str) -> None:
        kind = getattr(torch.utils.data.dataloader, name)
        assert issubclass(kind, loader_iterators())
        assert "__next__" not in vars(kind)
        assert "__next__" in vars(loader_iterators())

    def test_a_loader_makes_one(self) -> None:
        loader: DataLoader[int] = DataLoader([1, 2])  # type: ignore[arg-type]
        iterator = iter(loader)
        assert isinstance(iterator, loader_iterators())
        assert "__iter__" in vars(DataLoader)


class TestFactors:
    def test_a_product_keeps_its_factors(self) -> None:
        x, scale = torch.ones((), requires_grad=True), torch.tensor(4.0)
        product: Any = (x * 1.0) * scale
        assert [each.data_ptr() for each in saved_factors(product.grad_fn)] == [scale.data_ptr()]
        assert product.grad_fn.name() == "MulBackward0"
        both: Any = (x * 1.0) * (x * 2.0)
        assert len(saved_factors(both.grad_fn)) == 2

    def test_what_is_freed_is_passed_over(self) -> None:
        x = torch.ones((), requires_grad=True)
        product: Any = (x * 1.0) * (x * 2.0)
        product.backward()
        assert saved_factors(product.grad_fn) == []

    def test_other_nodes_have_none(self) -> None:
        total: Any = torch.ones(2, requires_grad=True).sum()
        assert saved_factors(total.grad_fn) == []

    def test_the_node_of_a_cast_is_called_so(self) -> None:
        cast: Any = torch.ones(2, requires_grad=True).half()
        assert cast.grad_fn.name() == "ToCopyBackward0"

    def test_a_node_keeps_what_is_noted_in_it_as_long_as_its_graph_lives(self) -> None:
        x = torch.ones((), requires_grad=True)
        inner = x * 2
        node: Any = inner.grad_fn
        node.metadata["scaled"] = 1
        outer: Any = inner / 3
        del inner, node
        found = outer.grad_fn.next_functions[0][0]
        assert found.metadata == {"scaled": 1}


class TestHooks:
    @pytest.mark.parametrize("kind", ["SGD", "AdamW", "LBFGS", "fused"])
    def test_they_are_called_around_each_step_of_each_optimizer(self, kind: str) -> None:
        parameter = weight(1.0)
        made: Any = torch.optim.AdamW([parameter], fused=True) if kind == "fused" else getattr(torch.optim, kind)([parameter])
        seen: list[tuple[str, Any]] = []
        hooks = hook_all_steps(
            lambda optimizer, *_: seen.append(("before", optimizer)), lambda optimizer, *_: seen.append(("after", optimizer))
        )
        try:
            made.step(lambda: parameter.detach().sum())
        finally:
            for hook in hooks:
                hook.remove()
        assert seen == [("before", made), ("after", made)]
        made.step(lambda: parameter.detach().sum())
        assert len(seen) == 2
        assert not module._global_optimizer_pre_hooks
        assert not module._global_optimizer_post_hooks

    def test_a_scaler_gives_a_fused_optimizer_what_the_host_is_not_to_wait_for(self) -> None:
        parameter = weight(8.0)
        optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        seen: list[tuple[Tensor, Tensor]] = []

        def before(optimizer: Any, *_: Any) -> None:
            seen.append((optimizer.grad_scale.clone(), optimizer.found_inf.clone()))

        hooks = hook_all_steps(before, lambda *_: None)
        try:
            scaler.step(optimizer)
        finally:
            for hook in hooks:
                hook.remove()
        assert [(scale.item(), found.item()) for scale, found in seen] == [(4.0, 0.0)]
        assert parameter.item() == 6.0
        assert not hasattr(optimizer, "grad_scale")
        assert not hasattr(optimizer, "found_inf")


def test_python_leaves_out_frames_of_such_files_when_it_names_the_line_of_a_warning() -> None:
    names: dict[str, Any] = {"warnings": warnings}
    source = "def give(level): warnings.warn('late', UserWarning, stacklevel=level)\ndef between(function, *given): function(*given)"
    exec(compile(source, "library.py", "exec"), names)
    unseen = names["between"]
    unseen.__code__ = unseen.__code__.replace(co_filename="/somewhere/importlib._bootstrap.py")
    with pytest.warns(UserWarning, match="late") as seen:
        unseen(names["give"], 2)
    assert seen[0].filename == __file__
