"""The face of the package: light to import, and complete."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

import halfstep

SOURCE = Path(halfstep.__file__)


def run(code: str) -> str:
    """What a fresh Python prints."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "statement",
    [
        "import halfstep",
        "import halfstep.errors",
        "import halfstep.records",
        "import halfstep.records.base, halfstep.records.codec, halfstep.records.comparison, halfstep.records.step",
        "import halfstep; dir(halfstep); halfstep.__version__; hasattr(halfstep, 'nonsense')",
        "from halfstep import Comparison, HalfstepError, HalfstepWarning, StepRecord",
    ],
)
def test_a_light_import_stays_light(statement: str) -> None:
    loaded = run(f"import sys\n{statement}\nprint(*sorted({{'torch', 'numpy', 'plotly', 'rich', 'jinja2'}} & set(sys.modules)))")
    assert loaded == ""


@pytest.mark.parametrize(
    "statement",
    [
        "import halfstep.journal, halfstep.monitor, halfstep.monitor.rules, halfstep.monitor.sinks, halfstep.monitor.actions",
        "from halfstep import Action, Alert, Monitor; import tempfile; Monitor(tempfile.mkdtemp()).close()",
    ],
)
def test_watching_over_a_run_loads_no_torch(statement: str) -> None:
    assert run(f"import sys\n{statement}\nprint('torch' in sys.modules)") == "False"


@pytest.mark.parametrize("name", halfstep.__all__)
def test_every_public_name_resolves(name: str) -> None:
    home = halfstep._HOMES.get(name)
    value = getattr(halfstep, name)
    if home is None:
        assert name == "__version__"
    else:
        assert find_spec(home) is not None
        module = import_module(home)
        assert value is getattr(module, name)
        assert name in module.__all__
        assert value.__module__ == home or value.__module__.startswith(f"{home}.")


def test_a_name_is_looked_up_once() -> None:
    vars(halfstep).pop("StepRecord", None)
    assert halfstep.StepRecord is vars(halfstep)["StepRecord"]


@pytest.mark.parametrize("name", ["nonsense", "step_record", "_private"])
def test_an_unknown_name_raises_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"^module 'halfstep' has no attribute '{name}'$"):
        getattr(halfstep, name)
    assert run(f"try:\n from halfstep import {name}\nexcept ImportError: print('refused')") == "refused"


def test_the_version_is_the_installed_one() -> None:
    assert halfstep.__version__ == version("halfstep")


def type_checking_imports() -> dict[str, str]:
    """The names that a type checker sees, and the modules that it finds them in."""
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in ast.walk(block) if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: node.module or "" for node in imports for alias in node.names}


def test_what_a_type_checker_sees_is_what_is_loaded() -> None:
    assert type_checking_imports() == halfstep._HOMES


def test_all_lists_every_lazy_name_in_order() -> None:
    assert list(halfstep.__all__) == sorted({*halfstep._HOMES, "__version__"})


def test_dir_shows_every_public_name_before_it_is_loaded() -> None:
    shown = run("import halfstep; print(*[name for name in halfstep.__all__ if name not in dir(halfstep)])")
    assert shown == ""


def test_a_star_import_gives_every_public_name_and_only_then_loads_torch() -> None:
    before = "import sys, halfstep; before = 'torch' in sys.modules; from halfstep import *"
    assert run(f"{before}; print(before, 'torch' in sys.modules, set(halfstep.__all__) <= set(globals()))") == "False True True"


def test_no_module_is_called_like_a_public_name() -> None:
    modules = {path.stem for path in SOURCE.parent.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert modules.isdisjoint(halfstep.__all__)


def test_the_types_are_shipped() -> None:
    assert (SOURCE.parent / "py.typed").is_file()
