"""The page about purges has a rule for every column that can hold a text: a new column without one fails here."""

from __future__ import annotations

import re
from pathlib import Path

from rftdata import Buffer
from rftdata.maintenance.erasure import TABLES_WITH_TEXTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "decisions" / "0045-purges-and-work-in-flight.md"
TEXTS = """
    SELECT c.relname || '.' || a.attname AS name FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
    WHERE c.relnamespace = 'rft'::regnamespace AND c.relkind = 'r' AND c.relname <> 'schema_version' AND a.attnum > 0 AND NOT a.attisdropped
      AND (a.atttypid IN ('text'::regtype, 'jsonb'::regtype, 'bytea'::regtype) OR format_type(a.atttypid, NULL) ~ '\\[\\]$')"""


def _columns(text: str, known: set[str]) -> set[str]:
    """The columns that a part of the page names: `table.column`, `.column` of the table before, `table.*` for those not named elsewhere."""
    found, table = set[str](), ""
    for name in re.findall(r"`(\w*\.[\w*]+)`", text):
        table = name.partition(".")[0] or table
        found.add(table + "." + name.partition(".")[2])
    stars = {name.removesuffix("*") for name in found if name.endswith(".*")}
    return {name for name in known if name in found or any(name.startswith(star) for star in stars)}


def test_every_column_of_text_has_a_rule(buffer: Buffer) -> None:
    known = set(buffer.sql(TEXTS)["name"].to_pylist())
    page = PAGE.read_text(encoding="utf-8")
    table = "\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    lists = page.split("none of them text of an experience")[1].split("## Alternatives")[0]
    purged, others = _columns(table, known), _columns(lists, known)
    assert sorted(known - purged - others) == [], "columns of text without a rule"
    assert sorted(purged & others) == [], "columns with two rules"
    named = {f"{a}" for a in re.findall(r"`(\w+\.\w+)`", table + lists)}
    assert sorted(name for name in named - known if not name.endswith(".py")) == [], "columns that do not exist"
    texts = {name.partition(".")[0] for name in purged}
    assert {f"rft.{name}" for name in texts} == set(TABLES_WITH_TEXTS), "tables that a purge rewrites"
