"""Determine from DuckDB's own tree of a query what the query reads and what it changes.

Most queries select all columns (`SELECT *`), read two and change one. Then only those two are passed to the query and only the changed
one is taken from its result, so that texts that a stage does not read are never copied.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa

from operators.sql.sandbox import SEEDED, TIME_WORDS, check_sandbox, is_changing
from rftdata.errors import OperatorError

_BY_PLACE = ("STAR", "POSITIONAL_REFERENCE")
"""Nodes that refer to other columns if there are fewer columns."""


@dataclass(frozen=True)
class QueryShape:
    """Attributes:
    reads: columns of the batch that it reads.
    changed: columns of its result, in order, that may differ from those of the batch.
    """

    reads: frozenset[str]
    changed: tuple[str, ...]


def shape(query: str, batch: pa.Schema, result: pa.Schema) -> QueryShape | None:
    """Return the shape of a SELECT from `batch` alone that uses only its stars; None for any other query, which runs unchanged.

    Args:
        batch: the columns of the batch.
        result: the columns of the query's result on it.
    """
    node = _tree(query)["statements"][0]["node"]
    if node["type"] != "SELECT_NODE" or node["cte_map"]["map"] or node["from_table"].get("table_name") != "batch":
        return None
    names = {"batch", node["from_table"]["alias"]}
    stars = [entry for entry in node["select_list"] if entry["class"] == "STAR"]
    if not all(_is_plain(star, names) for star in stars) or node["from_table"].get("column_name_alias"):
        return None
    rest = [entry for entry in node["select_list"] if entry["class"] != "STAR"]
    inner = [[[star["replace_list"], star["exclude_list"]] for star in stars], rest, {**node, "select_list": []}]
    if any(part.get("class") in _BY_PLACE or _is_row(part, names) for part in _nodes(inner)):
        return None
    if stars and any(_is_place(modifier) for modifier in node["modifiers"]):
        return None
    # Every text in the tree that equals a column's name counts: possibly more than needed, but never less.
    texts = {text.lower() for text in _texts(inner)}
    replaced = {entry["key"].lower() for star in stars for entry in star["replace_list"]}
    own = set(batch.names)
    changed = [name for name in result.names if not stars or name not in own or name.lower() in replaced]
    return QueryShape(frozenset(name for name in batch.names if name.lower() in texts), tuple(changed))


def column_names(query: str) -> frozenset[str]:
    """Return every name in a query that may be a column's, in small letters; nothing for a query that DuckDB cannot parse."""
    references = (node for node in _nodes(_tree(query)) if node.get("class") == "COLUMN_REF")
    return frozenset(str(name).lower() for node in references for name in node["column_names"])


def refuse_changing(query: str, columns: Collection[str]) -> None:
    """Refuse a query whose result depends on more than its tables. Random numbers are allowed, since they are seeded.

    Args:
        columns: columns of its tables.

    Raises:
        OperatorError: it uses the time, a setting, a sample without a seed or the like, or cannot be inspected.
    """
    tree = _tree(query)
    if tree["error"]:
        raise OperatorError("the query is of a kind that cannot be checked", value=query, allowed="a plain SELECT")
    for node in _nodes(tree):
        word = None
        if node.get("class") in ("FUNCTION", "WINDOW") and is_changing(node):
            word = str(node["function_name"]).lower()
        elif node.get("class") == "COLUMN_REF" and len(node["column_names"]) == 1:
            word = node["column_names"][0].lower()
            word = word if word in TIME_WORDS and word not in columns else None
        if word is not None and word not in SEEDED:
            raise OperatorError(
                f"{word} gives another answer every time",
                value=query,
                todo="use only columns of the batch and of reference tables, so that the same batch always gets the same decisions",
            )
        sample = node.get("sample")
        if isinstance(sample, dict) and not sample["repeatable"]:
            raise OperatorError(
                "a sample without a seed is another one every time",
                value=query,
                todo="add REPEATABLE (7) to TABLESAMPLE, write USING SAMPLE 20 PERCENT (bernoulli, 7), or use the stage sample",
            )


@lru_cache(maxsize=16)
def _tree(query: str) -> dict[str, Any]:
    """Return DuckDB's tree of a query, which must not be changed (it is cached)."""
    with check_sandbox() as connection:
        row = connection.execute("SELECT json_serialize_sql(?)", [query]).fetchone()
    assert row is not None
    tree: dict[str, Any] = json.loads(row[0])
    return tree


def _is_plain(star: dict[str, Any], names: set[str]) -> bool:
    """Return whether a star is `*` or `b.*`, with or without REPLACE and EXCLUDE."""
    special = star["columns"] or star["expr"] or star["rename_list"] or star["qualified_exclude_list"]
    return not special and star["relation_name"] in names | {""}


def _is_place(modifier: dict[str, Any]) -> bool:
    """Recognise `ORDER BY 4`, `DISTINCT ON (4)`: the fourth column would be another one if the star selects fewer."""
    keys = [order["expression"] for order in modifier.get("orders", ())] + modifier.get("distinct_on_targets", [])
    return any(key["class"] == "CONSTANT" for key in keys)


def _is_row(node: dict[str, Any], names: set[str]) -> bool:
    """Return whether a node is a whole row as one value (`SELECT batch FROM batch`)."""
    return node.get("class") == "COLUMN_REF" and len(node["column_names"]) == 1 and node["column_names"][0] in names


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        yield tree
        tree = list(tree.values())
    if isinstance(tree, list):
        for child in tree:
            yield from _nodes(child)


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        yield from _texts(list(tree.values()))
    elif isinstance(tree, list):
        for child in tree:
            yield from _texts(child)
