"""Decisions are numbered in order, have a status, and pages that replace each other link to each other."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "decisions"
INDEX = (FOLDER / "README.md").read_text(encoding="utf-8")
PAGES = {path.name[:4]: path for path in sorted(FOLDER.glob("[0-9]*.md"))}
RELATIONS = {"superseded": "supersedes", "supersedes": "superseded", "continued": "continues", "continues": "continued"}


def status(number: str) -> str:
    """The line of a page with its status."""
    [line] = re.findall(r"^Status: (.+)$", PAGES[number].read_text(encoding="utf-8"), re.MULTILINE)
    return line


def relations(number: str) -> set[tuple[str, str]]:
    """The relations of a page to others, by its status: (verb, number of the other page)."""
    parts = re.split(r"\b(superseded|supersedes|continued|continues)\b", status(number))
    return {
        (verb, other)
        for verb, text in zip(parts[1::2], parts[2::2], strict=True)
        for other in re.findall(r"\[(\d{4})\]", text)
    }


def test_the_index_lists_every_page_in_order_and_explains_every_gap() -> None:
    assert re.findall(r"^\| \[(\d{4})\]", INDEX, re.MULTILINE) == list(PAGES)
    missing = [f"{number:04}" for before, after in pairwise(map(int, PAGES)) for number in range(before + 1, after)]
    text = INDEX.split("| page |")[0]
    assert [number for number in missing if number not in text] == []


@pytest.mark.parametrize("number", PAGES)
def test_a_page_has_its_number_and_a_status_with_a_date(number: str) -> None:
    assert PAGES[number].read_text(encoding="utf-8").startswith(f"# {number}: ")
    assert re.match(r"(accepted|proposal|superseded|withdrawn), \d{4}-\d{2}-\d{2}\b", status(number))


@pytest.mark.parametrize("number", PAGES)
def test_pages_that_replace_or_continue_each_other_name_each_other(number: str) -> None:
    one_sided = [
        (verb, other) for verb, other in relations(number) if (RELATIONS[verb], number) not in relations(other)
    ]
    assert one_sided == []
