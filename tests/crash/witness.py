"""A record of what was acknowledged to each process, kept beside the buffer, so that the buffer can be checked against it."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rftcore.explorer import role as explorer
from rftcore.explorer.engine_weights import EngineWeights
from rftcore.pipeline import role as pipeline
from rftcore.sync.transfer.explorer_side import LiveReceiver, Outcome
from rftcore.sync.transfer.plan import TransferPlan
from rftcore.sync.transfer.sender import Sent
from rftcore.trainer.batches.next_batch import NextBatch, PreparedBatch
from rftcore.trainer.learner import Learner
from rftcore.trainer.network.sharding import Grid
from rftcore.trainer.processes.learner_group import LearnerGroup
from rftdata.attempts.attempt import Attempt
from rftdata.experience import Sequence
from rftdata.pipeline.queue import SealedQueue
from rftdata.pipeline.records import SealedBatch
from rftdata.pipeline.verdicts import Committed
from rftdata.writing.writer import Writer
from tests.crash.stopwatch import Stopwatch

TRAINED = "trained.npy"


class Witness:
    """One process's notes: a line each, appended at once, so that kill -9 takes none away."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(folder / f"{name}-{os.getpid()}.jsonl", os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        self._stopwatch: Stopwatch | None = None

    def note(self, kind: str, **facts: Any) -> None:
        os.write(self._file, (json.dumps({"kind": kind, **facts}) + "\n").encode())

    def time(self) -> None:
        """Count from now on what this process waits for until its first claim."""
        self._stopwatch = Stopwatch()

    def note_first_claim(self) -> None:
        """The first answer of the buffer to a request for work; what it took since the process began its role."""
        if self._stopwatch is not None:
            self.note("first claim", at=round(time.time(), 2), host=socket.gethostname(), **self._stopwatch.read())
            self._stopwatch = None


def notes(folder: Path) -> Iterator[dict[str, Any]]:
    """All that was noted; a last line that a kill cut short is left out."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_bytes().split(b"\n")[:-1]:
            yield {**json.loads(line), "by": path.stem}


def digest(token_ids: npt.ArrayLike) -> str:
    return xxhash.xxh3_64_hexdigest(np.asarray(token_ids, dtype=np.int32).tobytes())


def digest_of_logprobs(logprobs: npt.ArrayLike) -> str:
    return xxhash.xxh3_64_hexdigest(np.asarray(logprobs, dtype=np.float32).tobytes())


def observe(witness: Witness) -> None:
    """Record and time the buffer's answers to this process from now on, without changing its behaviour."""
    witness.time()
    _observe_explorer(witness)
    _observe_pipeline(witness)
    _observe_trainer(witness)
    _observe_weights(witness)


def _observe_weights(witness: Witness) -> None:
    """The checksums of what the trainer sent, and of what an engine has of it; every version that an engine acknowledged, in the order of its answers."""
    send, apply, load, take = (
        LearnerGroup.send_weights,
        LiveReceiver._apply,
        EngineWeights.load,
        EngineWeights.take_newest,
    )

    def send_and_note(self: LearnerGroup, plan: TransferPlan, *others: Any) -> Sent:
        sent = send(self, plan, *others)
        witness.note("sent", transfer=plan.transfer_id, checksum=sent.checksum)
        return sent

    def apply_and_note(self: LiveReceiver, plan: TransferPlan, version: int) -> Outcome:
        outcome = apply(self, plan, version)
        if outcome.checksum is not None:
            witness.note("applied", transfer=plan.transfer_id, version=version, checksum=outcome.checksum)
        return outcome

    async def load_and_note(self: EngineWeights, weights: Any) -> None:
        await load(self, weights)
        witness.note("loaded", version=weights.policy_version_id, checksum=weights.checksum)

    async def take_and_note(self: EngineWeights) -> None:
        before = self._engine.policy_version_id
        await take(self)
        if (version := self._engine.policy_version_id) != before:
            witness.note("engine has", version=version, checksum=self.checksum)

    LearnerGroup.send_weights = send_and_note  # type: ignore[method-assign]
    LiveReceiver._apply = apply_and_note  # type: ignore[method-assign]
    EngineWeights.load = load_and_note  # type: ignore[method-assign]
    EngineWeights.take_newest = take_and_note  # type: ignore[method-assign]


def _digests(sequence: Sequence) -> tuple[str, str]:
    """Of the tokens, and of the log-probabilities of the response."""
    logprobs = [] if sequence.behavior_logprobs is None else sequence.behavior_logprobs
    return digest(sequence.token_ids), digest_of_logprobs(logprobs)


