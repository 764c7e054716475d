"""What a person may change in the code, by what broke there."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfstep.numerics import OUTSIDE
from halfstep.records import UNKNOWN, OpRecord, SourceLine
from halfstep.replay.advice import advice_for, excerpt_of
from halfstep.replay.alignment import Pair
from tests.replay.operations import detail, operation, run_of


def advice(*steps: OpRecord, numbers: tuple[tuple[float, ...], ...] = (), chain: bool = True) -> list[str]:
    """What is said of the last of some operations, each of which computes with the one before."""
    given = [*numbers, *([()] * len(steps))]
    sources = [place - 1 if chain else OUTSIDE for place in range(len(steps))]
    run = run_of(*((op, detail(source, numbers=each)) for op, source, each in zip(steps, sources, given, strict=False)))
    found = advice_for(Pair(low=run, full=run), len(steps) - 1)
    assert all(remedy.override is None and not remedy.verified for remedy in found)
    return [remedy.text for remedy in found]


def source(folder: Path, *lines: str) -> str:
    path = folder / "code.py"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


class TestHabits:
    @pytest.mark.parametrize(
        ("op", "part"),
        [
            ("aten._to_copy.default", "Bring the values into range before they are lowered at train.py:3"),
            ("aten.sum.dim_IntList", "Sum in fp32 at train.py:3: x.float()"),
            ("aten.mean.dim", "Sum in fp32 at train.py:3"),
            ("aten.linalg_vector_norm.default", "Sum in fp32 at train.py:3"),
            ("aten.exp.default", "Do not take exponentials by hand at train.py:3"),
            ("aten.exp_.default", "Do not take exponentials by hand at train.py:3"),
            ("aten.log.default", "Compute the loss at train.py:3 from logits"),
            ("aten.binary_cross_entropy.default", "Compute the loss at train.py:3 from logits"),
            ("aten.div.Tensor", "Divide in fp32 at train.py:3"),
            ("aten.div_.Tensor", "Divide in fp32 at train.py:3"),
            ("aten.rsqrt.default", "Divide in fp32 at train.py:3"),
            ("aten.pow.Tensor_Scalar", "Square and multiply in fp32 at train.py:3"),
            ("aten.mul.Tensor", "Square and multiply in fp32 at train.py:3"),
        ],
    )
    def test_each_kind_of_operation_has_its_own(self, op: str, part: str) -> None:
        (text,) = advice(operation(op, nonfinite=1))
        assert text.startswith(part)
        assert advice(operation(op)) == []  # It lost its accuracy, say, which is another matter.

    @pytest.mark.parametrize("op", ["aten.relu.default", "aten.convolution.default", "custom", "mine.function.default"])
    def test_of_others_nothing_is_said(self, op: str) -> None:
        assert advice(operation(op, nonfinite=1)) == []

    @pytest.mark.parametrize("code", ["scores = q @ k", "scores = torch.matmul(q, k)", "s = einsum('ij,kj', q, k)", "s = torch.bmm(q, k)"])
    def test_products_that_may_be_attention(self, code: str, tmp_path: Path) -> None:
        (text,) = advice(operation("aten.bmm.default", file=source(tmp_path, code), line=1, nonfinite=1))
        assert f"If these are attention scores ({tmp_path / 'code.py'}:1), multiply the queries by 1 / sqrt(d)" in text

    def test_a_linear_layer_is_no_attention(self, tmp_path: Path) -> None:
        assert advice(operation("aten.mm.default", file=source(tmp_path, "y = self.head(x)"), line=1, nonfinite=1)) == []

    def test_a_module_stands_for_a_line_that_is_not_known(self) -> None:
        (text,) = advice(operation("aten.exp.default", file=UNKNOWN, line=0, module="head.act", nonfinite=1))
        assert "by hand at head.act:" in text

    def test_the_gradient_of_a_root(self) -> None:
        texts = advice(operation("aten.div.Tensor", phase="backward", node="SqrtBackward0", nonfinite=1))
        assert texts[-1] == "Put an epsilon under the root at train.py:3: its gradient at zero is infinite."
        assert not any("epsilon" in text for text in advice(operation("aten.div.Tensor", node="SqrtBackward0", nonfinite=1)))
        assert not any(
            "epsilon" in text for text in advice(operation("aten.div.Tensor", phase="backward", node="MulBackward0", nonfinite=1))
        )


class TestConstants:
    def texts(self, number: float, *, dtype: str = "float16", op: str = "aten.add.Tensor") -> list[str]:
        return [text for text in advice(operation(op, dtype=dtype), numbers=((number,),)) if "constant" in text]

    @pytest.mark.parametrize(
        ("number", "dtype", "is_too_large"),
        [
            (-1e9, "float16", True),
            (65504.0, "float16", False),
            (65505.0, "float16", True),
            (-1e9, "bfloat16", False),
            (-3.4028e38, "bfloat16", True),
            (float("-inf"), "float16", False),
            (float("nan"), "float16", False),
            (-1e9, "float32", False),
        ],
    )
    def test_those_that_are_too_large(self, number: float, dtype: str, is_too_large: bool) -> None:
        found = self.texts(number, dtype=dtype, op="aten.masked_fill.Scalar")
        assert bool(found) == is_too_large
        assert self.texts(number, dtype=dtype) == []  # A number that is added fills no mask.
        if is_too_large:
            name = "fp16" if dtype == "float16" else "bf16"
            assert found[0].startswith(f"The constant {number:g} at train.py:3 does not fit {name}. Fill with torch.finfo")

    @pytest.mark.parametrize(
        ("number", "dtype", "is_too_small"),
        [
            (1e-8, "float16", True),
            (-1e-12, "float16", True),
            (2.0**-24, "float16", False),
            (2.0**-25, "float16", False),
            (2.0**-26, "float16", True),
            (0.0, "float16", False),
            (1e-8, "bfloat16", False),
            (1e-45, "bfloat16", True),
            (1e-8, "float32", False),
        ],
    )
    def test_those_that_are_zero(self, number: float, dtype: str, is_too_small: bool) -> None:
        found = self.texts(number, dtype=dtype)
        assert bool(found) == is_too_small
        if is_too_small:
            name = "fp16" if dtype == "float16" else "bf16"
            assert found[0].startswith(f"The constant {number:g} at train.py:3 is zero in {name}, so it guards nothing")

    def test_numbers_in_the_line_alone_are_none(self, tmp_path: Path) -> None:
        file = source(tmp_path, "y = x / 1e8 * 70000")
        assert advice(operation("aten.add.Tensor", file=file, line=1)) == []

    def test_they_may_have_come_in_four_operations_before(self) -> None:
        steps = [operation("aten.where.self", line=number) for number in range(1, 8)]

        def told(place: int, *, chain: bool = True) -> list[str]:
            return advice(*steps, numbers=(*([()] * place), (-1e9,)), chain=chain)

        assert [f"train.py:{place + 1} does" in "".join(told(place)) for place in range(7)] == [False, False] + [True] * 5
        assert told(5, chain=False) == []

    def test_each_is_told_once(self) -> None:
        assert len(advice(operation("aten.full.default"), operation("aten.full.default"), numbers=((-1e9, -1e9), (-1e9,)))) == 1

    def test_they_come_before_habits(self) -> None:
        texts = advice(operation("aten.where.self"), operation("aten.mul.Tensor", nonfinite=1), numbers=((-1e9,),))
        assert ["constant" in text for text in texts] == [True, False]

    def test_the_format_is_that_of_what_came_in_where_nothing_came_out(self) -> None:
        op = operation("aten.add.Tensor", dtype="")
        assert advice(op, numbers=((-1e9,),)) == []


class TestExcerpt:
    def test_three_lines_before_and_after(self, tmp_path: Path) -> None:
        file = source(tmp_path, *(f"line {number}" for number in range(1, 11)))
        found = excerpt_of(operation(file=file, line=5))
        assert [each.number for each in found] == [2, 3, 4, 5, 6, 7, 8]
        assert found[3] == SourceLine(number=5, text="line 5", is_marked=True)
        assert [each.is_marked for each in found].count(True) == 1

    @pytest.mark.parametrize(("line", "numbers"), [(1, [1, 2, 3, 4]), (10, [7, 8, 9, 10]), (0, []), (11, [])])
    def test_it_ends_with_the_file(self, line: int, numbers: list[int], tmp_path: Path) -> None:
        file = source(tmp_path, *(f"line {number}" for number in range(1, 11)))
        assert [each.number for each in excerpt_of(operation(file=file, line=line))] == numbers

    def test_what_cannot_be_read_has_none(self, tmp_path: Path) -> None:
        assert excerpt_of(None) == ()
        assert excerpt_of(operation(file=UNKNOWN, line=0)) == ()
        assert excerpt_of(operation(file=str(tmp_path / "gone.py"), line=1)) == ()

    def test_indentation_stays_and_the_end_of_lines_goes(self, tmp_path: Path) -> None:
        path = tmp_path / "code.py"
        path.write_bytes(b"if x:\r\n    y = 1  \r\n")
        assert [each.text for each in excerpt_of(operation(file=str(path), line=2))] == ["if x:", "    y = 1  "]
