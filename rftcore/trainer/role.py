"""The trainer's loop: draw batches, update the weights, publish them, commit checkpoints, and end the run.

A step draws a batch with the rewards as they are when it begins, updates, publishes, copies the checkpoint where one is due, and records the step. The copy
is written beside the next steps, and committed between them. A step is recorded before a checkpoint that contains it is committed. A crash loses at most the
work since the last committed checkpoint, never an experience: the next attempt draws those groups again, removes unfinished files, and asks again
for the validations that were not answered. After the last step the trainer waits for the validation it asked for, chooses the best checkpoint by it, and
asks once for the test sets: by the initial weights and by the best.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import xxhash

from rftcore.run.commands import buffer_option
from rftcore.run.join import JoinedRun
from rftcore.sync import METHODS
from rftcore.sync.base import Publication
from rftcore.trainer.batches.drawn import batch_metrics
from rftcore.trainer.batches.next_batch import NextBatch, draws_ahead
from rftcore.trainer.batches.role_baselines import RoleBaselines
from rftcore.trainer.evaluations import RunEvaluations
from rftcore.trainer.learner_arguments import LearnerArguments
from rftcore.trainer.parity import weight_parity
from rftcore.trainer.processes.learner_group import LearnerGroup
from rftcore.trainer.processes.rank_arguments import RankArguments
from rftcore.trainer.publish import Export, Exports, file_method, live_weights, published_bytes
from rftcore.trainer.run_checkpoints import RunCheckpoints
from rftcore.trainer.shared_device import TrainerDevice, trainer_device_of
from rftcore.trainer.step.divergence import MAX_EMPTY_IN_A_ROW
from rftcore.trainer.trainer_watch import watch_trainer
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.batch import Batch
from rftdata.attempts.evaluations import failed_evaluations, num_open_evaluations, weights_of_open_evaluations
from rftdata.attempts.role_baselines import RoleBaseline
from rftdata.errors import BufferUnavailableError, RftError
from rftdata.failpoints import failpoint
from rftdata.planning.run_selectors import selector_metrics
from rftdata.workers.worker import Worker


def main(joined: JoinedRun) -> int:
    """Train a run to its planned steps; return 0 when it is finished or was asked to stop."""
    config = joined.resolved.config
    with (
        joined.buffer as buffer,
        Worker(joined.run, "trainer", phases=joined.phases, on_waiting=joined.on_waiting) as worker,
        buffer.attempt(
            joined.run,
            sampling=config.sampling,
            max_refill=config.explorer.max_refill,
            tasksets=[taskset.name for taskset in config.tasks],
        ) as attempt,
    ):
        device = trainer_device_of(config, attempt, worker)
        if device.take(worker.should_stop, after_evaluations=False):
            worker.set_state("loads the model", activity="starting")
            TrainerRole(joined, worker, attempt, device).train()
        joined.leave()
    return 0


@dataclass
class _Timing:
    """Seconds of one step."""

    wait: float = 0.0
    train: float = 0.0
    publish: float = 0.0


class TrainerRole:
    """One trainer process on one attempt."""

    def __init__(self, joined: JoinedRun, worker: Worker, attempt: Attempt, device: TrainerDevice) -> None:
        resolved, config = joined.resolved, joined.resolved.config
        self.config = config
        self.run = joined.run
        self.location = joined.buffer.location
        self.worker = worker
        self.attempt = attempt
        self.folder = joined.run.folder.resolve()
        # A run on a stored selection ends with it, unless `steps` ends the run earlier.
        self.planned_steps: int = config.steps or joined.run.planned_steps
        self.model = resolved.model_folder
        arguments = RankArguments(
            learner=LearnerArguments(
                model_path=str(self.model),
                config=config.trainer,
                seed=config.run.seed,
                temperature=config.explorer.temperature,
                total_steps=self.planned_steps,
                teacher_path=None if resolved.teacher_folder is None else str(resolved.teacher_folder),
                critic_path=None if resolved.critic_folder is None else str(resolved.critic_folder),
                base_dir=config.base_dir,
            ),
            algorithm=config.algorithm.name,
            algorithm_settings=config.algorithm.args,
            run_folder=self.run.folder,
        )
        self.device = device
        self.learner = device.learner = LearnerGroup(arguments, resolved.algorithm)
        self.next_batch = NextBatch(attempt, self.learner.algorithm, config.trainer.batch_groups)
        self.baselines = RoleBaselines(attempt, self.learner.algorithm)
        self.checkpoints = RunCheckpoints(attempt, worker, self.learner, self.folder, config)
        self.checkpoints.remove_abandoned()
        if attempt.checkpoint:
            self.learner.load_checkpoint(Path(attempt.checkpoint.uri))
        dtype = resolved.engine_dtype or "float32"
        # Runs of two buffers may have the same name on one host.
        shared_name = f"{self.run.name}-{xxhash.xxh3_64_hexdigest(str(self.folder).encode())[:8]}"
        self.publisher = METHODS.load(file_method(config.sync))(
            self.folder, shared_name, attempt.attempt_id, published_bytes(self.model, dtype)
        )
        adapters = config.trainer.lora if resolved.sends_adapters_alone else None
        merges = config.trainer.lora is not None and adapters is None
        self.exports = Exports(self.learner, adapters, dtype, merges)
        self.evaluations = RunEvaluations(attempt, self.checkpoints, config, self.model, self._hand_over_folder)
        self.live = live_weights(config.sync, attempt, worker, self.learner, self._write_file, adapters)
        self.parity = weight_parity(config)
        self.monitors = [monitor(self.run.name, self.folder) for monitor in resolved.monitors]
        self.published: Publication | None = None
        self.policy_version_id = 0
        self._skipped_in_a_row = 0
        # An engine that shares the device needs it for its start.
        self._not_compiled = [] if device.is_shared else [*self.learner.own.compilation.parts]

    def train(self) -> None:
        """Train to the last step, then wait for the evaluations."""
        watch = watch_trainer(self.learner, self.config.trainer.hang_s, self.run.folder)
        try:
            step = self.attempt.start_step
            self.evaluations.plan_unanswered_validations()
            self._publish(step)
            self._ask_for_validation(step)
            self.device.give()
            with self.next_batch:
                while step < self.planned_steps and not self._should_stop() and self._step(step + 1):
                    step += 1
                if step < self.planned_steps:
                    self._leave(step)  # before the end of the context, which may wait
            if step >= self.planned_steps:
                self._finish()
        except BufferUnavailableError:
            raise  # the wait for the database is over
        except Exception:
            # Keep the steps before the error. An error of this commit has the same cause.
            with suppress(Exception):
                self.checkpoints.commit()
            raise
        finally:
            watch.close()
            for monitor in self.monitors:
                monitor.close()
            if self.live is not None:
                self.live.close()
            self.publisher.close()
            self.learner.close()
            self.checkpoints.close()
            self.device.leave()

    def _step(self, step: int) -> bool:
        """Make one step; return False when the run was asked to stop."""
        timing, started = _Timing(), time.monotonic()
        self.worker.set_state(f"draws the batch of step {step}", activity="drawing")
        prepared = self.next_batch.draw(step, stop=self._should_stop, waiting=partial(self._use_wait, step))
        timing.wait = time.monotonic() - started
        if prepared is None:
            return False
        if step < self.planned_steps and draws_ahead(self.config, self.run, step + 1):
            self.next_batch.draw_ahead(step + 1)
        if not self.device.take(self._should_stop):
            return False
        batch, metrics, baselines = prepared.drawn, dict[str, float](), list[RoleBaseline]()
        if prepared.train is not None:
            train, baselines = self.baselines.advance(batch, prepared.train)
            self.worker.set_state(f"trains step {step} on {len(batch)} experiences", activity="training")
            started = time.monotonic()
            metrics = self.learner.update(train, step)
            failpoint("trainer.updated")
            self.device.free()
            timing.train = time.monotonic() - started
        if self.parity is not None and self.live is not None:
            staleness = batch.rows["staleness"].to_pylist()
            self.parity.check(step, staleness, metrics, self.live.first_sent_step, self.live.live_since)
        started = time.monotonic()
        self.worker.set_state(f"publishes the weights of step {step}", activity="publishing")
        if len(batch):
            self._publish(step)
            metrics |= self.exports.metrics()
        else:
            self._publish_unchanged(step)
        begun = None
        if step % self.config.trainer.checkpoint_every == 0 or step == self.planned_steps:
            begun = self.checkpoints.begin(step, self.policy_version_id)
        timing.publish = time.monotonic() - started
        self.worker.set_state(f"records step {step}", activity="recording")
        self._record(step, batch, timing, metrics, baselines)
        if begun is not None:
            self.checkpoints.commit_later(begun)
        self._skipped_in_a_row = 0 if len(batch) else self._skipped_in_a_row + 1
        if self._skipped_in_a_row >= MAX_EMPTY_IN_A_ROW:
            raise RftError(
                f"{self._skipped_in_a_row} steps in a row had nothing to train on; the last one: {batch.short_reason}",
                todo="see rft.v_dropped (what the chain drops, and why) and rft.v_group.closed_reason; other tasks, or fewer stages, leave something",
            )
        if step % self.config.eval.every == 0 or step == self.planned_steps:
            self._ask_for_validation(step)
        self.device.give()
        return True

    def _should_stop(self) -> bool:
        """Return whether the run was asked to stop.

        Waits call this, too. It raises if a rank has died, commits a checkpoint that is written, and serves engines that missed the weights.
        """
        self.learner.check()
        self._serve_missed_weights(self.worker.should_stop)
        if self.learner.has_written_checkpoint:
            self.checkpoints.commit()
        return self.worker.should_stop()

    def _serve_missed_weights(self, stop: Callable[[], bool]) -> None:
        """Send the weights again to engines that missed them, or write a file: an explorer that started later has no other source."""
        if self.live is not None:
            self.live.serve_missed(self.policy_version_id, partial(self.device.own, stop))
            self.published = self.live.publication

    def _use_wait(self, step: int, reviews: str | None) -> None:
        """Compile a part of what steps compute, while a batch is missing, and report what is waited for."""
        if self._not_compiled:
            self.worker.set_state("compiles the model", activity="compiling")
            self.learner.compile(self._not_compiled.pop(0))
        self._report_wait(step, reviews)

    def _report_wait(self, step: int, reviews: str | None) -> None:
        """Report what the step waits for: ready groups, or, where nothing else is missing, `reviews` of people."""
        if reviews is not None:
            option = buffer_option(self.location)
            what = f"{reviews} for step {step}: `rft label queue --run {self.run.name}{option}`"
        else:
            kind = "ready groups" if self.config.sampling.source is None else "rows of the stored selection"
            what = f"{self.config.trainer.batch_groups} {kind} for step {step}"
        self.worker.set_state("waits", what)

    def _record(
        self,
        step: int,
        batch: Batch,
        timing: _Timing,
        metrics: dict[str, float],
        baselines: list[RoleBaseline],
    ) -> None:
        metrics = metrics | batch_metrics(batch)
        metrics |= {f"selector/{name}": value for name, value in selector_metrics(self.run).items()}
        self.attempt.record_step(
            step,
            batch,
            wait_seconds=timing.wait,
            train_seconds=timing.train,
            publish_seconds=timing.publish,
            metrics=metrics,
            baselines=baselines,
        )
        shown: dict[str, float] = {key: round(metrics[key], 4) for key in ("reward", "loss") if key in metrics}
        self.worker.progress |= {"step": step, **shown}
        for monitor in self.monitors:
            monitor.log(step, metrics)

    def _publish(self, step: int) -> None:
        """Publish new weights for engines. A new attempt first publishes the restored weights, under a new version."""
        if self.live is not None:
            self.policy_version_id = self.live.publish(step)
            self.published = self.live.publication
            return
        self.published = self._write_file(f"step-{step:06d}")
        self._announce(step, self.config.sync.method, self.published)

    def _write_file(self, name: str) -> Publication:
        in_float32 = () if self.live is None else self.live.in_float32
        return self._hand_over(name, self.exports.of_learner(in_float32))

    def _hand_over(self, name: str, export: Export) -> Publication:
        in_use = weights_of_open_evaluations(self.run)
        if self.published is not None:  # the newest policy: an explorer that starts slowly still has to load it
            in_use.add(self.published.uri)
        return self.publisher.publish(name, export, in_use=in_use)

    def _hand_over_folder(self, name: str, folder: Path) -> Publication:
        return self._hand_over(name, self.exports.of_folder(folder))

    def _publish_unchanged(self, step: int) -> None:
        """Publish the weights of the step before again, so that the explorers' pacing continues after a skipped step."""
        assert self.published is not None
        self._announce(step, "unchanged", self.published)

    def _announce(self, step: int, method: str, publication: Publication) -> None:
        self.policy_version_id = self.attempt.publish(
            step, method=method, uri=publication.uri, num_bytes=publication.num_bytes, checksum=publication.checksum
        )

    def _ask_for_validation(self, step: int) -> None:
        if self.config.eval.tasks:
            if self.live is not None:
                self.worker.set_state(f"writes the weights of step {step} for their validation", activity="publishing")
                self.published = self.live.as_file(self.policy_version_id)
            assert self.published is not None
            self.evaluations.plan_validation(step, self.policy_version_id, self.published)

    def _leave(self, step: int) -> None:
        """Save a checkpoint of the last step, before the trainer stops on request."""
        self.checkpoints.commit()
        if step > self.attempt.start_step and not any(c.trainer_step == step for c in self.checkpoints.kept()):
            with self.device.own(lambda: False):
                self.checkpoints.commit_later(self.checkpoints.begin(step, self.policy_version_id))
            self.checkpoints.commit()

    def _finish(self) -> None:
        self.checkpoints.commit()
        self._refuse_untrained()
        unknown = None if self.parity is None else self.parity.conclude()
        if not self._wait_for_evaluations("the last validation"):
            return
        self.checkpoints.forget_old()  # every checkpoint has its score now
        if self.config.eval.test:
            self.evaluations.plan_tests()
            if not self._wait_for_evaluations("the test sets"):
                return
        failed = failed_evaluations(self.run)
        outcome = [f"{self.planned_steps} steps done", *([unknown] if unknown else [])]
        if failed:
            outcome.append(f"{len(failed)} evaluations failed: {failed[0].error}")
        self.attempt.finish("; ".join(outcome))

    def _refuse_untrained(self) -> None:
        """Raise an RftError if no step of the run trained anything: such a run must not count as finished."""
        num_steps, num_untrained = self.attempt.num_untrained_steps()
        if num_steps and num_steps == num_untrained:
            raise RftError(
                f"the run has trained nothing: each of its {num_steps} steps had no experiences, no gradient, or a learning rate of 0",
                todo="see state and reward in rft.v_experience (groups of equal rewards have no gradient), rft.v_dropped, and skipped, grad_norm, num_tokens"
                " and, of pairs, pairs_formed, groups_without_pair and pairs_dropped in the metrics of rft.v_train_step; pairs are formed of rollouts of one"
                " row with different rewards",
            )

    def _wait_for_evaluations(self, what: str) -> bool:
        """Wait until all evaluations are answered; return False when the run was asked to stop."""
        while num_open_evaluations(self.run):
            self.worker.set_state("waits", f"the explorer to answer {what}")
            self.learner.check()
            self._serve_missed_weights(self.worker.is_asked_to_stop)
            if self.worker.is_asked_to_stop():
                return False
            self.attempt.wait(1.0)
        return True
