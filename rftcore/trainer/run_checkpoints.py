"""The checkpoints of a run: copied at the end of a step, written beside the next steps, committed between them, and deleted when nothing needs them.

A checkpoint is committed only when its step is recorded. Files are deleted beside the next steps, too, and before the next checkpoint needs their room.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rftcore.config.run import RunConfig
from rftcore.trainer.checkpoints import folder_name, remove_abandoned
from rftcore.trainer.processes.learner_group import LearnerGroup
from rftcore.trainer.publish import folder_bytes
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.checkpoints import KeptCheckpoint, committed_folders, kept_checkpoints
from rftdata.attempts.evaluations import best_step, validation_scores
from rftdata.failpoints import failpoint
from rftdata.workers.worker import Worker


class Writing(NamedTuple):
    """A checkpoint that is being written.

    Attributes:
        policy_version_id: the version under which the weights were published.
    """

    step: int
    folder: Path
    policy_version_id: int


class RunCheckpoints:
    """Writes, commits and deletes the checkpoints of a run.

    Args:
        folder: of the run.
    """

    def __init__(
        self, attempt: Attempt, worker: Worker, learner: LearnerGroup, folder: Path, config: RunConfig
    ) -> None:
        self._attempt, self._worker, self._learner = attempt, worker, learner
        self._folder = folder / "checkpoints"
        self._num_kept = config.trainer.keep_checkpoints
        self._validation_sets = [taskset.name for taskset in config.eval.tasks]
        self._decoding = config.eval.decodings[0]
        self._max_failed = config.eval.max_failed
        self._writing: Writing | None = None
        self._deleter = ThreadPoolExecutor(1, "checkpoint deletion")
        self._deletions: list[Future[None]] = []

    def begin(self, step: int, policy_version_id: int) -> Writing:
        """Commit the checkpoint before; then copy the learner's state after `step` and begin to write it."""
        self.commit()
        self._await_deletions()
        self._worker.set_state(f"copies the checkpoint of step {step}", activity="checkpointing")
        folder = self._folder / folder_name(self._attempt.attempt_id, step)
        self._learner.begin_checkpoint(folder)
        return Writing(step, folder, policy_version_id)

    def commit_later(self, begun: Writing) -> None:
        """Let the next `commit` commit this checkpoint; its step is recorded."""
        self._writing = begun

    def commit(self) -> None:
        """Wait until the checkpoint that is being written is on disk, and commit it; do nothing if there is none."""
        written, self._writing = self._writing, None
        if written is None:
            return
        if not self._learner.has_written_checkpoint:
            self._worker.set_state(f"writes the checkpoint of step {written.step}", activity="checkpointing")
        self._learner.end_checkpoint()
        failpoint("trainer.checkpoint_written")
        self._attempt.commit_checkpoint(
            written.step,
            str(written.folder),
            policy_version_id=written.policy_version_id,
            num_bytes=folder_bytes(written.folder),
        )
        self.forget_old()

    def forget_old(self) -> None:
        """Delete checkpoints, except the newest, the best, those without a score yet, and those that other runs began with."""
        # Before the scores are read: an answer that comes in between must not make a checkpoint look unscored and settled.
        kept = self.kept()
        best = self.best(kept)
        for checkpoint in kept[self._num_kept :]:
            if checkpoint is best or checkpoint.waits or checkpoint.needed:
                continue
            self._attempt.forget_checkpoint(checkpoint.checkpoint_id)
            # By name, as below; so a row cannot make a folder elsewhere disappear.
            folder = self._folder / Path(checkpoint.uri).name
            self._deletions.append(self._deleter.submit(shutil.rmtree, folder, ignore_errors=True))

    def close(self) -> None:
        """Wait for deletions that are under way."""
        self._await_deletions()
        self._deleter.shutdown()

    def _await_deletions(self) -> None:
        while self._deletions:
            self._deletions.pop().result()

    def remove_abandoned(self) -> None:
        """Remove checkpoints that earlier attempts wrote and never committed."""
        # By name: the folder of the buffer may have moved since.
        committed = {Path(folder).name for folder in committed_folders(self._attempt.run)}
        remove_abandoned(self._folder, self._attempt.attempt_id, committed)

    def kept(self) -> list[KeptCheckpoint]:
        """Return the checkpoints whose files exist, newest first."""
        return kept_checkpoints(self._attempt.run, self._attempt.attempt_id)

    def best(self, kept: list[KeptCheckpoint]) -> KeptCheckpoint | None:
        """Return the checkpoint among these that validation chooses; None without a score."""
        scores = validation_scores(
            self._attempt.run, self._validation_sets, self._decoding, max_failed=self._max_failed
        )
        best = best_step({c.trainer_step: scores[c.trainer_step] for c in kept if c.trainer_step in scores})
        return next((checkpoint for checkpoint in kept if checkpoint.trainer_step == best), None)
