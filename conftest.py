"""Runs the Python examples in the Markdown documentation."""

from collections.abc import Iterator

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser


@pytest.fixture(scope="module")
def in_a_folder_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An example may write files into the current folder, as its reader's script does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("documentation"))
        yield


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()],
    patterns=["*.md"],
    # The examples there are parts of training scripts, wrong ones among them; tests/lint checks them without running any.
    excludes=["docs/rules/*.md"],
    fixtures=["in_a_folder_of_its_own"],
).pytest()
