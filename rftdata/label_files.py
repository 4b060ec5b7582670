"""Files of rewards to set: CSV, JSONL or Parquet, with columns experience_id, reward and, optionally, turn and reason."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from rftdata.errors import QueryError
from rftdata.limits import INT4
from rftdata.postgres.values import storable


class RewardRow(NamedTuple):
    """A row of a file: a reward for an experience, or with a turn for that turn alone."""

    experience_id: int
    turn: int | None
    reward: float
    reason: str | None


def read_rewards(file: Path) -> list[RewardRow]:
    """Return the rows of a file.

    Raises:
        QueryError: unreadable file, missing or double column, a row without id or reward, a reward that is not a finite number.
    """
    table = _read(file)
    missing = [name for name in ("experience_id", "reward") if name not in table.column_names]
    if missing:
        raise QueryError(
            f"{file} lacks the column {' and '.join(missing)}",
            value=", ".join(table.column_names),
            allowed="experience_id, reward and, optionally, turn and reason",
            todo="rename the columns",
        )
    if twice := sorted({name for name in table.column_names if table.column_names.count(name) > 1}):
        raise QueryError(f"{file} has two columns {twice[0]}", todo="remove one of them")
    found = []
    for number, row in enumerate(table.to_pylist(), 1):
        try:
            key, value, turn = _id(row["experience_id"]), _number(row["reward"]), _turn(row.get("turn"))
        except (TypeError, ValueError) as error:
            raise QueryError(
                f"row {number} of {file} has no usable experience_id and reward",
                value=", ".join(str(row[name]) for name in ("experience_id", "reward", "turn") if name in row),
                allowed="a whole number and a number; a whole number or nothing in the column turn",
                todo="correct the row",
            ) from error
        if not math.isfinite(value):
            raise QueryError(
                f"row {number} of {file} has a reward for experience {key} that is not a finite number",
                value=value,
                allowed="a finite number",
                todo="correct the row; nothing was written",
            )
        found.append(RewardRow(key, turn, value, _reason(row.get("reason"))))
    return found


def _id(value: object) -> int:
    # int() alone also takes 1_0, digits of other scripts, true, and numbers that no id has.
    if not re.fullmatch(r"[0-9]{1,18}", str(value)):
        raise ValueError(value)
    return int(str(value))


def _turn(value: object) -> int | None:
    if _is_missing(value):
        return None
    # A column with empty cells is read as floating point.
    number = _id(int(value) if isinstance(value, float) and value.is_integer() else value)
    if number > INT4[1]:
        raise ValueError(value)
    return number


def _number(value: Any) -> float:
    if isinstance(value, bool) or (isinstance(value, str) and ("_" in value or not value.isascii())):
        raise ValueError(value)
    return float(value)


def _reason(value: object) -> str | None:
    """Convert a cell to a reason. A column of reasons may have been read as numbers or dates, and an empty cell as NaN."""
    return None if _is_missing(value) else storable(str(value).strip()) or None


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _check_quotes(file: Path) -> None:
    """Refuse quotes that do not end, or end before their value does. Arrow accepts both, and reads what follows a missing quote as a reason."""
    number = 0  # that of the header
    with file.open(encoding="utf-8-sig", errors="replace", newline="") as opened:
        try:
            for fields in csv.reader(opened, strict=True):
                number += bool(fields)
        except csv.Error as error:
            where = f"row {number} of {file}" if number else f"the header of {file}"
            raise QueryError(
                f"{where} is not CSV: {error}",
                allowed='a value in quotes ends with one, and a quote within it is written ""',
                todo="correct the row, or copy the whole file again; nothing was written",
            ) from error


def _read(file: Path) -> pa.Table:
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.read_table(file)
        if file.suffix in (".jsonl", ".ndjson"):
            import pyarrow.json

            return pyarrow.json.read_json(file)
        if file.suffix == ".csv":
            import pyarrow.csv

            _check_quotes(file)
            # Values as written: 007 is a reason and not the number 7, and nan is a wrong reward and not a missing one.
            options = pyarrow.csv.ConvertOptions(column_types={"reason": pa.string()}, null_values=[""])
            parsing = pyarrow.csv.ParseOptions(newlines_in_values=True)
            return pyarrow.csv.read_csv(file, parse_options=parsing, convert_options=options)
    except (OSError, pa.ArrowInvalid) as error:
        raise QueryError(
            f"{file} cannot be read: {' '.join(str(error).split())}", todo="correct the path or the file"
        ) from error
    raise QueryError(
        "labels are not read from this kind of file",
        value=str(file),
        allowed=".csv, .jsonl, .parquet",
        todo="convert it",
    )
