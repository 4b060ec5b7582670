"""Output of rows on a terminal, in a pipe, or as JSON.

If a result does not fit on a terminal side by side, it is shown record by record with long values cut. In a pipe nothing is
cut, and lines are as long as needed.
"""

from __future__ import annotations

import datetime
import decimal
import json
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_MAX_CELL = 60
_MAX_FIELD = 600


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=_plain))


def print_json_rows(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print rows as `print_json` prints a list of them, each as soon as it is there."""
    before = "["
    for row in rows:
        text = json.dumps(row, indent=2, ensure_ascii=False, default=_plain)
        print(before, textwrap.indent(text, "  "), sep="\n", end="")
        before = ","
    print("[]" if before == "[" else "\n]")


def print_rows(
    found: Sequence[Mapping[str, Any] | DataclassInstance],
    columns: Sequence[str] | Mapping[str, str] | None = None,
    *,
    as_json: bool = False,
) -> None:
    """Print rows.

    Args:
        found: rows as mappings, or as objects of a dataclass.
        columns: names in order, required if there may be no row; a mapping gives each name its title.
    """
    rows = [row if isinstance(row, Mapping) else vars(row) for row in found]
    names = list(columns if columns is not None else rows[0] if rows else [])
    titles = list(columns.values()) if isinstance(columns, Mapping) else names
    if as_json:
        print_json([{name: row[name] for name in names} for row in rows])
        return
    console = Console(highlight=False)
    cells = [[_cell(row[name]) for name in names] for row in rows]
    if not console.is_terminal:
        width = (
            3 + sum(3 + max(len(title), *(len(line[i]) for line in cells)) for i, title in enumerate(titles))
            if cells
            else 200
        )
        console = Console(highlight=False, width=max(width, 80))
        console.print(_table(titles, cells, None))
    else:
        short = [[cut(cell, _MAX_CELL) for cell in line] for line in cells]
        table = _table(titles, short, _MAX_CELL)
        if table.__rich_measure__(console, console.options.update(max_width=10_000)).maximum <= console.width:
            console.print(table)
        else:
            _print_records(console, titles, cells)
    print(f"({len(rows)} row{'' if len(rows) == 1 else 's'})")


def _table(names: Sequence[str], cells: Sequence[Sequence[str]], max_width: int | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(names):
        numeric = bool(cells) and all(_is_number(line[i]) or line[i] == "NULL" for line in cells)
        table.add_column(name, justify="right" if numeric else "left", no_wrap=True, max_width=max_width)
    for line in cells:
        table.add_row(*(Text(cell, style="dim") if cell == "NULL" else Text(cell) for cell in line))
    return table


def _print_records(console: Console, names: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    for number, line in enumerate(cells, 1):
        console.rule(f"row {number}", align="left", style="dim")
        grid = Table(box=None, show_header=False, pad_edge=False)
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, cell in zip(names, line):
            grid.add_row(name, Text(cut(cell, _MAX_FIELD), style="dim" if cell == "NULL" else ""))
        console.print(grid)


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, decimal.Decimal) and value.is_finite() and value == value.to_integral_value():
        return str(int(value))
    if isinstance(value, float | decimal.Decimal):
        return f"{value:.6g}"
    if isinstance(value, datetime.datetime):
        return value.isoformat(sep=" ", timespec="seconds")
    if isinstance(value, (dict, list)):
        value = json.dumps(value, ensure_ascii=False, default=_plain)
    return str(value).replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")


def cut(text: str, length: int) -> str:
    """Shorten a text that is too long, with an ellipsis."""
    return text if len(text) <= length else text[: length - 1] + "…"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _plain(value: Any) -> Any:
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, (datetime.datetime, datetime.date)):
        return value.isoformat()
    return str(value)


def warn(text: str) -> None:
    """Print one line on stderr."""
    print(f"rft: {text}", file=sys.stderr)
