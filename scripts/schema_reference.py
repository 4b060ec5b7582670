"""Write docs/reference/schema.md from the schema of a new, empty buffer, so that the two cannot differ.

`--check` writes nothing and exits 1 when the file is not what would be written.
"""

from __future__ import annotations

import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

import rftdata
from scripts import reference_page

PAGE = reference_page.FOLDER / "schema.md"
QUERY = Path(__file__).with_suffix(".sql")

HEADER = """\
# The schema `rft`

Generated from the database's own comments by `make docs`; do not edit. Users may write SQL against everything here.
`rft sql "select * from rft.v_experience limit 5"` is a way to start.
"""


def lines_of_a_new_buffer(query: Path) -> list[dict[str, Any]]:
    """Return the rows of a query, read from a file, in a new, empty buffer."""
    # PostgreSQL's socket path must be short, so not below the checkout.
    with tempfile.TemporaryDirectory(prefix="rft-schema-") as folder:
        buffer = rftdata.open(folder)
        try:
            return list(buffer.sql(query.read_text(encoding="utf-8")).to_pylist())
        finally:
            buffer.close()
            if buffer.server is not None:
                buffer.server.stop()


def render(lines: list[dict[str, Any]]) -> str:
    parts = [HEADER]
    for kind, of_kind in groupby(lines, key=lambda line: line["kind"]):
        parts.append(f"## {kind.capitalize()}s\n")
        for relation, of_relation in groupby(of_kind, key=lambda line: line["relation"]):
            rows = list(of_relation)
            body = values(rows) if kind == "enumeration" else column_table(kind, rows)
            parts.append(f"### `{relation}`\n\n{rows[0]['relation_comment']}\n\n{body}")
    return "\n".join(parts)


def values(rows: list[dict[str, Any]]) -> str:
    listed = ", ".join(f"`{row['name']}`" for row in rows)
    return f"Values: {listed}.\n"


def column_table(kind: str, rows: list[dict[str, Any]]) -> str:
    # For a view's columns PostgreSQL knows neither nullability nor defaults.
    facts = ["may be null", "default"] if kind == "table" else []
    described = ["meaning"] if any(row["comment"] for row in rows) else []
    head = ["column", "type", *facts, *described]
    out = [head, ["---"] * len(head)]
    for row in rows:
        default = f"`{row['default_value']}`" if row["default_value"] else ""
        cells = [f"`{row['name']}`", row["type"]]
        cells += ["" if row["not_null"] else "yes", default] if facts else []
        cells += [row["comment"]] if described else []
        out.append([cell.replace("|", "\\|").replace("\n", " ") for cell in cells])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in out)


if __name__ == "__main__":
    sys.exit(reference_page.main({PAGE: lambda: render(lines_of_a_new_buffer(QUERY))}, __doc__))
