"""Notebooks as modules, and back."""

from __future__ import annotations

import ast
import codecs
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.lint.notebooks import Notebook, read_notebook
from halfstep.lint.source import Change, Place, Rewriting


def code(source: Any, **more: Any) -> dict[str, Any]:
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": source, **more}


def markdown(source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": [source]}


def document(*cells: Any, metadata: Any = None, **style: Any) -> bytes:
    plain = {"cells": list(cells), "metadata": metadata or {}, "nbformat": 4, "nbformat_minor": 5}
    return (json.dumps(plain, **{"indent": 1, "ensure_ascii": False, **style}) + "\n").encode()


def read(*cells: Any, **style: Any) -> Notebook:
    return read_notebook(document(*cells, **style), path="a.ipynb")


def rewritten(notebook: Notebook, text: str) -> Rewriting:
    rewriting = notebook.rewriting(text)
    assert rewriting is not None
    return rewriting


class TestReading:
    def test_cells_are_one_module_and_know_their_places(self) -> None:
        notebook = read(markdown("# Title"), code(["import torch\n", "x = 1"]), markdown("text"), code("%time\ny = x\n"), code([]))
        assert notebook.text == (
            '"halfstep cell 2"\nimport torch\nx = 1\n"halfstep cell 4"\n__halfstep_magic_0__\ny = x\n\n"halfstep cell 5"\n\n'
        )
        tree = ast.parse(notebook.text)
        found = [notebook.place(statement.lineno) for statement in tree.body if not isinstance(statement, ast.Expr)]
        assert found == [Place(line=1, cell=2), Place(line=2, cell=2), Place(line=2, cell=4)]
        assert notebook.faults == ()

    def test_a_cell_that_does_not_parse_takes_no_other_along(self) -> None:
        notebook = read(code("x = 1"), code(["y = 1\n", "x = = 2\n", "z = 3"]), code("def f():\n"), code("y = x"))
        assert [fault.place for fault in notebook.faults] == [Place(line=2, cell=2), Place(line=1, cell=3)]
        assert notebook.faults[0].column == 5
        names = [node.id for node in ast.walk(ast.parse(notebook.text)) if isinstance(node, ast.Name)]
        assert names == ["x", "y", "x"]
        assert notebook.place(len(notebook.text.split("\n")) - 1) == Place(line=1, cell=4)

    def test_a_prompt_counts_for_columns(self) -> None:
        notebook = read(code("x"), code(">>> if x:\n...     y"), code("  z\n\n  z"))
        assert [notebook.indentation(line) for line in range(1, 10)] == [0, 0, 0, 4, 4, 0, 2, 0, 2]

    @pytest.mark.parametrize(
        ("message", "cell", "shown"),
        [
            ("It is in line 6.", 2, "It is in line 2."),
            ("It is in line 6.", 1, "It is in line 2 of cell 2."),
            ("The loop of line 2 (lines 5 and 6) ends.", 2, "The loop of line 1 of cell 1 (lines 1 and 2) ends."),
            (
                "Its uses in lines 2, 3, 5, 6 and 9 warn.",
                4,
                "Its uses in lines 1 and 2 of cell 1, lines 1 and 2 of cell 2 and line 2 warn.",
            ),
            ("`line 5` since line 5, of 65536 pipeline 5", 2, "`line 5` since line 1, of 65536 pipeline 5"),
            ("`f(__halfstep_magic_0__)` reads it", 2, "`f(%time)` reads it"),
            ("`it's", 2, "`it's"),
        ],
    )
    def test_messages_name_lines_of_cells(self, message: str, cell: int, shown: str) -> None:
        notebook = read(code("a\nb"), code("%time\nc"), markdown("# Title"), code("d\ne"))
        assert notebook.shown(message, place=Place(line=1, cell=cell)) == shown

    @pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
    def test_lines_may_end_in_any_way(self, newline: str) -> None:
        assert read(code(f"x = 1{newline}y = 2")).text == '"halfstep cell 1"\nx = 1\ny = 2\n'

    @pytest.mark.parametrize(
        "metadata",
        [
            {},
            {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
            {"kernelspec": {"language": "python"}, "language_info": {"name": "python"}},
            {"kernelspec": None, "language_info": {}},
            {"kernelspec": "x"},
        ],
    )
    def test_a_notebook_is_python_unless_it_says_otherwise(self, metadata: Any) -> None:
        assert len(read(code("x = 1"), metadata=metadata).cells) == 1

    @pytest.mark.parametrize("metadata", [{"kernelspec": {"language": "R"}}, {"language_info": {"name": "julia"}}])
    def test_other_languages_are_passed_over(self, metadata: Any) -> None:
        notebook = read(code("x <- function(y) {"), metadata=metadata)
        assert (notebook.text, notebook.faults, notebook.cells) == ("", (), ())

    @pytest.mark.parametrize(
        "cell", [None, [], {}, {"cell_type": "code"}, {"cell_type": "code", "source": [1]}, {"cell_type": "code", "source": 1}]
    )
    def test_what_is_no_cell_is_passed_over_and_counted(self, cell: Any) -> None:
        assert [each.number for each in read(cell, code("x")).cells] == [2]

    @pytest.mark.parametrize(
        ("content", "line", "reason"),
        [
            (b"", 1, "it is no notebook: Expecting value"),
            (b'{\n"cells": [}', 2, "it is no notebook: "),
            (b'{\n\n"a": "\xff"}', 3, "it is no notebook: it is not in utf-8: invalid start byte"),
            (b"[]", 1, "it is no notebook of format 4: it has no cells"),
            (b'{"worksheets": []}', 1, "it is no notebook of format 4: it has no cells"),
            (b'{"cells": {}}', 1, "it is no notebook of format 4: it has no cells"),
        ],
    )
    def test_what_is_no_notebook(self, content: bytes, line: int, reason: str) -> None:
        with pytest.raises(SyntaxError, match=reason) as caught:
            read_notebook(content, path="a.ipynb")
        assert caught.value.lineno == line

    def test_what_is_nested_too_deeply(self) -> None:
        with pytest.raises(RecursionError):
            read_notebook(b"[" * 100_000, path="a.ipynb")


class TestWriting:
    @pytest.mark.parametrize(
        "style",
        [
            {"indent": 1},
            {"indent": 2},
            {"indent": "\t"},
            {"indent": None},
            {"indent": None, "separators": (",", ":")},
            {"ensure_ascii": True},
            {"sort_keys": True},
        ],
    )
    @pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
    def test_nothing_but_the_changed_line_changes(self, style: dict[str, Any], mark: bytes) -> None:
        cells = [markdown("# Über\u2028"), code(["x = 1\n", "%time y('é')\n", "z = 3"]), code("a = 1\n# ü\n"), code("")]
        before = mark + document(*cells, **style)
        notebook = read_notebook(before, path="a.ipynb")
        changed = rewritten(notebook, notebook.text.replace("x = 1", "x = 'ö'\nw = 2").replace("a = 1\n", ""))
        cells[1]["source"] = ["x = 'ö'\n", "w = 2\n", "%time y('é')\n", "z = 3"]
        cells[2]["source"] = "# ü\n"
        assert (changed.original, changed.content) == (before, mark + document(*cells, **style))
        assert changed.changes == (
            Change(
                label="a.ipynb:cell 2", before="x = 1\n%time y('é')\nz = 3".encode(), after="x = 'ö'\nw = 2\n%time y('é')\nz = 3".encode()
            ),
            Change(label="a.ipynb:cell 3", before="a = 1\n# ü\n".encode(), after="# ü\n".encode()),
        )

    def test_odd_json_stays_odd(self) -> None:
        first = b'{"nbformat" :4,"cells":[\r\n{ "source" : [ "x = 1\\n" ,"y\\u003d\\/ 2" ], "cell_type":"code","source":["x = '
        last = b'\\n" ,"y \\u003d 2" ] } , {"cell_type":"raw"}]}'
        notebook = read_notebook(first + b"1" + last, path="a.ipynb")
        assert rewritten(notebook, notebook.text.replace("x = 1", "x = 3")).content == first + b"3" + last

    @pytest.mark.parametrize(
        ("old", "new", "expected"),
        [
            (["x = 1"], "x = 1\ny\nz", ["x = 1\n", "y\n", "z"]),
            (["x = 1\n", "y"], "", []),
            (["x", " = 1\n"], "x = 2\n", ["x = 2\n"]),
            ("x = 1\r\ny\r\n", "x = 2\ny\n", "x = 2\r\ny\r\n"),
            (["x = 1\r\n", "y"], "x = 2\ny", ["x = 2\r\n", "y"]),
        ],
    )
    def test_a_source_stays_a_text_or_a_list_of_lines(self, old: Any, new: str, expected: Any) -> None:
        notebook = read(code(old))
        changed = rewritten(notebook, f'"halfstep cell 1"\n{new}\n')
        assert json.loads(changed.content)["cells"][0]["source"] == expected
        assert changed.content.replace(b"[\n   ]", b"[]") == document(code(expected))

    @pytest.mark.parametrize("source", ["x = 1\n%a \ud800 é\n", ["x = 1\n", "%a \ud800 é\n"]])
    def test_half_a_character_stays_escaped(self, source: Any) -> None:
        plain = {"cells": [markdown("é"), code(source)]}
        before = json.dumps(plain, ensure_ascii=False).replace("\ud800", "\\ud800").encode()
        notebook = read_notebook(before, path="a.ipynb")
        changed = rewritten(notebook, notebook.text.replace("x = 1", "x = 2"))
        assert changed.content == before.replace(b"x = 1", b"x = 2")
        (change,) = changed.changes
        assert (change.before, change.after) == (b"x = 1\n%a \\ud800 \xc3\xa9\n", b"x = 2\n%a \\ud800 \xc3\xa9\n")

    def test_magics_of_two_cells_are_told_apart(self) -> None:
        notebook = read(code("%a\nx = 1"), code("%b\nx = 1"))
        assert (
            notebook.rewriting(notebook.text.replace("magic_0", "magic_2").replace("magic_1", "magic_0").replace("magic_2", "magic_1"))
            is None
        )
        changed = rewritten(notebook, notebook.text.replace("x = 1", "x = 2"))
        assert changed.content == document(code("%a\nx = 2"), code("%b\nx = 2"))

    def test_a_magic_moves_with_its_block(self) -> None:
        notebook = read(code("with a:\n    x\n    !ls"))
        changed = rewritten(notebook, notebook.text.replace("    __half", "__half"))
        assert json.loads(changed.content)["cells"][0]["source"] == "with a:\n    x\n!ls"

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ('"halfstep cell 2"\n', ""),
            ('"halfstep cell 2"\n', '    "halfstep cell 2"\n'),
            ('"halfstep cell 2"\n', '"halfstep cell 2"\n"halfstep cell 2"\n'),
            ('"halfstep cell 1"\n', '#\n"halfstep cell 1"\n'),
            ("__halfstep_magic_0__", "pass"),
            ("y = 2\n", "y = 2\n__halfstep_magic_0__\n"),
            ('"halfstep cell 3"\n\n', '"halfstep cell 3"\nx = 1\n'),
        ],
    )
    def test_code_that_left_its_cell_cannot_be_put_back(self, old: str, new: str) -> None:
        notebook = read(code("%time\nx = 1"), code("y = 2"), code("x = = 1"))
        assert old in notebook.text
        assert notebook.rewriting(notebook.text.replace(old, new)) is None

    def test_an_indented_cell_stays_one(self) -> None:
        notebook = read(code(["    if a:\n", "        b\n", "\n", "    !ls"]))
        changed = rewritten(notebook, notebook.text.replace("    b\n", "    b\nc\n"))
        assert json.loads(changed.content)["cells"][0]["source"] == ["    if a:\n", "        b\n", "    c\n", "\n", "    !ls"]

    @pytest.mark.parametrize(
        ("source", "old", "new"),
        [
            ("  !ls\nif a:\n    b\nc", "if a:\n", "if a:\n    new\n"),
            ("  !ls\nif a:\n    b\nc", "c", "c\nnew"),
            ("    if a:\n        b\n    s = '''\nx\n'''\n", "        b\n", "        b\n        new\n"),
            ("    # c\n    if a:\n        b\n  # tail\n", "        b\n", "        b\n    new\n"),
            ("  %%time\n  if a:\n      b", "  if a:\n", "  if a:\n      new\n"),
            (">>> if a:\n...     b\n", "...     b\n", "...     b\n...     new\n"),
        ],
    )
    def test_only_lines_that_were_indented_are(self, source: str, old: str, new: str) -> None:
        notebook, wanted = read(code(source)), read(code(source.replace(old, new)))
        assert rewritten(notebook, wanted.text).content == document(code(source.replace(old, new)))

    def test_what_would_not_be_taken_away_again_cannot_be_put_back(self) -> None:
        notebook = read(code('    x = """\na\n"""\n    y'))
        assert notebook.rewriting(notebook.text.replace("a\n", "    a\n")) is None

    def test_prompts_stay(self) -> None:
        notebook = read(code(">>> if a:\n...     b\n"))
        changed = rewritten(notebook, notebook.text.replace("    b", "    c"))
        assert json.loads(changed.content)["cells"][0]["source"] == ">>> if a:\n...     c\n"

    def test_a_missing_last_line_end_is_no_change(self) -> None:
        notebook = read(code("x = 1"))
        assert rewritten(notebook, notebook.text.rstrip("\n")).changes == ()


