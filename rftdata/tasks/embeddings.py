"""Vectors of tasks' texts in `rft.task_embedding`: looked up by task, model and text, and stored if new."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from rftdata.postgres.database import Database, copy_rows, execute, fetch

_PORTION = 5_000


def text_digest(text: str) -> int:
    """Return xxh3-64 as a signed 64-bit integer, PostgreSQL's bigint."""
    return int(np.uint64(xxhash.xxh3_64_intdigest(text.encode())).astype(np.int64))


def known_vectors(
    database: Database, model: str, task_ids: Sequence[int], texts: Sequence[str]
) -> dict[int, NDArray[np.float32]]:
    """Return the stored vectors by the index of their text in `texts`."""
    found: dict[int, NDArray[np.float32]] = {}
    for start in range(0, len(task_ids), _PORTION):
        part = slice(start, start + _PORTION)
        rows = database.fetch(
            "known_embeddings",
            model=model,
            task_ids=list(task_ids[part]),
            digests=[text_digest(text) for text in texts[part]],
        )
        found.update({start + row["place"]: _array(row["embedding"]) for row in rows})
    return found


def _array(sent: bytes) -> NDArray[np.float32]:
    """Parse PostgreSQL's binary one-dimensional real[]: five numbers about its shape, then a length and a value per element."""
    return np.frombuffer(sent, np.dtype([("length", ">i4"), ("value", ">f4")]), offset=20)["value"].astype(np.float32)


def store_vectors(
    database: Database, model: str, task_ids: Sequence[int], texts: Sequence[str], vectors: NDArray[np.float32]
) -> str:
    """Store vectors, [texts, dimensions]; return their column type: vector if the server has pgvector, else real[].

    Those of tasks that were purged meanwhile are not stored.
    """
    with database.transaction() as connection:
        there = {row["task_id"] for row in fetch(connection, "lock_tasks", task_ids=list(task_ids))}
        kind = fetch(connection, "use_pgvector")[0]["kind"]
        execute(connection, "stage_embeddings")
        columns = [("task_id", "int8"), ("text_digest", "int8"), ("embedding", "float4[]")]
        rows = (
            (key, text_digest(text), vector.tolist())
            for key, text, vector in zip(task_ids, texts, vectors, strict=True)
            if key in there
        )
        copy_rows(connection, "staged_embedding", columns, rows)
        execute(connection, "save_embeddings", model=model)
    return str(kind)
