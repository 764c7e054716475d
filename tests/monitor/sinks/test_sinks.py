"""The table of sinks."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfstep.errors import ConfigurationError
from halfstep.monitor.sinks import SINKS, AbstractSink, ConsoleSink, JsonlSink, check_sinks, open_sinks
from tests.monitor.toy_rules import step


def test_every_name_opens_a_sink(tmp_path: Path) -> None:
    check_sinks([*SINKS])
    for name in SINKS:
        (sink,) = open_sinks([name], folder=tmp_path / name)
        assert isinstance(sink, AbstractSink)
        sink.close()
        assert (tmp_path / name).exists() == (name not in {"console", "alerts"})


def test_each_sink_is_opened_once_and_the_console_shows_alerts_already(tmp_path: Path) -> None:
    sinks = open_sinks(["alerts", "jsonl", "console", "jsonl", "console"], folder=tmp_path)
    assert [type(sink) for sink in sinks] == [JsonlSink, ConsoleSink]
    assert [type(sink) for sink in open_sinks(["alerts"], folder=tmp_path)] == [ConsoleSink]
    for sink in sinks:
        sink.close()


def test_when_one_cannot_be_opened_the_others_are_closed(tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text("a,b\n", encoding="utf-8")
    jsonl, *_ = open_sinks(["jsonl"], folder=tmp_path)
    with pytest.raises(ConfigurationError, match="its columns are 'a,b'"):
        open_sinks([jsonl, "csv"], folder=tmp_path)
    jsonl.write([step(1)])
    assert (tmp_path / "run.jsonl").read_bytes() == b""