@st.composite
def notebooks(draw: st.DrawFn) -> bytes:
    """Notebooks in any style, with cells that are Python, magics, and neither."""
    python = ["x = 1\n", "\n", "x = = 1\n", "'''\n", "if x:\n    y = 2\n", "# ü\u2028\n", "\ty\n", "z", "x \\\n"]
    lines = st.sampled_from([*python, "%time\n", "!ls é\n", "%%bash\n"])
    sources = st.lists(lines, max_size=5)
    cells = draw(st.lists(st.one_of(st.builds(code, sources | sources.map("".join)), st.builds(markdown, st.text())), max_size=4))
    return document(
        *cells,
        indent=draw(st.sampled_from([None, 0, 1, 2, "\t"])),
        ensure_ascii=True,
        separators=draw(st.sampled_from([None, (",", ":"), (" , ", " : ")])),
    )


@given(content=notebooks())
def test_the_same_code_comes_back_byte_for_byte(content: bytes) -> None:
    notebook = read_notebook(content, path="a.ipynb")
    if notebook.text:
        ast.parse(notebook.text)
    assert rewritten(notebook, notebook.text) == Rewriting(original=content, content=content, changes=())


@given(content=notebooks())
def test_only_the_changed_cell_changes(content: bytes) -> None:
    notebook = read_notebook(content, path="a.ipynb")
    changed = rewritten(notebook, notebook.text.replace("x = 1\n", "x = 2\n"))
    before, after = json.loads(content), json.loads(changed.content)
    for number, (old, new) in enumerate(zip(before["cells"], after["cells"], strict=True), start=1):
        if f"a.ipynb:cell {number}" in {change.label for change in changed.changes}:
            assert type(old["source"]) is type(new["source"])
            assert "".join(old["source"]).replace("x = 1\n", "x = 2\n") == "".join(new["source"])
        else:
            assert old == new
    if not changed.changes:
        assert changed.content == content
