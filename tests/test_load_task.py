"""Tasks that are found by name, and the line that a fault in them is blamed on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import halfstep
from halfstep.errors import TaskError
from halfstep.task import blame, load_task, make_task

TASK = """
import torch
from halfstep import Task

def task(seed: int) -> Task:
    model = torch.nn.Linear(2, 1)
    model.tag = {tag!r}
    return Task(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: model(batch).sum(),
        batches=[torch.ones(1, 2)],
    )
"""


@pytest.fixture(autouse=True)
def isolated_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forgets what a test imported and puts `sys.path` back."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes a file under the test's folder and gives its path."""

    def write(name: str, text: str = TASK, *, tag: str = "") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("{tag!r}", repr(tag)), encoding="utf-8")
        return str(path)

    return write


Write = Callable[..., str]


def tag_of(name: str) -> object:
    return make_task(load_task(name), seed=0).model.tag


class TestNames:
    """`load_task`: what the text before and after the colon may be."""

    @pytest.mark.parametrize("name", ["", ":", "task", "train.py", "train.py:", ":task", "train.py:12", "train.py:a b", "C:\\x\\train.py"])
    def test_a_name_without_a_factory_is_refused(self, name: str) -> None:
        with pytest.raises(TaskError) as caught:
            load_task(name)
        assert str(caught.value).startswith(f"{name!r} names no factory. A task is named as path/to/file.py:factory or package.module:")

    def test_a_missing_file_is_named_with_its_neighbour(self, write: Write, tmp_path: Path) -> None:
        write("train.py")
        with pytest.raises(TaskError, match=r"^There is no file '.*/trian\.py'\. Did you mean 'train\.py'\?$"):
            load_task(f"{tmp_path}/trian.py:task")

    @pytest.mark.parametrize("name", ["nowhere/train.py", "zzz.py"])
    def test_a_missing_file_without_neighbours_gets_no_hint(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(TaskError, match=rf"^There is no file '.*{name}'\.$"):
            load_task(f"{tmp_path}/{name}:task")

    @pytest.mark.parametrize("name", ["train.txt", "train", "train.ipynb"])
    def test_a_file_that_is_not_python_is_refused(self, write: Write, name: str) -> None:
        with pytest.raises(TaskError, match=rf"{name}' is no Python file\. A task is named as path/to/file\.py:factory\.$"):
            load_task(f"{write(name)}:task")

    @pytest.mark.parametrize("name", ["tasks", "tasks/", "odd.py"])
    def test_a_folder_is_refused(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).mkdir()
        with pytest.raises(TaskError, match=r"is a folder\. A task is named as path/to/file\.py:factory\.$"):
            load_task(f"{tmp_path}/{name}:task")

    def test_a_missing_factory_is_answered_with_what_is_there(self, write: Write) -> None:
        path = write("train.py", TASK + "\nclass Net: ...\nnumber = 3\n")
        with pytest.raises(TaskError, match=r"train\.py has no factory named 'taks'; it defines Net, task\. Did you mean 'task'\?$"):
            load_task(f"{path}:taks")

    def test_a_missing_factory_in_an_empty_file(self, write: Write) -> None:
        with pytest.raises(TaskError, match=r"has no factory named 'task'; it defines nothing that can be called\.$"):
            load_task(f"{write('train.py', 'import os')}:task")

    @pytest.mark.parametrize(("value", "shown"), [("3", r"3 \(type int\)"), ("None", r"None \(type NoneType\)"), ("'a'", "'a'")])
    def test_a_factory_that_cannot_be_called_is_refused(self, write: Write, value: str, shown: str) -> None:
        with pytest.raises(TaskError, match=rf"train\.py:task is {shown}.*, not a factory\. A factory is a function that takes a seed"):
            load_task(f"{write('train.py', f'task = {value}')}:task")


class TestFiles:
    """`load_task("path/to/file.py:factory")`."""

    @pytest.mark.parametrize(
        "name",
        [
            "train.py",
            "deep/er/train.py",
            "with space/my train.py",
            "größe/训练.py",
            "a.b.c.py",
            "hyphen-ated.py",
            "1.py",
            "co:lon/train.py",
        ],
    )
    def test_a_file_is_loaded(self, write: Write, name: str) -> None:
        path = write(name, tag=name)
        assert tag_of(f"{path}:task") == name
        assert load_task(f"{path}:task").__module__.isidentifier()

    def test_a_relative_path_starts_at_the_working_directory(self, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write("tasks/train.py", tag="relative")
        monkeypatch.chdir(tmp_path)
        assert tag_of("tasks/train.py:task") == "relative"
        monkeypatch.chdir(tmp_path / "tasks")
        assert tag_of("train.py:task") == "relative"
        assert tag_of("../tasks/train.py:task") == "relative"

    @pytest.mark.parametrize("name", ["types.py", "random.py", "json.py", "torch.py", "halfstep.py"])
    def test_a_file_called_like_a_module_hides_nothing(self, write: Write, name: str) -> None:
        original = sys.modules[name.removesuffix(".py")]
        assert tag_of(f"{write(name, tag=name)}:task") == name
        assert sys.modules[name.removesuffix(".py")] is original

    def test_two_files_of_one_name_live_side_by_side(self, write: Write) -> None:
        first = load_task(f"{write('one/train.py', tag='one')}:task")
        second = load_task(f"{write('two/train.py', tag='two')}:task")
        tags = [make_task(factory, seed=0).model.tag for factory in (first, second, first)]
        assert tags == ["one", "two", "one"]
        assert first.__module__ != second.__module__
        assert sys.modules[first.__module__] is not sys.modules[second.__module__]
        assert sys.modules[first.__module__].__dict__["task"] is first

    def test_a_file_is_found_under_one_name_however_it_is_spelled(self, write: Write, tmp_path: Path) -> None:
        path = write("one/train.py")
        spelled = [load_task(f"{path}:task"), load_task(f"{tmp_path}/one/../one/train.py:task")]
        assert spelled[0].__module__ == spelled[1].__module__

    def test_classes_of_the_file_can_be_pickled(self, write: Write) -> None:
        source = "import pickle, dataclasses\n@dataclasses.dataclass\nclass Net:\n    size: 'int' = 2\n"
        load = load_task(f"{write('train.py', source + 'def task(seed): return pickle.loads(pickle.dumps(Net(seed)))')}:task")
        assert vars(load(5)) == {"size": 5}

    def test_siblings_are_imported(self, write: Write, tmp_path: Path) -> None:
        write("parts/sibling_of_a_task.py", "TAG = 'from the sibling'")
        path = write("parts/train.py", "from sibling_of_a_task import TAG\n" + TASK.replace("{tag!r}", "TAG"))
        assert tag_of(f"{path}:task") == "from the sibling"
        assert sys.path[0] == str(tmp_path / "parts")

    def test_the_folder_of_the_last_file_stands_first_and_once(self, write: Write, tmp_path: Path) -> None:
        paths = [write(f"{folder}/train.py") for folder in ("one", "two")]
        for path in (*paths, *paths, paths[0]):
            load_task(f"{path}:task")
        assert sys.path[:2] == [str(tmp_path / "one"), str(tmp_path / "two")]
        assert sys.path.count(str(tmp_path / "one")) == 1

    def test_code_for_the_script_alone_does_not_run(self, write: Write) -> None:
        path = write("train.py", TASK + "if __name__ == '__main__':\n    raise SystemExit", tag="x")
        assert tag_of(f"{path}:task") == "x"

    @pytest.mark.parametrize(
        ("source", "message", "line"),
        [
            ("import os\n\ndef task(seed:\n", "SyntaxError: .+", 3),
            ("if True:\nx = 1\n", "IndentationError: .+", 2),
            ("x = 1\nraise ValueError('bad\\n  size')\n", "ValueError: bad size", 2),
            ("\n\n1 / 0\n", "ZeroDivisionError: division by zero", 3),
            ("def build():\n    raise KeyError('depth')\n\nbuild()\n", "KeyError: 'depth'", 2),
            ("raise RuntimeError\n", "RuntimeError: no message", 1),
            ("import nonexistent_package_of_a_task\n", "ModuleNotFoundError: No module named 'nonexistent_package_of_a_task'", 1),
            ("from . import sibling\n", "ImportError: attempted relative import with no known parent package", 1),
            ("import json\n\njson.loads('{')\n", "JSONDecodeError: .+", 3),
            ("import torch\ntorch.nn.Linear(2, 1)(torch.ones(3))\n", "RuntimeError: .+", 2),
            ("import ast\nast.literal_eval('1 +')\n", "SyntaxError: .+", 2),
        ],
    )
    def test_a_file_that_fails_is_named_with_the_line(self, write: Write, source: str, message: str, line: int) -> None:
        path = write("train.py", source)
        before = set(sys.modules)
        with pytest.raises(
            TaskError, match=rf"^{path} could not be imported: {message} \({path}:{line}(, in \w+|, in <module>)?\)$"
        ) as caught:
            load_task(f"{path}:task")
        assert caught.value.__cause__ is not None
        assert not [name for name in set(sys.modules) - before if name.startswith("halfstep_task_")]

    def test_a_fault_in_a_sibling_is_located_there(self, write: Write, tmp_path: Path) -> None:
        write("broken_sibling_of_a_task.py", "x = 1\ny = (\n")
        path = write("train.py", "import broken_sibling_of_a_task")
        with pytest.raises(TaskError, match=rf"SyntaxError: .* \({tmp_path}/broken_sibling_of_a_task\.py:2\)$"):
            load_task(f"{path}:task")

    @pytest.mark.parametrize(
        ("source", "text"),
        [
            ("import sys\nsys.exit()\n", "SystemExit: no message"),
            ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
            ("import argparse\nargparse.ArgumentParser().parse_args(['--epochs'])\n", "SystemExit: 2"),
        ],
    )
    def test_a_file_that_exits_is_named_with_the_line_and_the_way_out(self, write: Write, source: str, text: str) -> None:
        path = write("train.py", source)
        with pytest.raises(
            TaskError, match=rf"^{path} ended the program while it was imported: {text} \({path}:2, in <module>\)\. .*__main__"
        ):
            load_task(f"{path}:task")

    def test_an_interrupt_passes_and_leaves_no_half_module(self, write: Write) -> None:
        path = write("train.py", "raise KeyboardInterrupt")
        before = set(sys.modules)
        with pytest.raises(KeyboardInterrupt):
            load_task(f"{path}:task")
        assert set(sys.modules) == before

    def test_a_file_that_takes_itself_out_of_sys_modules_fails_with_its_own_error(self, write: Write) -> None:
        path = write("train.py", "import sys\ndel sys.modules[__name__]\nraise ValueError('after')")
        with pytest.raises(TaskError, match="ValueError: after"):
            load_task(f"{path}:task")

    def test_a_file_can_be_mended_and_loaded_again(self, write: Write) -> None:
        path = write("train.py", "raise ValueError('not yet')")
        with pytest.raises(TaskError, match="not yet"):
            load_task(f"{path}:task")
        assert tag_of(f"{write('train.py', tag='now')}:task") == "now"

    @pytest.mark.parametrize("value", ["functools.partial(make, 1)", "Maker()", "lambda seed: make(1, seed)"])
    def test_whatever_can_be_called_is_found_by_name(self, write: Write, value: str) -> None:
        source = f"""
import functools
{TASK.replace("def task(seed", "def make(scale, seed").replace("{tag!r}", "scale * seed")}
class Maker:
    def __call__(self, seed): return make(1, seed)
task = {value}
"""
        assert make_task(load_task(f"{write('train.py', source)}:task"), seed=9).model.tag == 9


class TestModules:
    """`load_task("package.module:factory")`."""

    @pytest.fixture(autouse=True)
    def in_the_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def test_a_module_of_the_working_directory_is_loaded(self, write: Write) -> None:
        write("package_of_tasks/train.py", tag="module")
        assert tag_of("package_of_tasks.train:task") == "module"

    def test_a_module_can_import_relatively(self, write: Write) -> None:
        write("package_of_tasks/__init__.py", "")
        write("package_of_tasks/names.py", "TAG = 'relative'")
        write("package_of_tasks/train.py", "from .names import TAG\n" + TASK.replace("{tag!r}", "TAG"))
        assert tag_of("package_of_tasks.train:task") == "relative"

    @pytest.mark.parametrize(
        ("name", "missing"),
        [
            ("no_such_package_of_tasks", "no_such_package_of_tasks"),
            ("no_such_package_of_tasks.train", "no_such_package_of_tasks"),
            ("package_of_tasks.trian", "package_of_tasks.trian"),
            ("package_of_tasks.trian.deep", "package_of_tasks.trian"),
        ],
    )
    def test_a_missing_module_is_named(self, write: Write, name: str, missing: str) -> None:
        write("package_of_tasks/train.py")
        with pytest.raises(TaskError, match=rf"^There is no module '{name}': no package or file '{missing}' is on sys\.path\.$"):
            load_task(f"{name}:task")

    @pytest.mark.parametrize("missing", ["nonexistent_package_of_a_task", "module_of_tasks_more", "module_of_t"])
    def test_a_module_that_misses_another_is_not_missing_itself(self, write: Write, missing: str, tmp_path: Path) -> None:
        write("module_of_tasks.py", f"import {missing}")
        message = (
            rf"^module_of_tasks could not be imported: ModuleNotFoundError: No module named '{missing}' \({tmp_path}/module_of_tasks.py:1"
        )
        with pytest.raises(TaskError, match=message):
            load_task("module_of_tasks:task")

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("x = 1\n1 / 0\n", r"could not be imported: ZeroDivisionError: division by zero \(.*module_of_tasks\.py:2, in <module>\)$"),
            ("x = (\n", r"could not be imported: SyntaxError: .* \(.*module_of_tasks\.py:1\)$"),
            (
                "raise SystemExit(1)\n",
                r"ended the program while it was imported: SystemExit: 1 \(.*module_of_tasks\.py:1, in <module>\)\. ",
            ),
        ],
    )
    def test_a_module_that_fails_is_named_with_the_line(self, write: Write, source: str, message: str) -> None:
        write("module_of_tasks.py", source)
        with pytest.raises(TaskError, match=f"^module_of_tasks {message}"):
            load_task("module_of_tasks:task")

    def test_an_interrupt_passes(self, write: Write) -> None:
        write("module_of_tasks.py", "raise KeyboardInterrupt")
        with pytest.raises(KeyboardInterrupt):
            load_task("module_of_tasks:task")

    def test_a_missing_factory_is_answered_with_what_is_there(self, write: Write) -> None:
        write("module_of_tasks.py")
        with pytest.raises(TaskError, match=r"^module_of_tasks has no factory named 'tasks'; it defines task\. Did you mean 'task'\?$"):
            load_task("module_of_tasks:tasks")

    @pytest.mark.parametrize("name", [".train", "..", "a b", "train.1"])
    def test_what_can_be_no_module_is_refused(self, name: str) -> None:
        with pytest.raises(TaskError, match=r" is neither a Python file nor a module\. A task is named as path/to/file\.py:factory or "):
            load_task(f"{name}:task")

    def test_a_file_of_another_kind_is_no_module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("train.txt").write_text(TASK, encoding="utf-8")
        with pytest.raises(TaskError, match=r"^'train\.txt' is no Python file\."):
            load_task("train.txt:task")


