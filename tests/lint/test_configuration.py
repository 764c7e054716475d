"""What a project wants, and where it says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from halfstep.errors import ConfigurationError
from halfstep.lint.configuration import Configuration, Configurations
from halfstep.lint.selection import RuleName, Selection, known_rules
from tests.test_package import run

KNOWN = known_rules(
    [
        RuleName(code="HS001", name="deprecated_namespace", severity="warning"),
        RuleName(code="HS002", name="clip_before_unscale", severity="error"),
    ]
)


def configure(folder: Path, text: str) -> Configuration:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return Configurations(KNOWN).of(folder / "train.py")


def test_without_a_file_nothing_is_said(tmp_path: Path) -> None:
    configuration = Configurations(KNOWN).of(tmp_path / "train.py")
    assert configuration == Configuration(folder=tmp_path)
    assert not configuration.excludes(tmp_path / "train.py")
    assert configuration.ignored_in(tmp_path / "train.py") == ()


def test_every_setting(tmp_path: Path) -> None:
    assert configure(
        tmp_path,
        """
        [tool.halfstep.lint]
        select = ["ALL"]
        ignore = ["HS001", "clip_before_unscale"]
        exclude = ["vendored"]
        unsafe-fixes = true
        [tool.halfstep.lint.per-file-ignores]
        "tests/**" = ["HS00"]
        "*.ipynb" = ["HS001", "syntax_error"]
        """,
    ) == Configuration(
        folder=tmp_path,
        selection=Selection(select=("ALL",), ignore=("HS001", "clip_before_unscale")),
        exclude=("vendored",),
        per_file_ignores=(("tests/**", ("HS00",)), ("*.ipynb", ("HS001", "syntax_error"))),
        unsafe_fixes=True,
    )


@pytest.mark.parametrize(
    "text",
    [
        "[tool.halfstep]\nlint = {ignore = ['HS001']}",
        "[tool]\nhalfstep.lint.ignore = ['HS001']",
        "tool.'halfstep'.\"lint\".ignore = ['HS001']",
        "\ufeff[tool.halfstep.lint]\nignore = ['HS001']",
        "[tool.halfstep]\r\n[tool.halfstep.lint]\r\nignore = [\r\n'HS001',\r\n]\r\n",
    ],
)
def test_any_way_of_writing_toml_is_read(tmp_path: Path, text: str) -> None:
    assert configure(tmp_path, text).selection.ignore == ("HS001",)


@pytest.mark.parametrize(
    "text", ["", "[project]\ndependencies = ['halfstep']\n[tool.ruff.lint]\n", "[tool.halfstep]\nx = 'lint'\n", "# halfstep lint tool"]
)
def test_a_file_without_the_table_says_nothing(tmp_path: Path, text: str) -> None:
    configure(tmp_path, "[tool.halfstep.lint]\nignore = ['HS001']")
    assert configure(tmp_path / "sub", text).folder == tmp_path


def test_the_nearest_file_counts_for_what_is_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(tmp_path, "[tool.halfstep.lint]\nignore = ['HS001']")
    configure(tmp_path / "a" / "b", "[tool.halfstep.lint]\nignore = ['HS002']")
    configurations = Configurations(KNOWN)
    folders = {name: configurations.of(tmp_path / name).folder for name in ("x.py", "a/x.py", "a/b/x.py", "a/b/c/d/x.py", "a/b")}
    below = tmp_path / "a" / "b"
    assert folders == {"x.py": tmp_path, "a/x.py": tmp_path, "a/b/x.py": below, "a/b/c/d/x.py": below, "a/b": tmp_path}
    monkeypatch.chdir(below)
    assert configurations.of(Path("x.py")).folder == below
    assert configurations.of(Path("../x.py")).folder == tmp_path


def test_each_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(tmp_path, "[tool.halfstep.lint]\nignore = ['HS001']")
    read: list[Path] = []
    text_of = Path.read_text

    def read_text(path: Path, encoding: str) -> str:
        read.append(path)
        return text_of(path, encoding=encoding)

    monkeypatch.setattr(Path, "read_text", read_text)
    configurations = Configurations(KNOWN)
    for name in ("a/x.py", "a/y.py", "b/x.py", "x.py"):
        configurations.of(tmp_path / name)
    assert len(read) == len(set(read))


class TestRefusals:
    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            (
                "selct = ['HS002']",
                "has no setting 'selct'. Did you mean 'select'? Allowed are select, ignore, exclude, per-file-ignores and unsafe-fixes.",
            ),
            ("select = 'HS002'", "select is 'HS002'. Allowed is a list of texts, such as [\"HS002\"]."),
            ("ignore = [1]", 'ignore is [1]. Allowed is a list of texts, such as ["HS002"].'),
            ("select = ['HS009']", "select: there is no rule 'HS009'. Did you mean 'HS001' or 'HS002'"),
            ("ignore = ['clip']", "ignore: there is no rule 'clip'."),
            ("exclude = 'a'", "exclude is 'a'. Allowed is a list of globs"),
            ("exclude = ['']", "exclude is ['']. Allowed is a list of globs"),
            ("exclude = ['[z-a]']", "exclude: '[z-a]' is no glob: bad character range z-a."),
            ("exclude = ['.']", "exclude: '.' fits nothing. Name files or folders below that of this file"),
            ("exclude = ['./']", "exclude: './' fits nothing."),
            ("exclude = ['../a']", "exclude: '../a' fits nothing."),
            ("exclude = ['a//b']", "exclude: 'a//b' fits nothing."),
            ("exclude = ['{a,b}.py']", "exclude: '{a,b}.py' fits nothing: braces have no meaning here. Write one glob for each choice."),
            ("per-file-ignores = {'a/../b' = ['HS001']}", "per-file-ignores: 'a/../b' fits nothing."),
            ("unsafe-fixes = 1", "unsafe-fixes is 1. Allowed are true and false."),
            (
                "per-file-ignores = ['a']",
                'per-file-ignores is [\'a\']. Allowed is a table of globs and rules, such as {"tests/**" = ["HS002"]}.',
            ),
            ("per-file-ignores = {a = 'HS001'}", "per-file-ignores 'a' is 'HS001'. Allowed is a list of texts"),
            ("per-file-ignores = {a = ['HS1']}", "per-file-ignores: there is no rule 'HS1'."),
        ],
    )
    def test_what_is_not_allowed_is_named(self, tmp_path: Path, setting: str, message: str) -> None:
        with pytest.raises(ConfigurationError, match=re.escape(f"{tmp_path}/pyproject.toml: [tool.halfstep.lint] {message}")):
            configure(tmp_path, f"[tool.halfstep.lint]\n{setting}\n")

    @pytest.mark.parametrize("text", ["tool.halfstep.lint = 1", "[tool]\nhalfstep = ['lint']", "tool = 'halfstep lint'"])
    def test_what_is_no_table(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(ConfigurationError, match=r"pyproject\.toml: tool[.a-z]* is no table\. Write \[tool\.halfstep\.lint\] and"):
            configure(tmp_path, text)

    def test_what_is_no_toml(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"pyproject\.toml is no valid TOML: .*line 1"):
            configure(tmp_path, "[tool.halfstep.lint\n")

    def test_what_cannot_be_read(self, tmp_path: Path) -> None:
        (tmp_path / "pyproject.toml").write_bytes(b"[tool.halfstep.lint] \xff")
        with pytest.raises(ConfigurationError, match=r"Cannot read .*pyproject\.toml: 'utf-8' codec can't decode"):
            Configurations(KNOWN).of(tmp_path / "a.py")

    def test_what_may_not_be_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(path: Path, encoding: str) -> str:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "read_text", refuse)
        with pytest.raises(ConfigurationError, match=r"Cannot read .*pyproject\.toml: Permission denied\."):
            Configurations(KNOWN).of(tmp_path / "a.py")
        monkeypatch.setattr("os.access", lambda path, mode: False)  # Nobody can tell whether it is there.
        assert Configurations(KNOWN).of(tmp_path / "a.py") == Configuration(folder=tmp_path)

    def test_a_message_ends_with_one_dot(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"is no valid TOML: .*[^.]\.$"):
            configure(tmp_path, "[tool.halfstep.lint]\nselect = []\nselect = []\n")

    def test_a_folder_of_that_name_says_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "pyproject.toml").mkdir()
        assert Configurations(KNOWN).of(tmp_path / "a.py") == Configuration(folder=tmp_path)


def left_out(configuration: Configuration, path: Path) -> bool:
    """Whether a walk from the folder of the configuration does not come to a file."""
    return any(configuration.excludes(each) for each in (path, *path.parents) if configuration.folder in each.parents)


@pytest.mark.parametrize(
    ("glob", "fits", "fits_not"),
    [
        ("old.py", ["old.py", "a/old.py"], ["old.pyx", "bold.py", "a.py"]),
        ("old", ["old", "old/a.py", "a/old/b/c.py"], ["older/a.py", "a/b.py"]),
        ("old/", ["old/a.py", "a/old/b.py"], ["older/a.py"]),
        ("*.ipynb", ["a.ipynb", "a/b.ipynb"], ["a.py"]),
        ("a/*.py", ["a/b.py"], ["a/b/c.py", "b/a/c.py", "a.py"]),
        ("a/b", ["a/b", "a/b/c.py", "a/b/c/d.py"], ["a/bc.py", "c/a/b"]),
        ("./a", ["a", "a/b.py"], ["b/a", "c/a/b.py"]),
        ("/a", ["a", "a/b.py"], ["b/a"]),
        ("a/**", ["a/b.py", "a/b/c.py"], ["b/a/c.py"]),
        ("**/a/*.py", ["a/b.py", "c/a/b.py", "c/d/a/b.py"], ["a.py", "ca/b.py"]),
        ("a/**/b.py", ["a/b.py", "a/c/b.py", "a/c/d/b.py"], ["b.py", "a/cb.py"]),
        ("a?.py", ["ab.py"], ["a.py", "abc.py"]),
        ("[ab].py", ["a.py", "c/b.py"], ["c.py", "ab.py"]),
        ("[!ab].py", ["c.py"], ["a.py"]),
        ("[a-c]*.py", ["bx.py"], ["d.py"]),
        ("a.py", ["a.py"], ["aXpy"]),
        ("a+(b)[c", ["a+(b)[c"], ["aab"]),
        ("[]x]", ["]", "x"], ["y"]),
        ("[^a]", ["^", "a"], ["b"]),
    ],
)
def test_globs(tmp_path: Path, glob: str, fits: list[str], fits_not: list[str]) -> None:
    configuration = Configuration(folder=tmp_path, exclude=(glob,), per_file_ignores=((glob, ("HS001",)),))
    for name in fits:
        assert left_out(configuration, tmp_path / name), name
        assert configuration.ignored_in(tmp_path / name) == ("HS001",)
    for name in fits_not:
        assert not left_out(configuration, tmp_path / name), name
        assert configuration.ignored_in(tmp_path / name) == ()


def test_globs_are_about_the_folder_of_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    configuration = Configuration(folder=tmp_path, exclude=("a/b",))
    monkeypatch.chdir(tmp_path / "a")
    assert configuration.excludes(Path("b"))
    assert not configuration.excludes(Path("x.py"))
    monkeypatch.chdir(tmp_path / "a" / "b")
    assert configuration.excludes(Path())
    assert not configuration.excludes(Path(".."))


def test_what_is_in_an_excluded_folder_is_not_excluded_itself(tmp_path: Path) -> None:
    configuration = Configuration(folder=tmp_path, exclude=("old", "a/b"))
    assert not any(configuration.excludes(tmp_path / name) for name in ("old/x.py", "a/b/x.py"))


@pytest.mark.parametrize(("text", "loaded"), [("[project]\nname = 'halfstep'", "False"), ("[tool.halfstep.lint]", "True")])
def test_a_parser_is_loaded_only_for_who_has_something_to_say(tmp_path: Path, text: str, loaded: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    program = (
        "import sys; from pathlib import Path; from halfstep.lint.configuration import Configurations; "
        f"Configurations([]).of(Path({str(tmp_path / 'a.py')!r})); print('tomlkit' in sys.modules)"
    )
    assert run(program) == loaded
