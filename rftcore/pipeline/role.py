"""The pipeline worker: it claims sealed groups, runs the operator chain on them and stores verdicts.

It runs apart from rollouts and training, so a slow stage delays neither. Any number of workers share the queue. A background
thread compacts the segment files.
"""

from __future__ import annotations

import functools
import json
import os

from operators.base import StageContext
from operators.chain.chain import Chain
from operators.chain.stage import StageError
from rftcore.config.run import RunConfig
from rftcore.pipeline.blocking_group import setting_aside_blocking_group, with_blocking_report
from rftcore.pipeline.created_groups import CreatedGroups
from rftcore.pipeline.group_decisions import decide_groups
from rftcore.pipeline.panels import check_panels
from rftcore.pipeline.patience import Patience
from rftcore.pipeline.policy_endpoint import Policy
from rftcore.pipeline.suggestions import Suggestions
from rftcore.run.join import JoinedRun
from rftdata.buffer import Buffer
from rftdata.errors import BufferUnavailableError
from rftdata.pipeline.budget import RunUsage, UsageLedger
from rftdata.pipeline.queue import SealedQueue, release_sealed_groups
from rftdata.pipeline.records import SealedBatch, Verdicts
from rftdata.pipeline.scores import EXPERIENCE_SCORES
from rftdata.pipeline.verdicts import check_pipeline, commit_verdicts
from rftdata.pipeline.versions import register_version
from rftdata.run import NO_PIPELINE
from rftdata.segments.compaction import BackgroundCompaction
from rftdata.tasks import taskset_texts
from rftdata.user_code import blocked_process, held_lock
from rftdata.workers.worker import Worker
from rftdata.writing.writer import Writer

_LEASE_S = 60.0


def main(joined: JoinedRun) -> int:
    """Decide on the groups of a run until it ends; return 0 after an orderly end."""
    with (
        joined.buffer as buffer,
        held_lock.written_to(
            blocked_process.report_path(joined.run.folder, os.getpid()), is_printed=joined.by_hand is not None
        ),
        Worker(joined.run, "pipeline", lease_s=_LEASE_S, phases=joined.phases, on_waiting=joined.on_waiting) as worker,
        BackgroundCompaction(buffer.database, buffer.segments, grace_s=buffer.config.compaction_grace_s) as compaction,
        buffer.writer(joined.run) as writer,
    ):
        _work(joined, worker, compaction, writer)
        joined.leave()
    return 0


def _work(joined: JoinedRun, worker: Worker, compaction: BackgroundCompaction, writer: Writer) -> None:
    """Claim, decide and store until the run ends."""
    buffer, run, resolved, config = joined.buffer, joined.run, joined.resolved, joined.resolved.config
    worker.set_state("loads the operator chain", activity="starting")
    chain = resolved.experience_chain
    policy = Policy(resolved, run)
    chain.prepare(stage_context(config, policy, RunUsage(run), buffer))
    register_stages(buffer, chain)
    check_pipeline(run, chain.version)
    queue = SealedQueue(run, worker.worker_id, lease_s=_LEASE_S, columns=chain.columns)
    suggestions = Suggestions(buffer, chain, config.model.path)
    created, patience, decided = CreatedGroups(resolved, buffer, writer), Patience(config.pipelines.patience_s), 0

    def store_aside(aside: SealedBatch) -> None:
        """Store the verdict before a blocked process ends, and release the other groups, not as suspects."""
        verdicts = Verdicts(aside.failed)
        commit_verdicts(run, worker.worker_id, chain.version, aside, verdicts)
        release_sealed_groups(run, worker.worker_id)

    try:
        while not worker.should_stop():
            batch = queue.claim(config.pipelines.batch_groups)
            worker.progress |= compaction.progress
            if batch is None:
                worker.set_state("waits", "sealed groups")
                worker.wait(1.0)
                continue
            worker.set_state(f"decides on {len(batch.group_ids)} groups", activity="deciding")
            batch = with_blocking_report(batch, run)
            stored_scores = EXPERIENCE_SCORES.read(
                buffer.database, chain.score_keys, batch.table["experience_id"].to_pylist()
            )
            try:
                with setting_aside_blocking_group(batch, store_aside):
                    verdicts = decide_groups(chain, batch, stored_scores, patient=patience.has_more(batch))
            except StageError as error:
                release_sealed_groups(run, worker.worker_id)
                seconds = patience.failed(error)
                worker.set_state(
                    f"tries again in {seconds:.0f} s", f"a stage that fails on everything: {error.what}"[:300]
                )
                worker.wait(seconds)
                continue
            patience.passed()
            # Before the verdicts, because a worker killed in between creates the same groups and suggestions again, and their receipts and keys
            # prevent copies.
            verdicts.stages += [*created.store(verdicts.groups), *suggestions.store(verdicts.scores)]
            committed = commit_verdicts(run, worker.worker_id, chain.version, batch, verdicts)
            if committed.num_purged:
                worker.progress["groups_purged"] = committed.num_purged + worker.progress.get("groups_purged", 0)
            decided += len(batch.group_ids)
            worker.progress["groups_decided"] = decided
    except Exception as error:
        if not isinstance(error, BufferUnavailableError):
            # The groups it holds are not the cause and must not become suspects.
            release_sealed_groups(run, worker.worker_id)
        raise
    finally:
        chain.close()
        policy.close()


def stage_context(config: RunConfig, policy: Policy, usage: UsageLedger, buffer: Buffer) -> StageContext:
    """Return what the stages of a run may use."""
    read = functools.partial(taskset_texts, buffer.database)
    return StageContext(
        config.base_dir,
        policy,
        config.model.path,
        usage,
        read_taskset=read,
        policy_version=policy.version,
        read_arrays=buffer.arrays,
    )


def register_stages(buffer: Buffer, chain: Chain, version: str | None = None) -> None:
    """Store the stages of a version, and the kinds of labels that they read.

    Raises:
        ConfigError: the version already has other stages, there is no such kind of label, or see `check_panels`.
    """
    if version is None and chain.version == NO_PIPELINE:
        return
    check_panels(buffer, chain)
    stages = json.loads(json.dumps([{stage.name: stage.operator.spec()} for stage in chain.stages], default=str))
    register_version(buffer.database, version or chain.version, chain.version, stages, chain.label_kinds)
