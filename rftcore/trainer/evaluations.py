"""The evaluations that the trainer asks explorers for: validations during the run, and the test sets once at its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rftcore.config.run import RunConfig
from rftcore.sync.base import Publication
from rftcore.trainer.run_checkpoints import RunCheckpoints
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.evaluations import answered_validations, plan_evaluations
from rftdata.attempts.policies import first_policy


class RunEvaluations:
    """Plans the evaluations of one attempt.

    Args:
        model: folder of the model that the run began with.
        hand_over: publishes the weights in a folder under a name, for the explorer that answers.
    """

    def __init__(
        self,
        attempt: Attempt,
        checkpoints: RunCheckpoints,
        config: RunConfig,
        model: Path,
        hand_over: Callable[[str, Path], Publication],
    ) -> None:
        self._attempt, self._checkpoints, self._model = attempt, checkpoints, model
        self._config = config.eval
        self._hand_over = hand_over

    def plan_validation(self, step: int, policy_version_id: int, publication: Publication) -> None:
        """Ask for the validation of a policy."""
        plan_evaluations(
            self._attempt,
            policy_version_id=policy_version_id,
            trainer_step=step,
            purpose="validation",
            tasksets=[taskset.name for taskset in self._config.tasks],
            decodings=self._config.decodings,
            uri=publication.uri,
            checksum=publication.checksum,
            num_answers=self._config.num_answers,
        )

    def plan_unanswered_validations(self) -> None:
        """Plan unanswered validations of earlier steps again, from the folders of their weights.

        This comes before the first publication: what is handed over here must not push out the weights that engines load next.
        """
        if not self._config.tasks or not self._attempt.start_step:
            return
        wanted = {(taskset.name, decoding) for taskset in self._config.tasks for decoding in self._config.decodings}
        answered = answered_validations(self._attempt.run)
        sources = [(c.trainer_step, Path(c.uri), c.policy_version_id) for c in self._checkpoints.kept()]
        first = first_policy(self._attempt.run, self._attempt.attempt_id)
        if first is not None and first.trainer_step == 0:
            sources.append((0, self._model, first.policy_version_id))
        for step, folder, version in sources:
            due = step < self._attempt.start_step and step % self._config.every == 0
            if due and wanted - answered.get(step, set()) and version is not None and folder.is_dir():
                self.plan_validation(step, version, self._hand_over(f"again-step-{step:06d}", folder))

    def plan_tests(self) -> None:
        """Ask for the one reading of the test sets: by the initial weights, and by the checkpoint that validation chose."""
        kept = self._checkpoints.kept()
        best = self._checkpoints.best(kept) or kept[0]
        first = first_policy(self._attempt.run, self._attempt.attempt_id)
        assert first is not None and best.policy_version_id is not None
        for name, folder, version, step in (
            ("test-initial", self._model, first.policy_version_id, 0),
            ("test-best", Path(best.uri), best.policy_version_id, best.trainer_step),
        ):
            publication = self._hand_over(name, folder)
            plan_evaluations(
                self._attempt,
                policy_version_id=version,
                trainer_step=step,
                purpose="test",
                tasksets=[taskset.name for taskset in self._config.test],
                decodings=["greedy", "sampled"],
                uri=publication.uri,
                checksum=publication.checksum,
                num_answers=self._config.num_answers,
            )