def _observe_explorer(witness: Witness) -> None:
    insert, claim, take_up = Writer.insert, explorer.claim_groups, explorer.take_up

    def insert_and_note(self: Writer, *groups: Any) -> list[int]:
        ids = insert(self, *groups)
        stored = [
            [group_id, [[s.response, *_digests(s)] for r in group.rollouts for s in r.sequences]]
            for group_id, group in zip(ids, groups, strict=True)
        ]
        versions = {span[1] for group in groups for r in group.rollouts for s in r.sequences for span in s.policy_spans}
        witness.note("stored", groups=stored, versions=sorted(versions))
        return ids

    def take_up_and_note(*args: Any, **options: Any) -> Any:
        found = take_up(*args, **options)
        answers = [answer for of_group in found.values() for answer in of_group]
        if answers:
            versions = {version for answer in answers for _, version in answer.version_spans}
            witness.note("took up", versions=sorted(versions), tokens=sum(len(answer.token_ids) for answer in answers))
        return found

    def claim_and_note(*args: Any, **options: Any) -> Any:
        groups = claim(*args, **options)
        witness.note_first_claim()
        return groups

    Writer.insert = insert_and_note  # type: ignore[method-assign]
    explorer.take_up = take_up_and_note
    explorer.claim_groups = claim_and_note


def _observe_pipeline(witness: Witness) -> None:
    claim, commit = SealedQueue.claim, pipeline.commit_verdicts

    def claim_and_note(self: SealedQueue, count: int) -> SealedBatch | None:
        batch = claim(self, count)
        witness.note_first_claim()
        return batch

    def commit_and_note(*args: Any, **options: Any) -> Committed:
        committed = commit(*args, **options)
        witness.note("decided", groups=committed.decided)
        return committed

    SealedQueue.claim = claim_and_note  # type: ignore[method-assign]
    pipeline.commit_verdicts = commit_and_note


def _observe_trainer(witness: Witness) -> None:
    draw, commit, update = NextBatch.draw, Attempt.commit_checkpoint, Learner.update
    stage, load = Learner._stage, Learner.load_checkpoint
    pending: list[int] = []
    trained: list[int] = []

    def draw_and_note(self: NextBatch, step: int, **options: Any) -> PreparedBatch | None:
        prepared = draw(self, step, **options)
        witness.note_first_claim()
        if prepared is not None and prepared.train is not None:
            batch = prepared.drawn
            rows = batch.rows.to_pylist()
            token_ids = np.split(batch.packed("token_ids"), batch.offsets[1:-1])
            logprobs = np.split(batch.packed("behavior_logprobs"), batch.offsets[1:-1])
            drawn = [
                [row["experience_id"], row["reward"], digest(t), digest_of_logprobs(p[row["num_prompt_tokens"] :])]
                for row, t, p in zip(rows, token_ids, logprobs, strict=True)
            ]
            witness.note("drawn", attempt=self.attempt.attempt_id, step=step, rows=drawn)
            pending[:] = batch.rows["experience_id"].to_pylist()
        return prepared

    def commit_and_note(self: Attempt, step: int, uri: str, **options: Any) -> int:
        checkpoint_id = commit(self, step, uri, **options)
        witness.note("checkpoint", attempt=self.attempt_id, step=step, checkpoint_id=checkpoint_id)
        return checkpoint_id

    def update_and_remember(self: Learner, *args: Any, **options: Any) -> dict[str, float]:
        metrics = update(self, *args, **options)
        trained.extend(pending)
        return metrics

    def stage_with_what_was_trained(self: Learner) -> Callable[[Path, Grid], None]:
        fill, ids = stage(self), np.array(trained, dtype=np.int64)

        def fill_and_add(draft: Path, grid: Grid) -> None:
            fill(draft, grid)
            np.save(draft / TRAINED, ids)

        return fill_and_add

    def load_with_what_was_trained(self: Learner, folder: Path) -> None:
        load(self, folder)
        trained[:] = np.load(folder / TRAINED).tolist()

    NextBatch.draw = draw_and_note  # type: ignore[method-assign]
    Attempt.commit_checkpoint = commit_and_note  # type: ignore[method-assign]
    Learner.update = update_and_remember  # type: ignore[method-assign]
    Learner._stage = stage_with_what_was_trained  # type: ignore[method-assign]
    Learner.load_checkpoint = load_with_what_was_trained  # type: ignore[method-assign]
