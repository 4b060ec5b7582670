"""Labels as columns of a batch: `label_KIND` sums up what people said about an experience, its rollout, its group or its task.

A column is a struct with the same fields for every kind, so a chain can be built and checked without a buffer. It is never null: without
annotations `count` is 0. Only annotations that stand are counted. An adjudication decides alone. Answers of judges and rules are
suggestions and are not counted.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from rftdata.errors import ConfigError
from rftdata.postgres.database import Database, Row

LABEL_TYPE = pa.struct(
    [
        ("count", pa.int64()),
        ("mean", pa.float64()),
        ("majority", pa.string()),
        ("agreement", pa.float64()),
        ("values", pa.list_(pa.string())),
        ("means", pa.string()),
        ("suggestion", pa.string()),
    ]
)
"""Fields of a label column. `count`: annotations by people. `mean`: of numbers, of true as 1 and false as 0, of the criteria of rubrics, of
turns; of a ranking the share of the other answers that this one beats (a tie counts half). `majority`: the most frequent choice, or true or
false; null if two are equally frequent; of tags, as JSON, those that more than half of the people gave. `agreement`: share of people with the
most frequent choice, true or false. `values`: each value, the oldest first: a choice or text as it is, others as JSON. `means`: of
rubrics, as JSON, the mean of each criterion. `suggestion`: the newest value by a judge or rule, written like `values`."""

_COLUMN = re.compile(r"label_([a-z][a-z0-9_]{0,62})")
_SUGGESTING = frozenset({"judge", "rule"})


def label_kinds(columns: Iterable[str]) -> list[str]:
    """Return the kinds that columns show, sorted; other columns are ignored."""
    return sorted({match[1] for name in columns if (match := _COLUMN.fullmatch(name))})


def label_column(kind: str) -> str:
    """Return the name of the column that shows a kind."""
    return f"label_{kind}"


def label_field(column: str) -> pa.Field:
    """Return the field of a label column."""
    return pa.field(column, LABEL_TYPE)


def check_kinds(database: Database, kinds: Collection[str]) -> None:
    """Refuse kinds that were never defined.

    Raises:
        ConfigError: names the first one, and all kinds that exist.
    """
    if not kinds:
        return
    known = [row["kind"] for row in database.fetch("all_label_kinds")]
    for kind in sorted(set(kinds) - set(known)):
        raise ConfigError(
            f"a stage reads the column {label_column(kind)!r}, and there is no such kind of label",
            value=kind,
            allowed=", ".join(known) or "no kind is defined yet",
            todo="define it under labels.kinds or with `rft label kind define`, or give the column another name",
        )


def newest_annotations(database: Database, group_ids: Sequence[int], kinds: Sequence[str]) -> dict[int, int]:
    """Return the newest annotation of these kinds for each group that has one, standing or not."""
    if not kinds:
        return {}
    rows = database.fetch_by_index("newest_annotations", group_ids=list(group_ids), kinds=list(kinds))
    return {row["group_id"]: row["annotation_id"] for row in rows}


def with_labels(database: Database, table: pa.Table, kinds: Sequence[str]) -> pa.Table:
    """Return a batch of experiences with a column for each kind.

    Raises:
        ConfigError: a kind was never defined.
    """
    if not kinds:
        return table
    check_kinds(database, kinds)
    ids = table["experience_id"].to_pylist()
    found: dict[tuple[str, int], list[Row]] = {}
    for row in database.fetch_by_index("labels_of_experiences", experience_ids=ids, kinds=list(kinds)):
        found.setdefault((row["kind"], row["experience_id"]), []).append(row)
    for kind in kinds:
        values = [_summary(key, found.get((kind, key), ())) for key in ids]
        table = table.append_column(label_field(label_column(kind)), pa.array(values, LABEL_TYPE))
    return table


def without_labels(table: pa.Table, columns: Collection[str]) -> pa.Table:
    """Return a batch with label columns that have no annotation, for checks without a buffer."""
    for kind in label_kinds(columns):
        values = pa.array([_summary(0, ())] * table.num_rows, LABEL_TYPE)
        table = table.append_column(label_field(label_column(kind)), values)
    return table


def _summary(experience_id: int, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the fields of a label column for the standing annotations about one experience."""
    suggested = [row["value"] for row in rows if row["source"] in _SUGGESTING]
    counted = [row for row in rows if row["source"] not in _SUGGESTING]
    counted = [row for row in counted if row["source"] == "adjudication"][-1:] or counted
    values = [row["value"] for row in counted]
    fields: dict[str, Any] = {}
    if counted and counted[0]["type"] == "ranking":
        values = [value for value in values if _rank(value, experience_id) is not None]
        fields = {"mean": _mean([_rank(value, experience_id) for value in values])}
    elif counted and counted[0]["type"] in _FIELDS:
        fields = _FIELDS[counted[0]["type"]](values)
    suggestion = _text(suggested[-1]) if suggested else None
    return {"count": len(values), "values": [_text(value) for value in values], "suggestion": suggestion, **fields}


def _words(values: list[Any]) -> dict[str, Any]:
    counts = Counter(map(_text, values)).most_common(2)
    is_tie = len(counts) == 2 and counts[0][1] == counts[1][1]
    return {"majority": None if is_tie else counts[0][0], "agreement": counts[0][1] / len(values)}


def _truths(values: list[Any]) -> dict[str, Any]:
    return {"mean": _mean(values), **_words(values)}


def _tags(values: list[Any]) -> dict[str, Any]:
    counts = Counter(tag for value in values for tag in value)
    return {"majority": json.dumps(sorted(tag for tag, count in counts.items() if 2 * count > len(values)))}


def _rubrics(values: list[Any]) -> dict[str, Any]:
    # Versions of a kind may have different criteria.
    criteria = sorted({name for value in values for name in value})
    means = {name: _mean([value[name] for value in values if name in value]) for name in criteria}
    return {"mean": _mean(list(means.values())), "means": json.dumps(means)}


_FIELDS: dict[str, Callable[[list[Any]], dict[str, Any]]] = {
    "bool": _truths,
    "number": lambda values: {"mean": _mean(values)},
    "choice": _words,
    "tags": _tags,
    "rubric": _rubrics,
    "turns": lambda values: {"mean": _mean([turn["value"] for value in values for turn in value])},
}


def _rank(ranking: Mapping[str, Any], experience_id: int) -> float | None:
    """Return the share of the other ranked experiences that one beats; None if it is not ranked."""
    order = ranking["order"]
    behind = sum(map(len, order))
    for tie in order:
        behind -= len(tie)
        if experience_id in tie:
            return float((behind + (len(tie) - 1) / 2) / (sum(map(len, order)) - 1))
    return None


def _mean(values: Sequence[Any]) -> float | None:
    return float(sum(values) / len(values)) if values else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
