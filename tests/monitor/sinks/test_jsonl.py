"""A run as lines of JSON."""

from __future__ import annotations

from pathlib import Path

from halfstep.journal import encode_line
from halfstep.monitor import JsonlSink
from tests.monitor.toy_rules import step


def test_what_is_written_is_there_at_once(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "new")
    sink.write([step(1), step(2)])
    assert (tmp_path / "new" / "run.jsonl").read_text(encoding="utf-8") == encode_line(step(1)) + encode_line(step(2))
    sink.close()
    sink.write([step(3)])
    assert (tmp_path / "new" / "run.jsonl").read_text(encoding="utf-8") == encode_line(step(1)) + encode_line(step(2))
