"""Ends a run whose rollouts all fail: at once if none ever succeeded, after some patience otherwise.

Otherwise a misspelt name in a reward would train on nothing until the last step. A step counts as failed when all its planned groups are sealed,
none of their rollouts is good, and some failed or timed out. The buffer's groups of the run's current attempt count, for all explorers together,
so a run that is resumed with a corrected function starts counting again. Once a rollout has succeeded in any attempt, failures are no mistake of
the run, and explorers wait (`Outage`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rftcore.config.run import RunConfig
from rftcore.explorer.outage import Outage
from rftdata.errors import RolloutsFailedError
from rftdata.experience import Group
from rftdata.planning.claims import has_succeeded, step_outcomes
from rftdata.run import Run
from rftdata.workers.finished_work import num_succeeded

_MAX_STACKS = 100
# After so many tries the failure of a group is stored, so that a task that always fails does not look like an endless outage.
_MAX_TRIES = 3


@dataclass
class RunFailures:
    """Watches the rollouts of one run.

    Attributes:
        outage: of this explorer.
        groups_per_step: number of groups planned per step.
        max_failed_steps: failed steps in a row that end the run.
    """

    run: Run
    outage: Outage
    groups_per_step: int
    max_failed_steps: int
    _stacks: dict[str, str] = field(default_factory=dict, init=False)
    _any_success: bool = field(default=False, init=False)
    _num_tries: Counter[int | None] = field(default_factory=Counter, init=False)  # of groups in an outage, by their ids

    @classmethod
    def of(cls, run: Run, config: RunConfig) -> RunFailures:
        """Return the watch over a run's failures, and over outages of this explorer."""
        explorer = config.explorer
        groups_per_step = max(1, int(config.trainer.batch_groups * config.sampling.fresh_share()))
        outage = Outage(explorer.patience_s, groups_per_step, partial(num_succeeded, run))
        max_failed_steps = min(explorer.max_failed_steps, config.steps or explorer.max_failed_steps)
        return cls(run, outage, groups_per_step, max_failed_steps)

    def record(self, text: str, stack: str) -> None:
        """Keep the user's stack of a failure, by the failure's description."""
        if len(self._stacks) >= _MAX_STACKS:
            self._stacks.clear()
        self._stacks.setdefault(text, stack)

    def of_an_outage(self, groups: Sequence[Group]) -> bool:
        """Return whether these groups may have failed only because an outage lasts; they are then tried again instead of stored."""
        if not groups or not self.outage.lasts or not all(_errors(group) and not _is_good(group) for group in groups):
            return False
        self._num_tries.update(group.group_id for group in groups)
        return all(self._num_tries[group.group_id] < _MAX_TRIES for group in groups)

    def check_ended(self, groups: Iterable[tuple[int, Group]]) -> None:
        """Check groups that have ended, given with their explorer steps.

        Raises:
            RolloutsFailedError: nothing succeeds.
        """
        failed = set()
        for explore_step, group in groups:
            errors = _errors(group)
            if _is_good(group):
                self.outage.passed()
                self._num_tries.clear()
            elif errors and not self.is_outage("the rollouts", len(errors), errors[0]):
                failed.add(explore_step)
        self.check(failed)

    def is_outage(self, what: str, num_failed: int, first_error: str | None) -> bool:
        """Record that all rollouts of a group, or all answers of an evaluation, failed; return False if nothing has succeeded before.

        Raises:
            RolloutsFailedError: an outage has lasted for too long.
        """
        if not self._has_succeeded():
            return False
        seconds = self.outage.failed(first_error or "no error was recorded")
        if seconds is not None:
            raise self.error(f"{what} of the last {seconds:.0f} s (explorer.patience_s)", num_failed, first_error)
        return True

    def check(self, explore_steps: Collection[int]) -> None:
        """Check explorer steps, each with a stored group that has no good rollout.

        Raises:
            RolloutsFailedError: one of them completes too many consecutive failed steps, and no rollout of the run has ever succeeded.
        """
        if not explore_steps or self._has_succeeded():
            return
        # Steps may end out of order, so a stored one may be any of the consecutive steps.
        firsts = {first for step in explore_steps for first in range(step + 1 - self.max_failed_steps, step + 1)}
        for first in sorted(first for first in firsts if first >= 0):
            steps = range(first, first + self.max_failed_steps)
            rows = step_outcomes(self.run, steps)
            failed = [row for row in rows if row.num_groups >= self.groups_per_step and row.num_failed > 0]
            if len(failed) == self.max_failed_steps and not any(row.num_good for row in rows):
                which = f"explorer step {first}" if len(steps) == 1 else f"the explorer steps {first} to {steps[-1]}"
                num_failed = sum(row.num_failed for row in rows)
                raise self.error(f"the rollouts of {which}", num_failed, rows[0].first_error)

    def _has_succeeded(self) -> bool:
        self._any_success = self._any_success or has_succeeded(self.run)
        return self._any_success

    def error(self, what: str, num_failed: int, first_error: str | None) -> RolloutsFailedError:
        """End the run; return the error to raise.

        Args:
            what: the rollouts that failed, as the message calls them.
        """
        text = first_error or "no error was recorded"
        # At once, because a trainer with no group to wait for would skip its steps and finish.
        self.run.end("failed", f"not one of {what} succeeded: {text}")
        return RolloutsFailedError(
            f"not one of {what} succeeded: {num_failed} failed, the first with {text.rstrip('.')}",
            stack=self._stacks.get(text, ""),
            todo="correct the workflow or the reward; `rft check CONFIG --deep` tries both on one task",
        )


def _is_good(group: Group) -> bool:
    return any(rollout.outcome == "ok" for rollout in group.rollouts)


def _errors(group: Group) -> list[str | None]:
    return [rollout.error for rollout in group.rollouts if rollout.outcome in ("failed", "timeout")]