def caught(function: Callable[[], object]) -> Exception:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def fault_in(path: Path) -> Exception:
    """A fault in code that seems to lie in a file."""
    code = compile("1 / 0", str(path), "exec")
    return caught(lambda: exec(code))


class TestBlame:
    def test_the_innermost_line_of_the_users_is_named(self) -> None:
        def inner() -> object:
            return json.loads("{")

        line = inner.__code__.co_firstlineno + 1
        assert blame(caught(inner)).endswith(f"({__file__}:{line}, in inner)")

    def test_an_error_without_a_traceback_has_no_line(self) -> None:
        assert blame(ValueError("a")) == "ValueError: a"

    def test_lines_are_joined(self) -> None:
        assert blame(ValueError("a\n   b\tc\n")) == "ValueError: a b c"

    def test_an_error_without_a_message_says_so(self) -> None:
        assert blame(ValueError()) == "ValueError: no message"

    def test_a_syntax_error_in_text_is_blamed_on_who_compiled_it(self) -> None:
        def inner() -> object:
            return compile("1 +", "<text>", "eval")

        line = inner.__code__.co_firstlineno + 1
        assert blame(caught(inner)).endswith(f"({__file__}:{line}, in inner)")

    @pytest.mark.parametrize("folder", ["halfstep_experiments", "torch", "frozen"])
    def test_a_users_folder_called_like_a_package_is_the_users(self, write: Write, folder: str) -> None:
        path = write(f"{folder}/train.py", "def task(seed): return 1 / 0")
        error = caught(lambda: load_task(f"{path}:task")(0))
        assert blame(error) == f"ZeroDivisionError: division by zero ({path}:1, in task)"

    @pytest.mark.parametrize("module", [halfstep, torch, json, sys.modules["dataclasses"]])
    def test_code_that_is_not_the_users_is_passed_over(self, module: ModuleType) -> None:
        assert (
            blame(fault_in(Path(str(module.__file__))))
            == f"ZeroDivisionError: division by zero ({__file__}:{fault_in.__code__.co_firstlineno + 3}, in <lambda>)"
        )

    def test_a_folder_beside_halfstep_that_is_called_alike_is_the_users(self) -> None:
        folder = Path(halfstep.__file__).parent
        path = folder.with_name(f"{folder.name}_experiments") / "train.py"
        assert blame(fault_in(path)) == f"ZeroDivisionError: division by zero ({path}:1, in <module>)"

    def test_installed_packages_are_passed_over(self, write: Write) -> None:
        path = write("lib/site-packages/installed.py", "def task(seed): return 1 / 0")

        def outer() -> object:
            return load_task(f"{path}:task")(0)

        line = outer.__code__.co_firstlineno + 1
        assert blame(caught(outer)).endswith(f"({__file__}:{line}, in outer)")


def test_worker_processes_find_the_classes_of_a_task_file(write: Write) -> None:
    """A spawned worker unpickles the data set, so it must be able to import its module by name."""
    path = write(
        "worker_of_tasks.py",
        """
        import torch
        from halfstep import Task

        class Numbers(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                return torch.full((2,), float(index))

        def task(seed):
            model = torch.nn.Linear(2, 1)
            loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context="spawn")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return Task(model=model, optimizer=optimizer, loss=lambda m, b: m(b).mean(), batches=loader)
        """.replace("\n        ", "\n"),
    )
    factory = load_task(f"{path}:task")
    assert factory.__module__ == "worker_of_tasks"
    assert [batch.tolist() for batch in make_task(factory, seed=0).batches] == [[[0, 0], [1, 1]], [[2, 2], [3, 3]]]
