"""The codec with which MCP clients read whole lines."""

from __future__ import annotations

import codecs
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftcore.tools.line_codec import UTF_8_LINES


def decoded(pieces: list[bytes], errors: str = "strict") -> list[str]:
    decoder = codecs.getincrementaldecoder(UTF_8_LINES)(errors)
    return [decoder.decode(piece) for piece in pieces] + [decoder.decode(b"", final=True)]


@given(text=st.text(st.sampled_from("aé日\n\r🙂"), max_size=40), cuts=st.lists(st.integers(0, 80), max_size=9))
def test_lines_come_whole_however_they_are_cut(text: str, cuts: list[int]) -> None:
    data = text.encode()
    assert data.decode(UTF_8_LINES) == text and text.encode(UTF_8_LINES) == data
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    *found, rest = decoded([data[start:end] for start, end in pairwise(places)])
    assert "".join([*found, rest]) == text and "\n" not in rest
    assert all(piece.endswith("\n") for piece in found if piece)


def test_a_long_line_is_returned_once() -> None:
    found = decoded([b"a" * 4096] * 2500 + [b"b\nc"])
    assert [len(piece) for piece in found if piece] == [2500 * 4096 + 2, 1]


def test_bytes_that_are_no_text_are_refused_or_replaced_as_in_utf_8() -> None:
    with pytest.raises(UnicodeDecodeError):
        decoded([b"\xff\n"])
    assert decoded([b"\xff", b"a\n"], "replace") == ["", "�a\n", ""]
