"""Tables of rows printed into a pipe."""

from __future__ import annotations

import pytest

from rftcore.cli.output import print_rows


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
