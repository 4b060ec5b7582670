"""What a query over the batch needs and what it changes, read off DuckDB's own tree of it.

Most queries take all columns (`SELECT *`), look at two and change one. Found out here, only those two are given to the query and only
the one is taken from it: texts that a stage does not look at are then never copied.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from operators.sandbox import open_sandbox


@dataclass(frozen=True)
class QueryShape:
    """Attributes:
    reads: columns of the batch it looks at.
    changed: columns of its result, in order, that may differ from those of the batch.
    """

    reads: frozenset[str]
    changed: tuple[str, ...]


def shape(query: str, batch: pa.Schema, result: pa.Schema) -> QueryShape | None:
    """The shape of a SELECT over `batch` alone whose stars are its own; None for any other, which is to be run as it stands.

    Args:
        batch: the columns of the batch.
        result: the columns of the query's result on it.
    """
    with contextlib.closing(open_sandbox()) as connection:
        found = connection.execute("SELECT json_serialize_sql(?)", [query]).fetchone()
    assert found is not None
    node = json.loads(found[0])["statements"][0]["node"]
    if node["type"] != "SELECT_NODE" or node["cte_map"]["map"] or node["from_table"].get("table_name") != "batch":
        return None
    names = {"batch", node["from_table"]["alias"]}
    stars = [entry for entry in node["select_list"] if entry["class"] == "STAR"]
    if not all(_is_plain(star, names) for star in stars) or node["from_table"].get("column_name_alias"):
        return None
    rest = [entry for entry in node["select_list"] if entry["class"] != "STAR"]
    inner = [[[star["replace_list"], star["exclude_list"]] for star in stars], rest, {**node, "select_list": []}]
    if any(part.get("class") == "STAR" or _is_row(part, names) for part in _nodes(inner)):
        return None
    # Every text in the tree that is the name of a column counts: more than is needed, and nothing is missed.
    texts = {text.lower() for text in _texts(inner)}
    replaced = {entry["key"].lower() for star in stars for entry in star["replace_list"]}
    own = set(batch.names)
    changed = [name for name in result.names if not stars or name not in own or name.lower() in replaced]
    return QueryShape(frozenset(name for name in batch.names if name.lower() in texts), tuple(changed))


def _is_plain(star: dict[str, Any], names: set[str]) -> bool:
    """`*` or `b.*`, with or without REPLACE and EXCLUDE."""
    special = star["columns"] or star["expr"] or star["rename_list"] or star["qualified_exclude_list"]
    return not special and star["relation_name"] in names | {""}


def _is_row(node: dict[str, Any], names: set[str]) -> bool:
    """A whole row as one value (`SELECT batch FROM batch`)."""
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
