"""Data-Juicer operators on a Ray cluster, for big offline jobs: `mode: ray`.

Rows are cut into one part per CPU. The parts travel as Arrow record batches, and the workers run the same code as a single process,
so the outcome is the same. Data-Juicer's own Ray executor is not used: it reads and writes files, and does not support reasons and
stored scores. Its `ray_…` deduplicators keep their hashes in actors of the cluster. They are called in the order of the rows, so
that the first of equal rows stays.

The cluster is the one this process is connected to, else the one that `RAY_ADDRESS` names, else a local one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from operators.data_juicer import runtime
from operators.data_juicer.base import JuicerOutcome
from operators.data_juicer.runtime import ROW, Samples
from rftdata.errors import OperatorError, PluginError, RftError


def spread(compute: Callable[[pa.Table], JuicerOutcome], table: pa.Table) -> JuicerOutcome:
    """Compute `compute` on a table row by row, distributed over the cluster.

    Raises:
        RftError: the same as in this process.
    """
    ray = _connected()
    num_parts = max(1, min(table.num_rows, int(ray.cluster_resources().get("CPU", 1))))
    size = -(-table.num_rows // num_parts)
    parts = [table.slice(start, size) for start in range(0, table.num_rows, size)]
    work = ray.remote(num_cpus=1)(_work)
    shared = ray.put(compute)
    try:
        outcomes = ray.get([work.remote(shared, _packed(part)) for part in parts])
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RftError):
            raise error.cause from error
        raise
    names = list(dict.fromkeys(name for one in outcomes for name in one.columns))
    columns = {
        name: pa.chunked_array([_of_part(one, name, part) for one, part in zip(outcomes, parts)]).combine_chunks()
        for name in names
    }
    decides = any(one.reasons is not None for one in outcomes)
    reasons = [reason for one, part in zip(outcomes, parts) for reason in one.reasons or [None] * part.num_rows]
    return JuicerOutcome(reasons if decides else None, columns, [made for one in outcomes for made in one.created])


def _of_part(outcome: JuicerOutcome, name: str, part: pa.Table) -> pa.Array:
    values = outcome.columns.get(name)
    return part[name].combine_chunks() if values is None else values


def _packed(table: pa.Table) -> bytes:
    """Serialize a part as a separate stream, without the rest of the buffers it is a slice of."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


def _work(compute: Callable[[pa.Table], JuicerOutcome], part: bytes) -> JuicerOutcome:
    """Run on a worker."""
    return compute(pa.ipc.open_stream(part).read_all().combine_chunks())


def keeps_first(op: Any, name: str, samples: Samples, num_rows: int) -> list[str | None]:
    """Return reasons of one of the `ray_…` deduplicators: null for the first of equal rows."""
    ray = _connected()
    if hasattr(op, "backend"):
        seen = runtime.rows_of({**samples, runtime.STATS: [{} for _ in range(num_rows)]}, num_rows)
        with runtime.missing_package_named():
            kept: Sequence[bool] = [bool(op.process_single(op.compute_stats_single(row))) for row in seen]
        for actor in getattr(op.backend, "_dedup_sets", None) or ():
            ray.kill(actor)
    else:
        kept = _kept_of_data_set(ray, op, name, samples, num_rows)
    return [None if keep else f"duplicate of an earlier row of the batch ({name})" for keep in kept]


def _kept_of_data_set(ray: Any, op: Any, name: str, samples: Samples, num_rows: int) -> Sequence[bool]:
    import ray.data as ray_data

    dataset = ray_data.from_arrow(pa.table({**samples, ROW: list(range(num_rows))}))
    with runtime.missing_package_named():
        result = op.run(dataset)
    result = getattr(result, "data", result)
    rows = {row[ROW] for row in result.take_all()}
    if not rows:
        raise OperatorError(f"{name} kept no row at all", value=num_rows)
    return [row in rows for row in range(num_rows)]


def _connected() -> Any:
    """Return Ray, connected."""
    try:
        import ray
    except ImportError as error:
        raise PluginError(
            f"mode: ray needs Ray, which does not import: {error}", todo="pip install 'rftdata[train]'"
        ) from error
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS")
        local: dict[str, Any] = {} if address else {"include_dashboard": False}
        # "local", not None: None joins any cluster left running on this machine.
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **local)
    return ray
