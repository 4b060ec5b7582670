"""Differences of texts: complete, small, and in a bounded time."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftcore.studio.differences import difference

TEXTS = st.lists(st.sampled_from(["a", "b", " ", "\n", "word"]), max_size=12).map("".join)


def test_pieces_are_the_shortest_way_from_one_text_to_the_other() -> None:
    assert difference("the cat sat on a mat", "the dog sat on the mat") == [
        ("same", "the "),
        ("deleted", "cat"),
        ("inserted", "dog"),
        ("same", " sat on "),
        ("deleted", "a"),
        ("inserted", "the"),
        ("same", " mat"),
    ]
    assert difference("", "") == [] and difference("a", "a") == [("same", "a")]


@given(TEXTS, TEXTS)
def test_the_pieces_are_both_texts(old: str, new: str) -> None:
    pieces = difference(old, new)
    assert "".join(text for sort, text in pieces if sort != "inserted") == old
    assert "".join(text for sort, text in pieces if sort != "deleted") == new


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("".join(f"x a{i} " for i in range(5000)), "".join(f"x b{i} " for i in range(5000))),
        ("ha " * 10_000, "ha " * 4000 + "ho " + "ha " * 5999),
        ("ha ho " * 10_000, "ho ha " * 10_000),
        ("a\n" * 20_000, "b" + "a\n" * 19_000),
    ],
)
def test_texts_that_repeat_themselves_take_no_longer_than_others(old: str, new: str) -> None:
    began = time.process_time()
    pieces = difference(old, new)
    assert "".join(text for sort, text in pieces if sort != "deleted") == new
    # A second is ten times what it takes; the usual algorithms take minutes.
    assert time.process_time() - began < 1
