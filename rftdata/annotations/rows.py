"""Tables of annotations: JSONL, CSV and Parquet, one annotation a row.

The columns kind, target_id and value are needed; author, source, reason, confidence, seconds, model and target are optional, and others are ignored. In
JSONL a value is JSON; in CSV and Parquet it is JSON as a text, or the words themselves for a choice, a text or an edit.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from rftdata.annotations.annotation import Annotation, Source
from rftdata.annotations.kinds import LabelKind, refuse_other_target
from rftdata.annotations.values import value_of_text
from rftdata.errors import QueryError
from rftdata.files.durable import draft_folder
from rftdata.postgres.database import Row

NEEDED = ("kind", "target_id", "value")
COLUMNS = (
    ("annotation_id", pa.int64()),
    ("kind", pa.string()),
    ("kind_version", pa.int64()),
    ("type", pa.string()),
    ("target", pa.string()),
    ("target_id", pa.int64()),
    ("group_id", pa.int64()),
    ("run", pa.string()),
    ("value", pa.string()),
    ("source", pa.string()),
    ("author", pa.string()),
    ("session_user_name", pa.string()),
    ("model", pa.string()),
    ("confidence", pa.float64()),
    ("reason", pa.string()),
    ("shown", pa.string()),
    ("seconds", pa.float64()),
    ("label_batch_id", pa.int64()),
    ("made_at", pa.timestamp("us", "UTC")),
)
"""The columns of an export. `value` and `shown` are JSON: as texts in CSV and Parquet, as they are in JSONL."""
_KEPT: tuple[Source, ...] = ("judge", "rule")


def read_rows(file: Path, kinds: Mapping[str, LabelKind]) -> list[Annotation]:
    """Return the annotations of a file.

    Raises:
        QueryError: unreadable file, a missing column, a row that is no annotation.
    """
    annotations = []
    for number, row in enumerate(_rows(file), 1):
        where = f"row {number} of {file}"
        if missing := [name for name in NEEDED if row.get(name) in (None, "")]:
            raise QueryError(
                f"{where} lacks {' and '.join(missing)}",
                value=", ".join(row),
                allowed="kind, target_id, value and, optionally, author, source, reason, confidence, seconds, model",
                todo="correct the row; nothing was stored",
            )
        kind = kinds.get(str(row["kind"]))
        if kind is not None:
            refuse_other_target(where, kind, row.get("target") or None)
        value = row["value"]
        if isinstance(value, str) and file.suffix not in (".jsonl", ".ndjson"):
            value = value_of_text(value, kind, f"the value of {where}")
        source = str(row.get("source") or "import")
        annotations.append(
            Annotation(
                str(row["kind"]),
                _whole(row["target_id"], where),
                value,
                reason=_text(row.get("reason")),
                seconds=_number(row.get("seconds"), where),
                confidence=_number(row.get("confidence"), where),
                model=_text(row.get("model")),
                author=_text(row.get("author")),
                source=next((kept for kept in _KEPT if kept == source), "import"),
            )
        )
    return annotations


def write_rows(file: Path, rows: Iterable[Row]) -> int:
    """Write annotations to a JSONL, CSV or Parquet file, which is replaced as a whole; return their number."""
    names = [name for name, _ in COLUMNS]
    plain = [{name: row[name] for name in names} for row in rows]
    with draft_folder(file) as folder:
        part = folder / file.name
        if file.suffix == ".parquet":
            columns = [pa.array([_cell(row[name], name) for row in plain], kind) for name, kind in COLUMNS]
            pyarrow.parquet.write_table(pa.table(columns, names=names), part)
        elif file.suffix == ".csv":
            with part.open("w", encoding="utf-8", newline="") as opened:
                writer = csv.writer(opened)
                writer.writerow(names)
                writer.writerows([_cell(row[name], name) for name in names] for row in plain)
        else:
            with part.open("w", encoding="utf-8") as opened:
                for row in plain:
                    line = {**row, "made_at": row["made_at"].isoformat()}
                    opened.write(json.dumps(line, ensure_ascii=False) + "\n")
        part.replace(file)
    return len(plain)


def _cell(value: Any, name: str) -> Any:
    return json.dumps(value, ensure_ascii=False) if name in ("value", "shown") and value is not None else value


def _rows(file: Path) -> Iterator[Mapping[str, Any]]:
    try:
        if file.suffix == ".parquet":
            yield from pyarrow.parquet.read_table(file).to_pylist()
        elif file.suffix == ".csv":
            with file.open(encoding="utf-8-sig", newline="") as opened:
                yield from _named(csv.reader(opened, strict=True), file)
        else:
            with file.open(encoding="utf-8") as opened:
                for number, line in enumerate(opened, 1):
                    if line.strip():
                        row = json.loads(line)
                        if not isinstance(row, dict):
                            raise QueryError(f"line {number} of {file} is no JSON object", value=line[:100])
                        yield row
    except (OSError, pa.ArrowInvalid, ValueError, RecursionError, csv.Error) as error:
        raise QueryError(
            f"{file} cannot be read: {' '.join(str(error).split())}",
            todo="correct the path or the file; nothing was stored",
        ) from error


def _named(lines: Iterable[Sequence[str]], file: Path) -> Iterator[Mapping[str, Any]]:
    header: Sequence[str] | None = None
    for number, cells in enumerate(lines):
        if header is None:
            header = cells
        elif cells and len(cells) != len(header):
            raise QueryError(f"row {number} of {file} has {len(cells)} cells", allowed=f"{len(header)}, as the header")
        elif cells:
            yield dict(zip(header, cells, strict=True))


def _whole(value: Any, where: str) -> int:
    # int() alone also takes 1_0, digits of other scripts, true, and numbers that no id has.
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise QueryError(f"{where} has a target_id that is no id", value=value, allowed="a whole number")
    return int(text)


def _number(value: Any, where: str) -> float | None:
    if _is_missing(value):
        return None
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise QueryError(
            f"{where} has a number that is none", value=value, todo="correct the row; nothing was stored"
        ) from error


def _text(value: Any) -> str | None:
    return None if _is_missing(value) else str(value)


def _is_missing(value: object) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))
