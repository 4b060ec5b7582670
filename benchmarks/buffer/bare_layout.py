"""The bare layout: a one-day prototype of this design, as the yardstick for the full buffer.

Each batch is one Arrow IPC file with fsync. Rows go by binary COPY into one table and keys into a narrow queue, in one transaction with a NOTIFY.
A claim is an UPDATE with SKIP LOCKED over rows. There are no receipts, fencing, groups, verdicts, histories, checksums or labels.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from psycopg.types.json import Jsonb

from benchmarks.harness.store import Store, keys_of
from benchmarks.harness.workload import Sample

_DDL = Path(__file__).with_suffix(".sql")
_COLUMNS = "key, group_key, prompt, response, num_prompt_tokens, num_tokens, reward, metrics, file, file_row"
_ARRAYS = (("token_ids", np.int32), ("logprobs", np.float32), ("mask", np.uint8))
_TYPES = ("int8", "int8", "text", "text", "int4", "int4", "float8", "jsonb", "text", "int4")


class BareLayout(Store):
    """Connection of one process to the bare layout. Creating a space creates both tables again."""

    def __init__(self, address: dict[str, Any]) -> None:
        super().__init__(address)
        self.folder = Path(address["folder"]) / "bare"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._connection = psycopg.connect(address["uri"], autocommit=True)
        self._listener: psycopg.Connection[Any] | None = None
        self._maps: dict[str, pa.RecordBatch] = {}

    def create(self, space: str) -> None:
        self._connection.execute(_DDL.read_text())

    def open(self, space: str) -> None:
        self._maps.clear()

    def convert(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        return samples

    def put(self, batch: Sequence[Sample]) -> None:
        name = f"{uuid.uuid4().hex}.arrow"
        with open(self.folder / name, "wb") as file:
            with pa.ipc.new_file(file, _encode(batch[:0]).schema) as writer:
                writer.write_batch(_encode(batch))
            file.flush()
            os.fsync(file.fileno())
        with self._connection.transaction(), self._connection.cursor() as cursor:
            with cursor.copy(f"COPY bare.experience ({_COLUMNS}) FROM STDIN (FORMAT BINARY)") as copy:
                copy.set_types(_TYPES)
                for row, s in enumerate(batch):
                    copy.write_row(
                        (
                            s.key,
                            s.group,
                            s.prompt,
                            s.response,
                            s.num_prompt_tokens,
                            len(s.token_ids),
                            s.reward,
                            Jsonb(s.metrics),
                            name,
                            row,
                        )
                    )
            with cursor.copy("COPY bare.queue (key) FROM STDIN (FORMAT BINARY)") as copy:
                copy.set_types(["int8"])
                for s in batch:
                    copy.write_row((s.key,))
            cursor.execute("SELECT pg_notify('bare', '')")

    def take(self, num: int) -> list[int]:
        if self._listener is None:
            self._listener = psycopg.connect(self.address["uri"], autocommit=True)
            self._listener.execute("LISTEN bare")
        while not (rows := self._connection.execute(_CLAIM, [num]).fetchall()):
            for _ in self._listener.notifies(timeout=0.25, stop_after=1):
                pass
        token_ids, *_ = (self._packed(name, dtype, rows) for name, dtype in _ARRAYS)
        return keys_of(token_ids[start:] for start in _offsets(rows)[:-1])

    def _packed(self, name: str, dtype: Any, rows: Sequence[tuple[Any, ...]]) -> np.ndarray[Any, Any]:
        offsets = _offsets(rows)
        out = np.empty(offsets[-1], dtype)
        for i, (_, _, file, file_row) in enumerate(rows):
            column = self._batch(file).column(name)
            starts = column.offsets
            begin, end = starts[file_row].as_py(), starts[file_row + 1].as_py()
            out[offsets[i] : offsets[i + 1]] = column.values.slice(begin, end - begin).to_numpy()
        return out

    def _batch(self, name: str) -> pa.RecordBatch:
        if name not in self._maps:
            if len(self._maps) > 64:
                self._maps.clear()
            self._maps[name] = pa.ipc.open_file(pa.memory_map(str(self.folder / name))).get_batch(0)
        return self._maps[name]


def _offsets(rows: Sequence[tuple[Any, ...]]) -> np.ndarray[Any, Any]:
    return np.concatenate([[0], np.cumsum([row[1] for row in rows])])


_CLAIM = """UPDATE bare.queue q SET available = false FROM (
    SELECT key FROM bare.queue WHERE available ORDER BY key LIMIT %s FOR UPDATE SKIP LOCKED) p, bare.experience e
WHERE q.key = p.key AND e.key = p.key RETURNING e.key, e.num_tokens, e.file, e.file_row"""


def _encode(samples: Sequence[Sample]) -> pa.RecordBatch:
    lengths = [len(s.token_ids) for s in samples]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))

    def column(arrays: list[Any], dtype: Any) -> pa.Array:
        flat = np.concatenate(arrays) if arrays else np.empty(0, dtype)
        return pa.ListArray.from_arrays(offsets, pa.array(flat.astype(dtype, copy=False)))

    return pa.record_batch(
        {
            "token_ids": column([s.token_ids for s in samples], np.int32),
            "logprobs": column([s.logprobs for s in samples], np.float32),
            "mask": column([s.mask for s in samples], np.uint8),
        }
    )


STORE = BareLayout
