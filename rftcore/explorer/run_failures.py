"""Ends a run whose rollouts all fail: at once if none ever succeeded, after some patience otherwise.

A misspelt name in a reward would otherwise train on nothing until the last step. A step counts as failed when as many of its groups are sealed
as were planned, none of their rollouts is good, and some failed or timed out. All explorers count together, by the buffer's groups of the run's
current attempt. A run that is resumed with a corrected function therefore starts counting again. Once something has succeeded, in any attempt,
failures are no mistake of the run, and explorers wait: see `Outage`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from rftcore.explorer.outage import Outage
from rftdata.errors import RolloutsFailedError
from rftdata.experience import Group
from rftdata.planning.claims import has_succeeded, step_outcomes
from rftdata.run import Run

_MAX_STACKS = 100


@dataclass
class RunFailures:
    """Watches the rollouts of one run.

    Attributes:
        outage: of the explorer that asks.
        groups_per_step: number of groups planned per step.
        max_failed_steps: failed steps in a row that end the run.
    """

    run: Run
    outage: Outage
    groups_per_step: int
    max_failed_steps: int
    _stacks: dict[str, str] = field(default_factory=dict, init=False)
    _any_success: bool = field(default=False, init=False)

    def record(self, text: str, stack: str) -> None:
        """Keep the user's stack of a failure, by the failure's description."""
        if len(self._stacks) >= _MAX_STACKS:
            self._stacks.clear()
        self._stacks.setdefault(text, stack)

    def of_an_outage(self, groups: Sequence[Group]) -> bool:
        """Return whether these groups show only that an outage lasts: they are not stored, but tried again when it is over."""
        return bool(groups) and self.outage.lasts and all(_errors(group) and not _is_good(group) for group in groups)

    def see(self, groups: Iterable[tuple[int, Group]]) -> None:
        """Look at groups that have ended, with their explorer steps.

        Raises:
            RolloutsFailedError: nothing succeeds.
        """
        failed = set()
        for explore_step, group in groups:
            errors = _errors(group)
            if _is_good(group):
                self.outage.passed()
            elif errors and not self.is_outage("the rollouts", len(errors), errors[0]):
                failed.add(explore_step)
        self.check(failed)

    def is_outage(self, what: str, num_failed: int, first_error: str | None) -> bool:
        """Record that all rollouts of a group, or all answers of an evaluation, failed; return False if nothing has succeeded before.

        Raises:
            RolloutsFailedError: an outage has lasted for too long.
        """
        self._any_success = self._any_success or has_succeeded(self.run)
        if not self._any_success:
            return False
        seconds = self.outage.failed(first_error or "no error was recorded")
        if seconds is not None:
            raise self.error(f"{what} of the last {seconds:.0f} s (explorer.patience_s)", num_failed, first_error)
        return True

    def check(self, explore_steps: Collection[int]) -> None:
        """Check the steps of which a group without a good rollout was stored, in a run in which nothing has succeeded.

        Raises:
            RolloutsFailedError: one of them completes too many consecutive failed steps.
        """
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

    def error(self, what: str, num_failed: int, first_error: str | None) -> RolloutsFailedError:
        """End the run, and return the error for the rollouts that `what` names, none of which succeeded."""
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
