"""Files of annotations: imported as one batch, exported as they stand.

Tables (.jsonl, .csv, .parquet) are described in `rows`, the JSON of Label Studio and of Argilla in modules of their own. An import stores only what
does not stand already, so repeating it changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rftdata.annotations import argilla, label_studio
from rftdata.annotations.annotation import Annotation, AnnotationBatch, annotate
from rftdata.annotations.exported import LeftOut, targets_of
from rftdata.annotations.kinds import LabelKind, kinds
from rftdata.annotations.rows import read_rows, write_rows
from rftdata.buffer import Buffer
from rftdata.errors import QueryError
from rftdata.files.durable import write_whole
from rftdata.postgres.database import Row

Format = Literal["rows", "label-studio", "argilla"]
_TABLES = (".jsonl", ".ndjson", ".csv", ".parquet")


@dataclass(frozen=True)
class AnnotationExport:
    """The result of an export.

    Attributes:
        num_annotations: how many stand and were read.
        left_out: sentences about what the format cannot hold.
        files: what was written.
    """

    num_annotations: int
    left_out: tuple[str, ...]
    files: tuple[Path, ...]


def import_annotations(
    buffer: Buffer, file: Path, *, author: str, reason: str | None = None, with_judges: bool = False
) -> AnnotationBatch:
    """Store the annotations of a file as one batch of the source `import`; what stands already is not stored again.

    Args:
        author, reason: of annotations for which the file names none.
        with_judges: import predictions and suggestions of models, too, as annotations of the source `judge`.

    Raises:
        QueryError: unreadable file, or a row that the database refuses; nothing is stored.
    """
    known = {kind.kind: kind for kind in kinds(buffer)}
    found = _read(buffer, file, known, with_judges)
    if not found:
        raise QueryError(f"{file} has no annotation", todo="nothing was stored")
    if reason is not None:
        found = [a if a.reason is not None else Annotation(**{**vars(a), "reason": reason}) for a in found]
    return annotate(buffer, found, author=author, source="import", skip_unchanged=True)


def export_annotations(
    buffer: Buffer,
    file: Path,
    *,
    of_kinds: Sequence[str] | None = None,
    run: str | None = None,
    to: Format | None = None,
) -> AnnotationExport:
    """Write the annotations that stand to a file, which is replaced as a whole.

    Args:
        of_kinds: only these kinds.
        run: only about experiences, rollouts and groups of this run.
        to: the format; by default that of the file's name, and `label-studio` for .json.

    Raises:
        QueryError: an unknown kind or run, or a name of a file that does not fit the format.
    """
    known = {kind.kind: kind for kind in kinds(buffer)}
    to = _format(file, to)
    run_id = None if run is None else buffer.find_run(run).run_id
    rows = buffer.database.fetch(
        "exported_annotations", kinds=None if of_kinds is None else list(of_kinds), run_id=run_id
    )
    if unknown := sorted(set(of_kinds or ()) - set(known) - {row["kind"] for row in rows}):
        raise QueryError("there is no such kind of label", value=unknown[0], allowed=", ".join(known))
    left_out = LeftOut()
    files = [file]
    if to == "rows":
        write_rows(file, rows)
    elif to == "argilla":
        _write_json(file, argilla.write_records(targets_of(buffer, rows), left_out))
    else:
        _write_json(file, label_studio.write_tasks(targets_of(buffer, rows), left_out))
        files.append(file.with_suffix(".xml"))
        shown = [kind for kind in known.values() if of_kinds is None or kind.kind in of_kinds]
        write_whole(files[-1], label_studio.interface(shown, _num_turns(rows)))
    return AnnotationExport(len(rows), tuple(left_out.sentences), tuple(files))


def is_annotations(file: Path) -> bool:
    """Return whether a file names annotations rather than rewards: JSON of another tool, or a table with a column `kind`."""
    if file.suffix == ".json":
        return True
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet

            return "kind" in pyarrow.parquet.read_schema(file).names
        with file.open(encoding="utf-8-sig", errors="replace") as opened:
            first = next((line for line in opened if line.strip()), "")
        if file.suffix == ".csv":
            return "kind" in [name.strip().strip('"') for name in first.split(",")]
        row = json.loads(first)
        return isinstance(row, dict) and "kind" in row
    except (OSError, ValueError):
        return False  # the reader of rewards reports it


def _read(buffer: Buffer, file: Path, known: dict[str, LabelKind], with_judges: bool) -> list[Annotation]:
    if file.suffix in _TABLES:
        return read_rows(file, known)
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise QueryError(
            f"{file} cannot be read: {' '.join(str(error).split())}",
            allowed=", ".join((*_TABLES, ".json of Label Studio or Argilla")),
            todo="correct the path or the file",
        ) from error
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise QueryError(f"{file} is no list of tasks or records", allowed="the JSON of Label Studio or Argilla")
    try:
        return _annotations_of(buffer, content, known, with_judges)
    except (AttributeError, TypeError, ValueError) as error:
        raise QueryError(
            f"{file} has not the shape of Label Studio's or Argilla's JSON: {error}",
            todo="correct it; nothing was stored",
        ) from error


def _annotations_of(
    buffer: Buffer, items: list[dict[str, Any]], known: dict[str, LabelKind], with_judges: bool
) -> list[Annotation]:
    if all("fields" in item for item in items):
        return argilla.read_records(items, known, with_judges)
    ids = {int(item["data"]["target_id"]) for item in items if _has_spans(item)}
    rows = buffer.database.fetch_by_index("texts_of_targets", targets=["experience"] * len(ids), target_ids=sorted(ids))
    texts = {row["target_id"]: row["responses"][0]["response"] for row in rows}
    return label_studio.read_tasks(items, known, texts, with_judges)


def _has_spans(task: dict[str, Any]) -> bool:
    data = task.get("data")
    if not isinstance(data, dict) or not str(data.get("target_id", "")).isdigit():
        return False
    given = [*(task.get("annotations") or ()), *(task.get("predictions") or ())]
    return any(item.get("type") == "labels" for one in given for item in one.get("result") or ())


def _format(file: Path, to: Format | None) -> Format:
    is_table = file.suffix in _TABLES
    chosen: Format = to or ("rows" if is_table else "label-studio")
    if (chosen == "rows") != is_table or not (is_table or file.suffix == ".json"):
        raise QueryError(
            "the name of the file does not fit the format",
            value=file.name,
            allowed=".jsonl, .csv or .parquet for rows, .json for label-studio and argilla",
        )
    return chosen


def _write_json(file: Path, content: object) -> None:
    write_whole(file, json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def _num_turns(rows: Sequence[Row]) -> int:
    return max((turn["turn"] + 1 for row in rows if row["type"] == "turns" for turn in row["value"]), default=1)
