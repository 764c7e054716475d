"""Source code as it lies in a file."""

from __future__ import annotations

import ast
import codecs
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.lint.source import Change, Fault, Place, Rewriting, read_content, read_script, with_newlines

NEWLINES = ["\n", "\r\n", "\r"]


def lines() -> st.SearchStrategy[str]:
    """Lines of text that every encoding below can write."""
    return st.text(st.characters(min_codepoint=32, max_codepoint=126) | st.sampled_from("\t\f"), max_size=8)


def test_a_closed_standard_input_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(OSError, match="standard input is closed"):
        read_content(None)


class TestDecoding:
    @pytest.mark.parametrize(
        ("content", "text", "encoding"),
        [
            (b"", "", "utf-8"),
            (b"x = 1\n", "x = 1\n", "utf-8"),
            ("x = 'ü'".encode(), "x = 'ü'", "utf-8"),
            (codecs.BOM_UTF8 + b"x = 1\n", "x = 1\n", "utf-8-sig"),
            ("# coding: latin-1\nx = 'ü'\n".encode("latin-1"), "# coding: latin-1\nx = 'ü'\n", "iso-8859-1"),
            ("#!/usr/bin/env python\n# -*- coding: cp1252 -*-\n€\n".encode("cp1252"), None, "cp1252"),
            ("# vim: set fileencoding=gb2312 :\n汉\n".encode("gb2312"), "# vim: set fileencoding=gb2312 :\n汉\n", "gb2312"),
            (b"a\r\nb\rc\n\rd", "a\nb\nc\n\nd", "utf-8"),
            (b"a\x0bb\x0cc\xc2\x85d\xe2\x80\xa8e", "a\x0bb\x0cc\x85d\u2028e", "utf-8"),
        ],
    )
    def test_it_is_decoded_as_python_does_it(self, content: bytes, text: str | None, encoding: str) -> None:
        script = read_script(content, path="a.py")
        assert script.encoding == encoding
        assert script.text == (content.decode(encoding) if text is None else text)
        assert (script.path, script.faults, script.is_exact) == ("a.py", (), True)
        assert script.place(7) == Place(line=7, cell=None)

    @pytest.mark.parametrize(
        ("content", "line", "reason"),
        [
            (b"x = 1\n\n\ny = '\xff'\n", 4, "it is not in utf-8: invalid start byte"),
            (b"\xff", 1, "invalid or missing encoding declaration"),
            (b"# coding: nonsense\n", 1, "unknown encoding: nonsense"),
            (b"# coding: hex\n", 1, "it cannot be decoded from hex: 'hex' is not a text encoding"),
            (codecs.BOM_UTF8 + b"# coding: latin-1\n", 1, "encoding problem: utf-8"),
            (b"# coding: ascii\r\n\r\n\rx = '\xc3'\r\n", 4, "it is not in ascii: ordinal not in range"),
        ],
    )
    def test_what_cannot_be_decoded_is_told_with_its_line(self, content: bytes, line: int, reason: str) -> None:
        with pytest.raises(SyntaxError, match=reason) as caught:
            read_script(content, path="a.py")
        assert Fault.of(caught.value).place == Place(line=line)
        assert Fault.of(caught.value).reason.startswith(reason)


