"""What halfstep uses of torch to stand between autograd and the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from halfstep._torch import (
    DispatchMode,
    Overload,
    WatchingMode,
    WeightCacheClears,
    autocast_kernel,
    insert_mode,
    is_view,
    kept_out_of_graphs,
    predict_dtypes,
    probe_autocast_kernel,
    remove_mode,
    schema_of,
)
from halfstep.errors import HalfstepError

ATEN = torch.ops.aten
FP16, FP32 = torch.float16, torch.float32


class Noting(DispatchMode):
    def __init__(self, name: str, heard: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name, self.heard = name, heard

    @kept_out_of_graphs
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(self.name)
        return func(*args, **(kwargs or {}))


class Watching(WatchingMode):
    def __init__(self, heard: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heard = heard

    @kept_out_of_graphs
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append("watching")
        return func(*args, **(kwargs or {}))


class TestModes:
    def test_a_mode_is_put_below_those_that_watch(self) -> None:
        heard: list[str] = []
        inner = Noting("inner", heard)
        x = torch.ones(1)
        with Noting("outer", heard), Watching(heard):
            insert_mode(inner, below=WatchingMode)
            x.neg()
            assert heard == ["watching", "inner", "outer"]
            remove_mode(inner)
            x.neg()
            assert heard[3:] == ["watching", "outer"]
        assert _get_current_dispatch_mode_stack() == []

    def test_and_on_top_where_none_watches(self) -> None:
        heard: list[str] = []
        inner = Noting("inner", heard)
        x = torch.ones(1)
        with Noting("outer", heard):
            insert_mode(inner, below=WatchingMode)
            x.neg()
            remove_mode(inner)
        assert heard == ["inner", "outer"]

    def test_one_that_is_not_there_is_removed_without_harm(self) -> None:
        heard: list[str] = []
        with Noting("outer", heard) as outer:
            remove_mode(Noting("other", heard))
            assert _get_current_dispatch_mode_stack() == [outer]

    def test_a_mode_is_kept_out_of_graphs_without_a_wrapper_around_each_call(self) -> None:
        assert getattr(Noting.__torch_dispatch__, "_torchdynamo_disable", False)
        assert not hasattr(Noting.__torch_dispatch__, "__wrapped__")

    def test_compiled_functions_run_eagerly_under_one(self) -> None:
        heard: list[str] = []

        def function(x: torch.Tensor) -> torch.Tensor:
            return x.neg().neg()

        compiled = torch.compile(function, backend="eager")
        x = torch.ones(1)
        compiled(x)
        with Noting("op", heard):
            compiled(x)
        assert heard == ["op", "op"]
        torch.compiler.reset()


class TestSchemas:
    def test_what_is_written_and_returned(self) -> None:
        schema = schema_of(ATEN.add_.Tensor)
        assert (schema.name, schema.is_view, schema.written, schema.returned) == ("aten::add_", False, ((0, "self"),), ("self",))
        assert schema_of(ATEN.add.out).written == ((3, "out"),)
        assert schema_of(ATEN.add.Tensor).written == ()
        assert schema_of(ATEN.add.Tensor).returned == (None,)

    def test_views(self) -> None:
        assert schema_of(ATEN.view.default).is_view
        assert schema_of(ATEN.split.Tensor).is_view
        assert schema_of(ATEN.squeeze_.default).is_view
        assert not schema_of(ATEN.clone.default).is_view

    def test_statistics_that_the_schema_does_not_mention(self) -> None:
        assert schema_of(ATEN.native_batch_norm.default).written == ((3, "running_mean"), (4, "running_var"))

    def test_lists(self) -> None:
        assert schema_of(ATEN._foreach_add_.Scalar).written == ((0, "self"),)


class TestPredictions:
    def test_dtypes_are_those_of_the_device_that_is_asked_for(self) -> None:
        x = torch.ones(2, 4, dtype=FP16)
        arguments = (x, [4], None, None, 1e-5)
        assert predict_dtypes(ATEN.native_layer_norm.default, arguments, {}, device_type="cuda") == [FP16, FP32, FP32]
        assert predict_dtypes(ATEN.native_layer_norm.default, arguments, {}, device_type="cpu") == [FP16, FP16, FP16]

    def test_lists_of_results_come_one_by_one(self) -> None:
        pair = [torch.ones(1, dtype=FP16), torch.ones(1)]
        assert predict_dtypes(ATEN._foreach_add.Scalar, (pair, 1), {}, device_type="cuda") == [FP16, FP32]

    def test_nobody_knows_what_depends_on_values(self) -> None:
        assert predict_dtypes(ATEN.nonzero.default, (torch.ones(2, dtype=FP16),), {}, device_type="cuda") is None
        assert predict_dtypes(ATEN.add.Tensor, (torch.ones(2).to_sparse(), 1), {}, device_type="cuda") is None

    def test_nothing_runs_and_no_mode_sees_it(self) -> None:
        heard: list[str] = []
        x = torch.ones(2, dtype=FP16)
        with Noting("op", heard):
            predict_dtypes(ATEN.neg_.default, (x,), {}, device_type="cuda")
        assert heard == []
        assert x.tolist() == [1, 1]


def test_clears_of_the_weight_cache_are_met_until_it_is_closed() -> None:
    heard: list[str] = []
    clears = WeightCacheClears(lambda: heard.append("cleared"))
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
            assert heard == []
        assert heard == ["cleared"]
    finally:
        clears.close()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pass
    assert heard == ["cleared"]


def test_views_are_told_from_other_tensors() -> None:
    x = torch.ones(2, requires_grad=True)
    assert is_view(x.view(2, 1))
    assert not is_view(x)


class TestProbing:
    @pytest.mark.parametrize(("name", "treatment"), [("linear", "lower"), ("mse_loss", "fp32"), ("cat", "promote"), ("conv2d", "lower")])
    def test_a_kernel_tells_what_it_does(self, name: str, treatment: str) -> None:
        overload = Overload.named(f"aten::{name}")
        kernel = autocast_kernel(overload, device_type="cpu")
        before = torch.get_autocast_dtype("cpu")
        assert probe_autocast_kernel(overload, kernel) == treatment
        assert torch.get_autocast_dtype("cpu") is before

    def test_also_under_a_dispatch_mode(self) -> None:
        overload = Overload.named("aten::linear")
        kernel = autocast_kernel(overload, device_type="cpu")

        with Noting("", []):
            assert probe_autocast_kernel(overload, kernel) == "lower"

    def test_one_that_refuses(self) -> None:
        overload = Overload.named("aten::binary_cross_entropy")
        assert probe_autocast_kernel(overload, autocast_kernel(overload, device_type="cuda")) == "banned"

    def test_one_that_does_something_else_is_an_error(self) -> None:
        overload = Overload.named("aten::relu")
        with pytest.raises(HalfstepError, match="does not call aten::relu where halfstep can see it"):
            probe_autocast_kernel(overload, lambda keyset, *args, **kwargs: None)
        with pytest.raises(HalfstepError, match="does to aten::relu cannot be found out: no"):
            probe_autocast_kernel(overload, self.fail)
        with pytest.raises(HalfstepError, match="does something to aten::relu that halfstep has no name for"):
            probe_autocast_kernel(overload, lambda keyset, x: x.to(FP32 if x.dtype is FP16 else FP16))

    @staticmethod
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no")
