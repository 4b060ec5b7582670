"""Write docs/reference/rights.md, every right of every role, from the catalogue of a new, empty buffer.

`--check` writes nothing and exits 1 when the file is not what would be written.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from scripts import reference_page
from scripts.schema_reference import lines_of_a_new_buffer

PAGE = reference_page.FOLDER / "rights.md"
QUERY = Path(__file__).with_suffix(".sql")
READERS = ("rft_reader", "rft_labeler", "rft_worker")

HEADER = """\
# Rights in the schema `rft`

Generated from the database's own catalogue by `make docs`; do not edit. A test compares it with the catalogue, so that no right is given unseen. What
the roles are for is in [how-to/roles.md](../how-to/roles.md), and who is trusted with what in [security.md](../security.md). The schema's owner
has every right. `rft_reader`, `rft_labeler` and `rft_worker` may read every table and view, except where "no SELECT" stands; the tables below list what
they may do besides.
"""
HEADINGS = {
    "table": "Tables",
    "view": "Views",
    "sequence": "Sequences",
    "function with the owner's rights": "Functions that run with the owner's rights",
    "function": "Functions that run with their caller's rights",
}


def render(lines: list[dict[str, Any]]) -> str:
    parts = [HEADER]
    for kind, of_kind in groupby(lines, key=lambda line: line["kind"]):
        rows = []
        for name, of_name in groupby(of_kind, key=lambda line: line["name"]):
            rights = {line["role"]: line["rights"] for line in of_name}
            rows += [[f"`{name}`", role, shown] for role, shown in besides_reading(kind, rights) if shown]
        if rows:
            table = [[kind.partition(" ")[0], "role", "may"], ["---"] * 3, *rows]
            parts.append(f"## {HEADINGS[kind]}\n")
            parts.append("".join(f"| {' | '.join(cells)} |\n" for cells in table))
    return "\n".join(parts)


def besides_reading(kind: str, rights: dict[str, str]) -> list[tuple[str, str]]:
    """Return the rights of each role without the one that every role has; roles with the same rights together."""
    if kind not in ("table", "view"):
        shared: dict[str, list[str]] = {}
        for role, granted in rights.items():
            shared.setdefault(granted, []).append(role)
        return [(", ".join(roles), granted) for granted, roles in shared.items()]
    besides = []
    for role in ("PUBLIC", *READERS):
        granted = rights.get(role, "")
        reads = granted.split(", ")[0] == "SELECT"
        if role == "PUBLIC":
            besides.append((role, granted))
        elif reads:
            besides.append((role, granted.removeprefix("SELECT").removeprefix(", ")))
        else:
            besides.append((role, f"no SELECT{granted and f'; {granted}'}"))
    return besides


if __name__ == "__main__":
    sys.exit(reference_page.main({PAGE: lambda: render(lines_of_a_new_buffer(QUERY))}, __doc__))