class TestRewriting:
    def test_nothing_but_the_text_changes(self) -> None:
        content = codecs.BOM_UTF8 + "# é\r\nx = 1\r\n".encode()
        script = read_script(content, path="a.py")
        changed = codecs.BOM_UTF8 + "# é\r\ny = 2\r\n".encode()
        assert script.rewriting("# é\ny = 2\n") == Rewriting(
            original=content, content=changed, changes=(Change(label="a.py", before=content, after=changed),)
        )

    @pytest.mark.parametrize(("encoding", "lacking"), [("ascii", "ü"), ("idna", "ü" * 99)])
    def test_a_character_that_the_encoding_lacks_cannot_be_written(self, encoding: str, lacking: str) -> None:
        script = read_script(f"# coding: {encoding}\nx = 1\n".encode(), path="a.py")
        assert script.rewriting(f"# coding: {encoding}\nx = '{lacking}'\n") is None

    def test_an_encoding_that_does_not_come_back_is_not_written(self) -> None:
        content = b"# coding: utf-7\nx = 'a+AGE-b'\n"  # An escaped letter, which nobody would escape.
        script = read_script(content, path="a.py")
        assert script.text.endswith("'aab'\n")
        assert not script.is_exact
        assert script.rewriting("y") is None

    @given(
        parts=st.lists(st.tuples(lines(), st.sampled_from(NEWLINES)), max_size=8),
        end=lines(),
        encoding=st.sampled_from(["utf-8", "utf-8-sig", "latin-1", "shift_jis", "cp1252"]),
    )
    def test_the_same_text_comes_back_byte_for_byte(self, parts: list[tuple[str, str]], end: str, encoding: str) -> None:
        first = "" if encoding.startswith("utf-8") else f"# coding: {encoding}\n"
        content = (first + "".join(line + newline for line, newline in parts) + end).encode(encoding)
        try:
            script = read_script(content, path="a.py")
        except SyntaxError:  # A cookie by chance.
            return
        assert "\r" not in script.text
        if script.is_exact:  # Shift JIS has two ways to write a backslash.
            rewriting = script.rewriting(script.text)
            assert rewriting is not None
            assert rewriting.content == content


class TestNewlines:
    @pytest.mark.parametrize(
        ("text", "like", "result"),
        [
            ("a\nb\n", "x\n", "a\nb\n"),
            ("a\nb\n", "", "a\nb\n"),
            ("a\nb\n", "a\r\nb\r\n", "a\r\nb\r\n"),
            ("a\nb", "a\rb", "a\rb"),
            ("a\nnew\nb\nc\n", "a\nb\r\nc\n", "a\nnew\nb\r\nc\n"),
            ("b\nc\n", "a\nb\r\nc\r\n", "b\r\nc\r\n"),
            ("a\nb\nc", "a\r\nb\nc", "a\r\nb\nc"),
            ("a\nb\nc\n", "a\r\nb\nc", "a\r\nb\nc\r\n"),
        ],
    )
    def test_lines_end_as_they_did(self, text: str, like: str, result: str) -> None:
        assert with_newlines(text, like=like) == result

    def test_many_lines_that_are_alike_do_not_take_for_ever(self) -> None:
        lines = [f"x = {number}" if number % 3 else "" for number in range(50_000)]
        like = "".join(line + NEWLINES[number % 7 == 0] for number, line in enumerate(lines))
        ended = with_newlines("\n".join(["first", *lines, "last", ""]), like=like)
        assert ended == f"first\n{like}last\n"

    @given(parts=st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.sampled_from(NEWLINES))), new=st.lists(st.sampled_from("abc")))
    def test_a_text_is_never_changed_itself(self, parts: list[tuple[str, str]], new: list[str]) -> None:
        like = "".join(line + newline for line, newline in parts)
        text = "\n".join(new)
        ended = with_newlines(text, like=like)
        assert ended.replace("\r\n", "\n").replace("\r", "\n") == text
        old = like.replace("\r\n", "\n").replace("\r", "\n")
        assert with_newlines(old, like=like).replace("\r\n", "\n").replace("\r", "\n") == old


class TestFaults:
    def fault(self, text: str) -> Fault:
        with pytest.raises((SyntaxError, ValueError)) as caught:
            ast.parse(text)
        return Fault.of(caught.value, cell=3, last_line=text.count("\n"))

    def test_the_place_is_the_parsers(self) -> None:
        assert self.fault("x = 1\nx = = 2\n") == Fault(place=Place(line=2, cell=3), column=5, reason="invalid syntax")

    def test_a_line_behind_the_last_is_the_last(self) -> None:
        assert self.fault("def f():\n").place.line == 1
        assert self.fault("x = (\n").place.line == 1

    def test_a_null_byte_and_half_a_character(self) -> None:
        assert "null bytes" in self.fault("x = '\0'\n").reason
        assert "surrogate" in self.fault("x = '\ud800'\n").reason

    @pytest.mark.parametrize("error", [RecursionError("maximum"), MemoryError()])
    def test_what_is_nested_too_deeply(self, error: Exception) -> None:
        assert Fault.of(error) == Fault(place=Place(line=1), column=1, reason="it is nested too deeply")
