"""The traces of a function against what happens when it runs."""

from __future__ import annotations

import ast
import textwrap
from contextlib import nullcontext
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfstep.lint.flow import Kind
from halfstep.lint.module import parse_module

_SHORT = {
    Kind.SCALED_BACKWARD: "backward",
    Kind.UNSCALE: "unscale",
    Kind.STEP: "step",
    Kind.UPDATE: "update",
    Kind.ZERO_GRAD: "zero",
}


class _Recorder:
    """A scaler, an optimizer and a loss that note what is done with them."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def scale(self, loss: object) -> _Recorder:
        return self

    def backward(self) -> None:
        self.seen.append("backward")

    def unscale_(self, optimizer: object) -> None:
        self.seen.append("unscale")

    def step(self, optimizer: object) -> None:
        self.seen.append("step")

    def update(self) -> None:
        self.seen.append("update")

    def zero_grad(self) -> None:
        self.seen.append("zero")


_CALLS = (
    "scaler.scale(loss).backward()",
    "scaler.unscale_(optimizer)",
    "scaler.step(optimizer)",
    "scaler.update()",
    "optimizer.zero_grad()",
)
_FLAGS = ("first", "second", "third")


def _simple_tests() -> st.SearchStrategy[str]:
    flag = st.sampled_from(_FLAGS)
    return st.one_of(
        flag,
        flag.map(lambda name: f"not {name}"),
        flag.map(lambda name: f"{name} is None"),
        flag.map(lambda name: f"{name} is not None"),
    )


def _tests() -> st.SearchStrategy[str]:
    flag = st.sampled_from(_FLAGS)
    return _simple_tests() | st.tuples(flag, st.sampled_from(("and", "or")), flag).map(" ".join)


def _indented(blocks: list[str]) -> str:
    return textwrap.indent("\n".join(blocks) or "pass", "    ")


def _blocks(tests: st.SearchStrategy[str]) -> st.SearchStrategy[list[str]]:
    simple = st.sampled_from(_CALLS)

    def nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        body = st.lists(inner, min_size=1, max_size=3).map(_indented)
        return st.one_of(
            st.tuples(tests, body).map(lambda parts: f"if {parts[0]}:\n{parts[1]}"),
            st.tuples(tests, body, body).map(lambda parts: f"if {parts[0]}:\n{parts[1]}\nelse:\n{parts[2]}"),
            body.map(lambda text: f"for x in range(2):\n{text}"),
            st.tuples(tests, body).map(lambda parts: f"for x in range(2):\n    if {parts[0]}:\n        continue\n{parts[1]}"),
            st.tuples(tests, body).map(lambda parts: f"for x in range(2):\n{parts[1]}\n    if {parts[0]}:\n        break"),
            st.tuples(body, body).map(lambda parts: f"try:\n{parts[0]}\nfinally:\n{parts[1]}"),
            body.map(lambda text: f"with held():\n{text}"),
            tests.map(lambda test: f"if {test}:\n    return"),
        )

    return st.lists(st.recursive(simple, nested, max_leaves=6), min_size=1, max_size=4)


def _run(text: str, flags: tuple[object, ...]) -> tuple[str, ...]:
    recorder = _Recorder()

    class Optimizer:
        zero_grad = recorder.zero_grad

    names: dict[str, object] = {"held": nullcontext}
    exec(compile(text, "<generated>", "exec"), names)
    function = names["train"]
    assert callable(function)
    function(recorder, Optimizer(), "loss", *flags)
    return tuple(recorder.seen)


def _traced(text: str) -> set[tuple[str, ...]]:
    found = set()
    for trace in parse_module(text).traces:
        found.add(tuple(_SHORT[event.kind] for event in trace.events if event.kind in _SHORT))
    return found


# None and True: what is not None is taken for true, as people do with a scaler that may be missing.
_ANSWERS = (None, True)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(blocks=_blocks(_tests()))
def test_whatever_a_run_does_is_a_trace(blocks: list[str]) -> None:
    text = "def train(scaler, optimizer, loss, first, second, third):\n" + _indented(["scaler.scale(loss).backward()", *blocks])
    runs = {_run(text, flags) for flags in product(_ANSWERS, repeat=3)}
    traces = _traced(text)
    if len(traces) < 90:  # Beyond, an even choice is kept.
        assert runs <= traces, text


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(blocks=_blocks(_simple_tests()))
def test_without_loops_nothing_else_is_a_trace(blocks: list[str]) -> None:
    text = "def train(scaler, optimizer, loss, first, second, third):\n" + _indented(["scaler.scale(loss).backward()", *blocks])
    # With loops it is not so: `break` behind a condition may be met in the second iteration only.
    if any(isinstance(node, ast.For) for node in ast.walk(ast.parse(text))):
        text = text.replace("for x in range(2):", "if first:").replace("continue", "pass").replace("break", "pass")
    runs = {_run(text, flags) for flags in product(_ANSWERS, repeat=3)}
    assert _traced(text) == runs, text


def _kinds(text: str) -> list[list[str]]:
    return [[event.kind.value for event in trace.events] for trace in parse_module(textwrap.dedent(text)).traces]


def test_methods_of_the_file_are_followed() -> None:
    kinds = _kinds("""
        import torch
        class Trainer:
            def __init__(self):
                self.scaler = torch.amp.GradScaler("cuda")
            def train(self, loss):
                self.scaler.scale(loss).backward()
                self.finish(self.optimizer)
            def finish(self, optimizer):
                self.scaler.step(optimizer)
                self.scaler.update()
    """)
    assert kinds == [["scaled backward", "step", "update"]]


def test_a_function_with_a_scaler_of_its_own_is_gone_through_once() -> None:
    kinds = _kinds("""
        import torch
        def run(loss, optimizer):
            scaler = torch.amp.GradScaler("cuda")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        run(1, 2)
        run(3, 4)
    """)
    assert kinds == [["scaled backward", "step"]]


def test_recursion_ends() -> None:
    kinds = _kinds("""
        def walk(scaler, loss, n):
            scaler.scale(loss).backward()
            if n:
                walk(scaler, loss, n - 1)
        walk(a, b, 3)
    """)
    assert kinds == [["scaled backward"]]


def test_equal_tests_are_answered_alike_until_their_names_change() -> None:
    alike = _kinds("""
        def f(scaler, loss, amp):
            if amp:
                scaler.scale(loss).backward()
            if amp:
                scaler.update()
    """)
    assert alike == [["scaled backward", "update"]]
    changed = _kinds("""
        def f(scaler, loss, amp):
            if amp:
                scaler.scale(loss).backward()
            amp = other()
            if amp:
                scaler.update()
    """)
    assert sorted(changed) == [["scaled backward"], ["scaled backward", "update"], ["update"]]


def test_who_uses_a_scaler_has_one() -> None:
    kinds = _kinds("""
        def f(loss, optimizer, scaler=None):
            scaler.scale(loss).backward()
            if scaler is not None:
                scaler.step(optimizer)
            else:
                optimizer.step()
    """)
    assert kinds == [["scaled backward", "step"]]


def test_a_counter_is_asked_anew_in_each_iteration() -> None:
    kinds = _kinds("""
        def f(scaler, loss, optimizer, loader):
            for i, x in enumerate(loader):
                scaler.scale(loss).backward()
                if i % 2:
                    scaler.step(optimizer)
    """)
    steps = sorted(tuple(kind == "step" for kind in trace if kind in ("step", "iteration")) for trace in kinds)
    assert len(steps) == 4


def test_an_exception_may_come_before_anything_happened() -> None:
    kinds = _kinds("""
        def f(scaler, loss):
            try:
                scaler.scale(loss).backward()
            except RuntimeError:
                scaler.update()
    """)
    assert sorted(kinds) == [["scaled backward"], ["update"]]


def test_many_branches_end_in_time() -> None:
    branches = "\n".join(f"        if flag{i}:\n            scaler.step(opt{i})\n        scaler.update()" for i in range(40))
    text = f"def f(scaler, loss, loader):\n    for x in loader:\n        scaler.scale(loss).backward()\n{branches}"
    traces = parse_module(text).traces
    assert 0 < len(traces) <= 96


def test_no_scaler_and_no_region_means_no_traces() -> None:
    assert parse_module("def f(loss, optimizer):\n    loss.backward()\n    optimizer.step()").traces == []


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("scaled = scaler.scale(loss)\nscaled.backward()", ["scaled backward"]),
        ("loss = scaler.scale(loss)\nloss.backward()", ["scaled backward"]),
        ("torch.autograd.backward(scaler.scale(loss))", ["scaled backward"]),
        ("loss.backward()\nscaler.update()", ["backward", "update"]),
        ("accelerator.backward(loss)\nscaler.update()", ["unknown backward", "update"]),
        ("(loss * scaler.get_scale()).backward()", ["scale read", "unknown backward"]),
        ("scaler.unscale_(optimizer=opt)", ["unscale"]),
        ("scaler.step(opt)\nopt.step()", ["step", "optimizer step"]),
        ("scaler.update()\nlr_scheduler.step()", ["update", "scheduler step"]),
        ("scaler.update()\nema.update(model)", ["update", "average"]),
        ("scaler.update()\nfor p in ps:\n    p.grad = None", ["update", "iteration", "zero grad", "iteration", "zero grad", "loop end"]),
        ("scaler.update()\ntorch.nn.utils.clip_grad_norm_(ps, 1.0)", ["update", "clip"]),
        ("scaler.update()\nmodel.clip_grad_norm_(1.0)", ["update", "clip"]),
        ("scaler.update()\nn = w.grad.detach().norm()", ["update", "norm"]),
        ("scaler.update()\nw.grad.nan_to_num_()", ["update", "clean"]),
        ("scaler.update()\nw.grad[~torch.isfinite(w.grad)] = 0", ["update", "clean"]),
        ("scaler.update()\nelsewhere(scaler)", ["update", "escape"]),
        ("scaler.update()\nprint(scaler)", ["update"]),
    ],
)
def test_what_is_recognized(text: str, kinds: list[str]) -> None:
    whole = "import torch\nscaler = torch.amp.GradScaler()\ndef f(loss, opt, ps, w, model):\n" + textwrap.indent(text, "    ")
    assert kinds in _kinds(whole)


def test_what_was_assigned_is_known() -> None:
    kinds = _kinds("""
        import torch
        def f(scaler, optimizer, loss, limit, ps):
            norm = None
            scaler.scale(loss).backward()
            if limit:
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(ps, limit)
            if norm is None:
                scaler.unscale_(optimizer)
            scaler.update()
    """)
    assert sorted(kinds) == [["scaled backward", "unscale", "clip", "update"], ["scaled backward", "unscale", "update"]]


def test_a_block_that_is_passed_over_may_change_names() -> None:
    kinds = _kinds("""
        def f(scaler, loss, amp):
            if amp:
                scaler.scale(loss).backward()
            while other():
                amp = False
            if amp:
                scaler.update()
    """)
    assert sorted(kinds) == [["scaled backward"], ["scaled backward", "update"], ["update"]]


def test_a_call_makes_one_scaler_however_often_it_is_asked() -> None:
    module = parse_module(
        textwrap.dedent("""
        import torch
        class Trainer:
            def train(self, params, loss):
                params.amp = self.setup(params.amp)
                with torch.autocast("cuda", enabled=params.amp):
                    self.scaler.scale(loss).backward()
                self.scaler.unscale_(self.optimizer)
            def setup(self, on):
                self.scaler = torch.amp.GradScaler("cuda", enabled=on)
                return on
        """)
    )
    (trace,) = module.traces
    assert len({event.scaler for event in trace.events}) == 1
