"""Pages that are made from the rules."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from halfstep.errors import ConfigurationError
from halfstep.lint import pages as making
from halfstep.lint.pages import explained, index_page, main, pages, rule_page, rule_records
from halfstep.lint.rules import RULES
from tests.lint.toy_rules import TOYS, OldName, Talkative, Undecided

DOCS = Path(__file__).parents[2] / "docs" / "rules"


def test_the_pages_in_the_documentation_are_those_of_the_rules() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in DOCS.glob("*")}
    assert written == dict(pages(RULES)), "Run python -m halfstep.lint.pages docs/rules"


def test_a_page_says_everything() -> None:
    assert rule_page(OldName()) == (
        """\
# HS901 old_name

The scaler has an old name.

Severity: warning. The fix is safe.

## Why

Nobody knows `old_scaler` any more.

## Wrong

```python
x = 1
old_scaler.step()  # <- HS901
```

Fixed by `--fix`, which is safe:

```python
x = 1
new_scaler.step()
```

## Right as it is

```python
new_scaler.step()
```

## How to switch it off

For one statement, by a comment at the end of one of its lines:

```python
...  # halfstep: ignore[HS901]
```

For a file, by `# halfstep: ignore-file[HS901]` at its top; for a project, in `pyproject.toml`:

```toml
[tool.halfstep.lint]
ignore = ["HS901"]
```
"""
    )


def test_a_fix_that_decides_says_so() -> None:
    page = rule_page(Undecided())
    assert "Severity: error. The fix contains a decision, and is made with `--unsafe-fixes`. Not every case has one." in page
    assert "## Wrong 1\n" in page
    assert "Fixed by `--fix --unsafe-fixes`: look at what it decides:" in page
    assert "## Wrong 2\n\n```python\nunfixable = undecided_scaler  # <- HS902\n```\n\nNo fix is known for this.\n" in page
    assert "## Right as it is" not in page


def test_what_is_off_says_so() -> None:
    assert "Severity: info; off unless it is selected. No fix." in rule_page(Talkative())


def test_the_index_links_to_every_page() -> None:
    index = index_page(TOYS)
    linked = re.findall(r"^\| HS\d+ \| \[(\w+)\]\((\w+\.md)\)", index, re.MULTILINE)
    assert [name for name, _ in linked] == ["syntax_error", "old_name", "undecided", "talkative", "odd"]
    assert {"README.md", *(file for _, file in linked)} == set(pages(TOYS))
    assert "| HS902 | [undecided](undecided.md) | error | unsafe | The scaler \\| is undecided. |\n" in index
    assert "| HS901 | [old_name](old_name.md) | warning | safe | The scaler has an old name. |\n" in index


def test_records_have_pages_on_request() -> None:
    assert [record.code for record in rule_records(TOYS)] == ["HS000", "HS901", "HS902", "HS903", "HS904"]
    assert {record.page for record in rule_records(TOYS)} == {""}
    with_pages = rule_records(TOYS, page=rule_page)
    assert [record.page.split("\n")[0] for record in with_pages[:2]] == ["# HS000 syntax_error", "# HS901 old_name"]


@pytest.mark.parametrize(
    ("selector", "code"), [("HS901", "HS901"), ("hs901", "HS901"), ("old_name", "HS901"), ("HS000", "HS000"), ("syntax_error", "HS000")]
)
def test_a_rule_is_explained_by_code_or_name(selector: str, code: str) -> None:
    assert explained(selector, TOYS).startswith(f"# {code} ")


@pytest.mark.parametrize(("selector", "hint"), [("HS9", ""), ("old_nam", " Did you mean 'old_name'?"), ("ALL", ""), ("", "")])
def test_what_is_no_rule_cannot_be_explained(selector: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^There is no rule '{selector}'\.{re.escape(hint)}.* Name one by its code or its name"):
        explained(selector, TOYS)


def test_pages_are_written_and_old_ones_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "RULES", TOYS)
    folder = tmp_path / "docs" / "rules"
    folder.mkdir(parents=True)
    (folder / "gone.md").write_text("It was a rule once.")
    (folder / "notes.txt").write_text("Keep.")
    main([str(folder)])
    assert sorted(path.name for path in folder.iterdir()) == sorted([*pages(TOYS), "notes.txt"])
    assert (folder / "old_name.md").read_text() == rule_page(OldName())


def test_it_is_a_command(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "halfstep.lint.pages", str(tmp_path / "rules")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(list((tmp_path / "rules").glob("*.md"))) == len(RULES) + 2


@pytest.mark.parametrize("words", [[], ["a", "b"]])
def test_it_takes_one_folder(words: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"Name one folder for the pages, such as docs/rules\."):
        main(words)
