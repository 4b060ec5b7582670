"""Help and messages name pages as `rft docs PAGE`, which works wherever the wheel is installed, and every named page exists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rftcore.cli import run_command
from rftcore.installation.pages import find_page, pages
from rftdata.errors import ConfigError
from tests.support.citations import CHECKOUT, all_cited, cited, cites_a_path, help_texts, messages

MARKDOWN = sorted((CHECKOUT / "docs").rglob("*.md"))


def test_every_page_that_the_program_names_exists() -> None:
    names = all_cited()
    # The walk finds help, messages and comments: one known page of each.
    assert {"install", "roles", "decisions/0014"} <= names
    missing = []
    for name in sorted(names):
        try:
            find_page(name)
        except ConfigError as error:
            missing.append(str(error))
    assert missing == []


def test_help_and_messages_name_no_path_of_the_checkout() -> None:
    assert [f"{where}: {text}" for where, text in (*help_texts(), *messages()) if cites_a_path(text)] == []


def test_citations_are_recognised() -> None:
    text = "see docs/how-to/roles.md, docs/decisions/0014. `rft docs move-data` lists them; `rft docs [PAGE]` prints"
    assert cited(text) == {"how-to/roles.md", "decisions/0014", "move-data"}
    assert cites_a_path(text) and not cites_a_path("`rft docs roles`")


def test_every_page_is_listed_with_its_title(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["docs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["path"] for row in listed] == [str(path) for path in MARKDOWN]
    assert all(row["title"] for row in listed)


@pytest.mark.parametrize("name", ["how-to/move-data", "how-to/move-data.md", "docs/how-to/move-data.md", "move-data"])
def test_a_page_is_printed_by_its_path_or_its_last_part(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["docs", name]) == 0
    assert capsys.readouterr().out == (CHECKOUT / "docs" / "how-to" / "move-data.md").read_text(encoding="utf-8")
    assert run_command(["docs", name, "--path"]) == 0
    assert Path(capsys.readouterr().out.strip()) == CHECKOUT / "docs" / "how-to" / "move-data.md"


def test_every_page_is_found_by_its_name() -> None:
    assert [find_page(page.name) for page in pages()] == list(pages())


def test_an_unknown_page_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["docs", "installation"]) == 2
    assert "the nearest is install" in capsys.readouterr().err
