"""Handling of a stage that blocks its pipeline worker forever: the process reports it and ends.

The worker that replaces it must not end in the same way. If the blocking group is known, because the stage names the
row or the batch has one group, it is set aside before the process ends, and the other groups are released. Otherwise all groups of the
batch become suspects, which are decided on alone, so that the blocking group is found. If even the watcher of the time limits cannot run,
nothing is stored, and a suspect is set aside after several workers have ended on it; the report that such a worker left is added to the
reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from operators.chain.blocking_rows import named_rows, setting_aside_blocking_rows
from operators.chain.stage import MAX_REASON
from rftdata.errors import TimeLimitError
from rftdata.pipeline.records import SET_ASIDE, SealedBatch
from rftdata.pipeline.verdicts import STAGE_FAILED
from rftdata.run import Run
from rftdata.user_code import blocked_process
from rftdata.workers.finished_work import pipeline_errors


def setting_aside_blocking_group(
    batch: SealedBatch, store: Callable[[SealedBatch], object]
) -> contextlib.AbstractContextManager[None]:
    """If a stage blocks the process in this block, set its group aside, and end the process with a report.

    Args:
        store: receives the part of the batch that is set aside, with the decisions in its `failed`.
    """

    def set_aside(error: TimeLimitError) -> None:
        group = _blocking_group(batch, error)
        if group is not None:
            store(group.set_aside(f"{STAGE_FAILED}{error.what}"[:MAX_REASON]))

    return setting_aside_blocking_rows(
        set_aside, lambda error: blocked_process.end_blocked_process(str(error), error.stack)
    )


def _blocking_group(batch: SealedBatch, error: TimeLimitError) -> SealedBatch | None:
    """Return the blocking group as a separate batch; None if it is not known."""
    group_ids = batch.group_ids
    if error.subject is not None:
        ids = zip(batch.table["experience_id"].to_pylist(), batch.table["group_id"].to_pylist(), strict=True)
        group_ids = [group_id for experience_id, group_id in ids if experience_id == error.subject]
    if len(group_ids) != 1:
        return None
    (group_id,) = group_ids
    return replace(
        batch,
        table=batch.table.filter(pc.equal(batch.table["group_id"], group_id)),
        group_ids=[group_id],
        label_cuts={group_id: batch.label_cuts[group_id]},
        failed=batch.failed.filter(pc.equal(batch.failed["group_id"], group_id)),
    )


def with_blocking_report(batch: SealedBatch, run: Run) -> SealedBatch:
    """Return a batch set aside because workers ended on it, with the newest of their reports added to the reason."""
    is_aside = pc.equal(batch.failed["stage"], SET_ASIDE)
    if batch.table.num_rows or not pc.any(is_aside).as_py():
        return batch
    ids = set(batch.failed["experience_id"].to_pylist())
    sentence = next((text for text in _sentences(run) if _is_about(text, ids)), None)
    if sentence is None:
        return batch
    reasons = [
        f"{reason}: {sentence}"[:MAX_REASON] if aside else reason
        for reason, aside in zip(batch.failed["reason"].to_pylist(), is_aside.to_pylist(), strict=True)
    ]
    position = batch.failed.column_names.index("reason")
    return replace(batch, failed=batch.failed.set_column(position, "reason", pa.array(reasons, pa.string())))


def _sentences(run: Run) -> Iterator[str]:
    """Yield the reports of blocked processes of a run. `rft run` moves reports into the database; those of roles started by hand are files."""
    for error in pipeline_errors(run):
        yield error.partition("\n")[0]
    for host, space, pid in blocked_process.reports(run.folder):
        report = blocked_process.read_report(run.folder, pid, host, space)
        if report is not None:
            yield report[0]


def _is_about(sentence: str, ids: set[int]) -> bool:
    """Return whether the rows that a report names are all of this group."""
    rows = named_rows(sentence)
    return rows is not None and ids.issuperset(rows)
