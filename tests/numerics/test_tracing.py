"""A trace as it is opened, closed and read, and what it notes of operations of all kinds."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep._torch.tracing import OperationMode
from halfstep.errors import HalfstepError, HalfstepWarning, InvalidTypeError, StepOrderError
from halfstep.numerics.rounding import roundings
from halfstep.numerics.tracing import Trace, trace
from halfstep.records.trace import OpRecord, TraceRecord


def only(seen: Trace, op: str) -> OpRecord:
    (found,) = [each for each in seen.ops if each.op == f"aten.{op}"]
    return found


def count_hooks() -> int:
    module = nn.modules.module
    return len(module._global_forward_hooks) + len(module._global_forward_pre_hooks) + len(module._global_forward_hooks_always_called)


def test_an_operation_is_noted_with_dtypes_elements_and_range() -> None:
    x = torch.tensor([1.0, -3.0, 2.0], dtype=torch.float16)
    with trace() as seen:
        torch.where(x > 0, x, 0.5 * x)
    greater, scaled, chosen = seen.ops
    assert (greater.op, greater.output_dtypes, greater.elements, greater.absmax) == ("aten.gt.Scalar", ("bool",), 0, None)
    assert (scaled.op, scaled.input_dtypes, scaled.output_dtypes) == ("aten.mul.Tensor", ("float16",), ("float16",))
    assert (chosen.input_dtypes, chosen.elements, chosen.absmax) == (("bool", "float16", "float16"), 3, 2.0)
    assert all(each.seconds is not None and each.seconds >= 0 for each in seen.ops)
    assert {each.phase for each in seen.ops} == {"forward"}


def test_views_and_memory_that_nobody_has_written_to_are_not_read() -> None:
    x = torch.full((2, 2), 3.0)
    with trace() as seen:
        x.t()
        x.view(4)[1:]
        torch.empty(3).fill_(2.0)
        torch.empty_like(x)
        (x @ x).reshape(4)
    for op in ("t.default", "slice.Tensor", "empty.memory_format", "empty_like.default"):
        assert (only(seen, op).absmax, only(seen, op).elements > 0) == (None, True), op
    assert only(seen, "fill_.Scalar").absmax == 2.0
    assert only(seen, "mm.default").absmax == 18.0


def test_views_that_a_schema_does_not_tell_are_not_read_again() -> None:
    library = torch.library.Library("halfstep_tests", "DEF")  # type: ignore[no-untyped-call]
    library.define("same(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
    library.impl("same", lambda x: x.view(-1), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    rows = torch.ones(3, 4)[1:]
    with trace() as seen:
        torch.ops.halfstep_tests.same(rows * 2)
        torch.ops.aten._unsafe_view(rows, [8])  # A part of memory from outside, of which nothing is known.
    assert [each.absmax for each in seen.ops] == [2.0, None, None]


def test_what_is_written_in_place_or_by_out_is_the_result() -> None:
    x, big = torch.ones(3), torch.tensor([1.0, 5.0])
    with trace() as seen:
        x[1:].mul_(4)
        torch.add(big, big, out=torch.empty(2))
        torch._foreach_add_([x, big], 1.0)
    assert (only(seen, "mul_.Tensor").absmax, only(seen, "mul_.Tensor").elements) == (4.0, 2)
    assert only(seen, "add.out").absmax == 10.0
    together = only(seen, "_foreach_add_.Scalar")
    assert (together.absmax, together.elements, together.output_dtypes) == (6.0, 5, ("float32", "float32"))


def test_results_and_gradients_are_the_same_as_without_a_trace() -> None:
    def step(*, traced: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        optimizer = torch.optim.AdamW(model.parameters())
        seen = trace(model)
        if traced:
            seen.__enter__()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(2, 3, 8)).square().mean()
        loss.backward()
        optimizer.step()
        if traced:
            seen.__exit__(None, None, None)
        return [loss.detach(), *(parameter.detach() for parameter in model.parameters())]

    for one, other in zip(step(traced=False), step(traced=True), strict=True):
        assert torch.equal(one, other)


def recurrent(kind: Callable[..., nn.Module]) -> Callable[[], tuple[nn.Module, Tensor]]:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = kind(4, 5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.rnn(x)[0]
            return y

    return lambda: (Reader(), torch.randn(2, 3, 4))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "transformer": lambda: (nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1), torch.randn(2, 3, 8)),
    "convolutions": lambda: (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.MaxPool2d(2)), torch.randn(2, 3, 8, 8)),
    "embedding": lambda: (nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Dropout()), torch.tensor([1, 2])),
    "sparse embedding": lambda: (nn.Embedding(9, 4, sparse=True), torch.tensor([1, 2, 1])),
    "lstm": recurrent(nn.LSTM),
    "gru": recurrent(nn.GRU),
    "rnn": recurrent(nn.RNN),
}


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_all_kinds_are_traced_with_a_module_for_each_of_their_operations(name: str, autocast: bool) -> None:
    model, x = MODELS[name]()
    with trace(model) as seen, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = model(x)
        y.sum().backward()
    inside = Counter(each.phase for each in seen.ops if each.site.module != "unknown")
    assert inside["forward"] > 0
    assert inside["backward"] > 0
    paths = {name for name, _ in model.named_modules()}
    assert {each.site.module for each in seen.ops} <= paths | {"unknown"}
    # Outside of the model: the sum, the gradient that it begins with, and what both are made of.
    assert sum(each.site.module == "unknown" for each in seen.ops) <= 12
    assert seen.origin is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_is_traced(mode: Callable[[], torch.no_grad]) -> None:
    model = nn.MultiheadAttention(8, 2).eval()
    x = torch.randn(3, 2, 8)
    with trace(model) as seen, mode():
        model(x, x, x)[0].mul_(2)
    assert [each.absmax is not None for each in seen.ops if each.op == "aten.mul_.Tensor"] == [True]


def test_attention_reports_its_result_and_not_what_its_backward_pass_needs() -> None:
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    with trace() as seen:
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()  # type: ignore[no-untyped-call]
    (attention,) = [each for each in seen.ops if "dot_product" in each.op and each.phase == "forward"]
    assert attention.output_dtypes == ("float32", "float32")
    assert seen.origin is None
    with trace() as seen:
        F.scaled_dot_product_attention(10 * q.abs(), 10 * q.abs(), torch.full_like(q, 0.5))
    (attention,) = [each for each in seen.ops if "dot_product" in each.op]
    assert attention.absmax == pytest.approx(0.5)  # The logarithms of sums of exponentials are much larger.


def test_the_running_statistics_of_a_batch_norm_are_read_again_after_it_wrote_them() -> None:
    norm = nn.BatchNorm1d(2)
    with trace(norm) as seen:
        norm(torch.ones(3, 2))
        norm(torch.tensor([[torch.inf, 1.0], [1.0, 1.0]]))
        assert norm.running_var is not None
        norm.running_var * 1
    assert only(seen, "mul.Tensor").has_nonfinite_input


def test_operations_are_counted_by_name_and_dtype() -> None:
    x = torch.ones(2)
    with trace() as seen:
        x.half() * 2
        x * 2
        x * 2
        float(x[0])
    assert seen.by_op() == {
        "aten._to_copy.default": {"float16": 1},
        "aten.mul.Tensor": {"float16": 1, "float32": 2},
        "aten.select.int": {"float32": 1},
        "aten._local_scalar_dense.default": {"none": 1},
    }


def test_modules_are_summed_by_themselves_and_by_dtype() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
    nn.init.constant_(model.get_parameter("0.weight"), 100.0)
    batch = torch.tensor([[1e-8, 4.0], [300.0, 400.0]])
    with trace(model) as seen, torch.autocast("cpu", dtype=torch.float16):
        model(batch)
    ranges = {(each.module, each.dtype): each for each in seen.by_module()}
    assert set(ranges) == {("0", "float16"), ("1", "float16")}
    linear = ranges["0", "float16"]
    assert linear.absmax == 400.0  # The second row overflows, and with it the largest finite number is not known.
    assert (linear.nonfinite, linear.flushed) == (2, 1)
    assert linear.headroom == pytest.approx(7.3555, abs=1e-3)
    assert ranges["1", "float16"].absmax is None
    assert ranges["1", "float16"].headroom is None


def test_the_record_comes_back_from_json() -> None:
    with trace() as seen:
        (torch.tensor([1.0, torch.inf]).requires_grad_() * 2).sum().backward()  # type: ignore[no-untyped-call]
    assert TraceRecord.from_json(seen.to_json()) == seen.record
    assert "\n" in seen.to_json(indent=1)
    assert (seen.record.schema, seen.record.torch, seen.record.target) == (1, torch.__version__, "")
    assert seen.record.ops is seen.ops


def test_a_trace_is_read_after_it_was_closed() -> None:
    seen = trace()
    readings: list[Callable[[], object]] = [lambda: seen.ops, lambda: seen.origin, seen.by_op, seen.by_module, seen.to_json]
    for read in readings:
        with pytest.raises(StepOrderError, match="was not opened"):
            read()
    with seen:
        for read in readings:
            with pytest.raises(StepOrderError, match="is still open"):
                read()
    assert seen.ops == ()


def test_a_trace_is_good_for_one_use_and_not_within_another() -> None:
    seen = trace()
    with seen:
        with pytest.raises(StepOrderError, match="was opened before"):
            seen.__enter__()
        with pytest.raises(StepOrderError, match="open in this thread already"), trace():
            pass
        torch.ones(1) * 2
    assert len(seen.ops) == 2
    with pytest.raises(StepOrderError, match="good for one use"), seen:
        pass
    with pytest.raises(StepOrderError, match="not open"):
        seen.__exit__(None, None, None)


def test_a_model_is_a_module() -> None:
    with pytest.raises(InvalidTypeError, match=r"trace\(model=...\) was given 'type'; it takes a torch.nn.Module"):
        trace(nn.Linear)  # type: ignore[arg-type]


def test_everything_is_put_back_after_an_exception_and_what_ran_is_known() -> None:
    before = count_hooks()
    seen = trace()
    with pytest.raises(ValueError, match="stop"), seen:  # noqa: PT012 - what ran before it counts
        assert roundings.watched
        assert count_hooks() > before
        torch.ones(1).exp()
        raise ValueError("stop")
    assert (count_hooks(), roundings.watched) == (before, False)
    torch.ones(1).exp()
    assert [each.op for each in seen.ops] == ["aten.ones.default", "aten.exp.default"]
    with trace() as another:
        torch.ones(1)
    assert len(another.ops) == 1


def test_an_operation_that_raises_is_left_out_and_the_next_one_is_seen() -> None:
    with trace() as seen:
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.ones(2, 3) @ torch.ones(2, 3)
        torch.ones(2).exp()
    assert [each.op for each in seen.ops][-1] == "aten.exp.default"
    assert not any("mm" in each.op for each in seen.ops)


def test_a_closed_trace_holds_neither_modules_nor_tensors() -> None:
    alive: list[bool] = []

    class Watched(nn.Linear):
        def __del__(self) -> None:
            alive.append(False)

    model = Watched(2, 2)
    with trace(model) as seen:
        model(torch.ones(1, 2)).sum().backward()
    del model
    assert alive == [False]
    assert len(seen.ops) > 0


def test_two_threads_have_their_own_traces() -> None:
    barrier = threading.Barrier(2)
    names: dict[int, set[str]] = {}

    def work(place: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh() if place else nn.Sigmoid())
        barrier.wait()
        with trace(model) as seen:
            barrier.wait()
            model(torch.ones(1, 2)).sum().backward()
            barrier.wait()
        names[place] = {f"{each.op}@{each.site.module}" for each in seen.ops if each.op in ("aten.tanh.default", "aten.sigmoid.default")}

    threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert names == {0: {"aten.sigmoid.default@1"}, 1: {"aten.tanh.default@1"}}


def test_another_thread_is_not_seen() -> None:
    with trace() as seen:
        other = threading.Thread(target=lambda: torch.ones(3).exp())
        other.start()
        other.join()
    assert seen.ops == ()


def test_modes_below_do_not_see_what_the_trace_computes() -> None:
    met: list[str] = []

    class Below(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            met.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.tensor([1.0, torch.inf])
    with Below(), trace() as seen:  # type: ignore[no-untyped-call]
        x.half()
    assert met == ["aten._to_copy.default"] == [each.op for each in seen.ops]


def test_what_a_rehearsal_rounds_is_measured_before_and_after() -> None:
    class Rehearsal(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            wide = func(*(each.float() for each in args))
            half = wide.half()
            assert roundings.watched
            roundings.last = ((wide, half),)
            return half

    x = torch.tensor([300.0, 1e-4, 0.0], dtype=torch.float16)
    roundings.target = "cuda"
    try:
        with Rehearsal(), trace() as seen:  # type: ignore[no-untyped-call]
            torch.mul(x, x)
    finally:
        roundings.target = ""
    (op,) = seen.ops
    assert (op.absmax, op.nonfinite, op.flushed) == (torch.inf, 1, 1)
    assert op.exact_absmax == pytest.approx(90000.0)
    assert seen.record.target == "cuda"
    assert roundings.last == ()


def test_a_compiled_model_is_traced_eagerly_with_a_warning() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.compile(backend="eager")
    with pytest.warns(HalfstepWarning, match="runs it eagerly"), trace(model) as seen:
        model(torch.ones(1, 2)).sum().backward()
    assert {each.site.module for each in seen.ops if each.op in ("aten.addmm.default", "aten.relu.default")} == {"0", "1"}
    with torch.compiler.set_stance("force_eager"), trace(nn.Sequential(model)):
        pass


def test_compiling_inside_of_a_trace_is_refused() -> None:
    with trace(), pytest.raises(HalfstepError, match="being compiled inside of a trace"):
        torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))


def test_tensors_of_other_kinds_do_no_harm() -> None:
    x = torch.randn(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # That this layout is a prototype.
        ragged = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(1, 3)])
    with trace() as seen:
        ragged * 2
        torch.fft.rfft(x)
        torch.linalg.svd(x)
        x.to_sparse().to_dense()
        x.to(torch.float8_e4m3fn).float()
        torch.ones(3, device="meta") * 2
        torch.view_as_complex(torch.randn(3, 2)).conj() * 2
        torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(1, 3)], layout=torch.jagged) * 2
        torch.func.vmap(torch.func.grad(lambda row: row.square().sum()))(x)
    assert len(seen.ops) > 15
    assert all(each.nonfinite == 0 for each in seen.ops)


def test_the_mode_can_be_told_from_others() -> None:
    assert issubclass(OperationMode, TorchDispatchMode)
