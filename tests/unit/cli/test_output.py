"""Tables of rows printed into a pipe."""

from __future__ import annotations

import json

import pytest

from rftcore.cli.output import print_json, print_json_rows, print_rows


def test_columns_are_aligned_by_the_width_of_characters_and_numbers_are_on_the_right(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_rows(
        [
            {"n": 1, "text": "漢字", "reward": 0.5},
            {"n": 1000, "text": "abcdefg\nh", "reward": None},
        ]
    )
    assert capsys.readouterr().out == (
        "   n  text        reward\n   1  漢字           0.5\n1000  abcdefg\\nh    NULL\n(2 rows)\n"
    )


def test_a_result_without_rows_has_its_titles(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows([], {"n": "number", "text": "text"})
    assert capsys.readouterr().out == "number  text\n(0 rows)\n"


def test_json_has_no_character_that_a_terminal_obeys_and_keeps_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"text": "\x1b[2J \x7f \x9b31m \u202egnp.exe\u202c \u2028 \ud800 été 日本"}]
    printed = []
    for print_rows_as_json in (print_json, print_json_rows):
        print_rows_as_json(rows)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and json.loads(printed[0]) == rows
    assert printed[0].replace("\n", "").isprintable() and "été 日本" in printed[0]
    assert r"\u001b[2J \u007f \u009b31m \u202egnp.exe\u202c \u2028 \ud800" in printed[0]
