"""The pipeline worker: takes sealed groups, runs the operator chain over them, stores verdicts.

It runs apart from rollouts and training, so a slow stage stalls neither. A batch on which a stage raises is decided group by
group; a group that fails alone is dropped with the error as its reason, so one poisonous row cannot stop the run. Beside the
work a thread keeps the segment files in order.
"""

from __future__ import annotations

import pyarrow.compute as pc

from operators.chain import Chain, ChainResult
from operators.stage import StageError, StageRun
from rftcore.config import RunConfig
from rftcore.launch.prepare import build_pipeline, join_run
from rftdata import wake
from rftdata.claims import Decision, SealedBatch, SealedQueue, StageCount, commit_verdicts
from rftdata.compaction import BackgroundCompaction
from rftdata.worker import Worker

_BATCH_GROUPS = 64
_LEASE_S = 60.0


def main(config: RunConfig, run: str | None = None) -> int:
    """Decide on the groups of a run until it ends; 0 when it ended in good order."""
    joined = join_run(config, run)
    with (
        joined.buffer as buffer,
        Worker(buffer.database, joined.row["run_id"], "pipeline", lease_s=_LEASE_S) as worker,
        BackgroundCompaction(buffer.database, buffer.segments, grace_s=buffer.config.compaction_grace_s) as compaction,
    ):
        worker.says("loads the operator chain")
        chain = build_pipeline(config)
        chain.prepare()
        listener = wake.Listener(buffer.database, wake.SEALED, wake.RUN)
        queue = SealedQueue(buffer.database, worker.run_id, worker.worker_id, lease_s=_LEASE_S)
        decided = 0
        while not worker.should_stop():
            batch = queue.claim(_BATCH_GROUPS)
            worker.progress |= compaction.progress
            if batch is None:
                worker.says("waits", "sealed groups")
                listener.wait(1.0)
                continue
            worker.says(f"decides on {len(batch.group_ids)} groups")
            decisions, stages = decide(chain, batch)
            commit_verdicts(buffer.database, worker.run_id, worker.worker_id, chain.version, batch, decisions, stages)
            decided += len(batch.group_ids)
            worker.progress["groups_decided"] = decided
        listener.close()
    return 0


def decide(chain: Chain, batch: SealedBatch) -> tuple[list[Decision], list[StageCount]]:
    """Verdicts on every experience of a batch, and what each stage did."""
    try:
        result = chain.run(batch.table)
    except StageError as error:
        decisions, stages = _one_by_one(chain, batch, error)
    else:
        decisions, stages = _decisions(batch, result), [_count(stage) for stage in result.stages]
    return decisions + batch.failed, stages


def _one_by_one(chain: Chain, batch: SealedBatch, error: StageError) -> tuple[list[Decision], list[StageCount]]:
    decisions: list[Decision] = []
    stages = [_count(stage) for stage in (*error.stages, error.run) if stage]
    for group_id in sorted(set(batch.table["group_id"].to_pylist())):
        group = batch.table.filter(pc.equal(batch.table["group_id"], group_id))
        try:
            result = chain.run(group)
        except StageError as failed:
            stage = failed.run.stage if failed.run else "chain"
            decisions += [
                Decision(i, group_id, False, stage, f"the stage failed: {failed.what}"[:500])
                for i in group["experience_id"].to_pylist()
            ]
            stages += [_count(run) for run in (*failed.stages, failed.run) if run]
        else:
            decisions += _decisions(SealedBatch(group, [group_id]), result)
            stages += [_count(run) for run in result.stages]
    return decisions, stages


def _decisions(batch: SealedBatch, result: ChainResult) -> list[Decision]:
    groups = dict(zip(batch.table["experience_id"].to_pylist(), batch.table["group_id"].to_pylist(), strict=True))
    return [Decision(group_id=groups[row["experience_id"]], **row) for row in result.decisions.to_pylist()]


def _count(run: StageRun) -> StageCount:
    return StageCount(
        run.index, run.stage, run.rows_in, run.rows_kept, run.rows_dropped, run.rows_created, run.seconds, run.error
    )
