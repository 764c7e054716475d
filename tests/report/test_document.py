from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest

from halfstep.report import Axis, Column, Document, Marks, Series, Table


def test_a_row_needs_a_cell_for_each_column() -> None:
    with pytest.raises(ValueError, match=r"has 1 cells, but the table has 2 columns: \('Speed-up',\)"):
        Table(columns=(Column(header="Metric"), Column(header="bf16")), rows=(("Speed-up",),))


def test_a_series_needs_a_position_for_each_value() -> None:
    with pytest.raises(ValueError, match="'fp16' has 1 positions for 2 values"):
        Series(name="fp16", x=(1,), y=(0.5, 0.4))


def test_a_distribution_needs_no_positions() -> None:
    assert Series(name="fp16", y=(0.5, 0.4)).x == ()


@pytest.mark.parametrize(("axis", "text"), [(Axis(label="Time", unit="ms"), "Time (ms)"), (Axis(label="Step"), "Step")])
def test_an_axis_names_its_unit(axis: Axis, text: str) -> None:
    assert str(axis) == text


def test_documents_are_values() -> None:
    document = Document(kind="Report", title="digits", conclusion="Train in bf16.")
    assert document == Document(kind="Report", title="digits", conclusion="Train in bf16.")
    with pytest.raises(FrozenInstanceError):
        document.title = "other"  # type: ignore[misc]


def test_importing_and_printing_a_report_loads_neither_torch_nor_plotly() -> None:
    program = (
        "import io, sys\n"
        "from rich.console import Console\n"
        "from halfstep.report import Document, print_document\n"
        "print_document(Document(kind='Report', title='t', conclusion='c'), Console(file=io.StringIO()))\n"
        "print(sorted({'torch', 'plotly', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_marks_need_a_text_for_each_place() -> None:
    with pytest.raises(ValueError, match=r"The marks 'skipped' have 1 texts for 2 places\."):
        Marks(name="skipped", x=(1, 2), texts=("a",), place="below")
