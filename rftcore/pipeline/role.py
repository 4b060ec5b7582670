"""The pipeline worker: takes sealed groups, runs the operator chain over them, stores verdicts.

It runs apart from rollouts and training, so a slow stage stalls neither; any number of workers share the queue. Beside the work a
thread keeps the segment files in order.
"""

from __future__ import annotations

import functools
import json
import uuid
from collections.abc import Sequence
from typing import Any

from psycopg.types.json import Jsonb

from operators.base import CreatedGroup, StageContext
from operators.chain import Chain
from rftcore.config import RunConfig
from rftcore.explorer.task import written_sequence
from rftcore.launch.prepare import build_pipeline, join_run, model_folder
from rftcore.pipeline.deciding import decide
from rftcore.pipeline.policy import Policy
from rftdata import wake
from rftdata.claims import SealedQueue
from rftdata.compaction import BackgroundCompaction
from rftdata.database import Database, storable
from rftdata.errors import ConfigError
from rftdata.groups import Group, Rollout
from rftdata.tasks import taskset_texts
from rftdata.usage import RunUsage, UsageLedger
from rftdata.verdicts import commit_verdicts, known_scores
from rftdata.worker import Worker
from rftdata.writer import NO_PIPELINE, Writer

_LEASE_S = 60.0
_SYNTHESIS = uuid.UUID("5f0c7f5e-6a3b-4b3f-9d57-0f6f6d2c1f11")


def main(config: RunConfig, run: str | None = None) -> int:
    """Decide on the groups of a run until it ends; 0 when it ended in good order."""
    joined = join_run(config, run)
    with (
        joined.buffer as buffer,
        Worker(buffer.database, joined.row["run_id"], "pipeline", lease_s=_LEASE_S) as worker,
        BackgroundCompaction(buffer.database, buffer.segments, grace_s=buffer.config.compaction_grace_s) as compaction,
        buffer.writer(joined.row) as writer,
    ):
        worker.says("loads the operator chain")
        chain = build_pipeline(config)
        policy = Policy(config, buffer.database, worker.run_id)
        chain.prepare(stage_context(config, policy, RunUsage(buffer.database, worker.run_id), buffer.database))
        register(buffer.database, chain)
        listener = wake.Listener(buffer.database, wake.SEALED, wake.RUN)
        queue = SealedQueue(
            buffer.database, worker.run_id, worker.worker_id, lease_s=_LEASE_S, columns=chain.columns
        )  # fmt: skip
        created = _Created(config, writer)
        decided = 0
        while not worker.should_stop():
            batch = queue.claim(config.pipelines.batch_groups)
            worker.progress |= compaction.progress
            if batch is None:
                worker.says("waits", "sealed groups")
                listener.wait(1.0)
                continue
            worker.says(f"decides on {len(batch.group_ids)} groups")
            known = known_scores(buffer.database, chain.score_keys, batch.table["experience_id"].to_pylist())
            result = decide(chain, batch, known)
            # Before the verdicts: a worker that is killed in between makes the same groups again, and their receipts say so.
            created.store(result.created)
            commit_verdicts(buffer.database, worker.run_id, worker.worker_id, chain.version, batch, result.verdicts)
            decided += len(batch.group_ids)
            worker.progress["groups_decided"] = decided
        listener.close()
        chain.close()
        policy.close()
    return 0


def stage_context(config: RunConfig, policy: Policy, usage: UsageLedger, database: Database) -> StageContext:
    """What the stages of a run may use."""
    read = functools.partial(taskset_texts, database)
    return StageContext(config.base_dir, policy, config.model.path, usage, read_taskset=read)


def register(database: Database, chain: Chain, version: str | None = None) -> None:
    """Note which stages a version has.

    Raises:
        ConfigError: the name stands for other stages already.
    """
    if chain.version == NO_PIPELINE:
        return
    name = version or chain.version
    stages = json.loads(json.dumps([{stage.name: stage.operator.spec()} for stage in chain.stages], default=str))
    (row,) = database.fetch("register_pipeline", version=name, digest=chain.version, stages=Jsonb(storable(stages)))
    if row["digest"] != chain.version:
        raise ConfigError(
            f"the pipeline version {name!r} stands for other stages already", value=chain.version, allowed=row["digest"],
            todo="choose another --version",
        )  # fmt: skip


class _Created:
    """Stores groups that stages made, each once."""

    def __init__(self, config: RunConfig, writer: Writer) -> None:
        self._config = config
        self._writer = writer
        self._tokenizer: Any = None

    def store(self, created: Sequence[CreatedGroup]) -> None:
        for made in created:
            # Of one parent and key there is one group, however often a worker comes to make it.
            key = f"{self._writer.run_id}/{made.parent_id}/{made.task.taskset}/{made.task.task_key}"
            self._writer.insert(self._group(made), receipt=uuid.uuid5(_SYNTHESIS, key))

    def _group(self, made: CreatedGroup) -> Group:
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(model_folder(self._config))
        rollouts = []
        for index, answer in enumerate(made.answers):
            sequence = written_sequence(
                self._tokenizer, [dict(message) for message in answer.messages], answer.response
            )
            sequence.reward, sequence.parent_id = answer.reward, made.parent_id
            rollouts.append(Rollout(index, "ok", answer.reward, [sequence]))
        task = made.task
        return Group(
            rollouts, source="synthesis", taskset=task.taskset, task_key=task.task_key, payload=dict(task.payload)
        )
