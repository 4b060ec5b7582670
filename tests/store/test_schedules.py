"""The schedule of each mode, recorded: when trainer and explorer work and wait, and how old what is trained on is.

Explorer, pipeline and trainer do everything that they do in a run to a real database; only sampling and training are replaced by a number of
ticks of a clock. All modes are one rule (`sync.interval`, `sync.offset`), with `max_staleness` as the bound that it leads to.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from rftdata import Buffer
from rftdata.experience import Group, Rollout
from rftdata.planning.claims import ClaimedGroup
from rftdata.training.attempt import Attempt
from rftdata.training.batch import Batch
from tests.support.store_roles import Roles, tokens

STEPS, BATCH = 6, 2


@dataclass
class Schedule:
    """One explorer and one trainer.

    Attributes:
        sample_ticks: for the groups of one step.
        train_ticks: for one step, until its weights are published.
        sampled: (explorer step, policy, first tick) of each sampling.
        trained: (trainer step, first tick, staleness) of each step.
    """

    roles: Roles
    sample_ticks: int
    train_ticks: int
    sampled: list[tuple[int, int, int]] = field(default_factory=list)
    trained: list[tuple[int, int, int]] = field(default_factory=list)
    end: int = 0
    _claimed: list[ClaimedGroup] = field(default_factory=list)
    _version: int | None = None
    _sampled_at: int = 0
    _batch: Batch | None = None
    _trained_at: int = 0

    def run(self, attempt: Attempt) -> None:
        while len(self.trained) < STEPS or self._batch is not None:
            self._end_training(attempt)
            self._end_sampling()
            self._begin_training(attempt)
            self._begin_sampling()
            self.end += 1
            assert self.end < 200, "it stands still"
        self.end -= 1

    def _begin_sampling(self) -> None:
        if not self._claimed:
            self.roles.plan()
            self._claimed, self._version = self.roles.claim(BATCH), self.roles.version
            self._sampled_at = self.end + self.sample_ticks
            if self._claimed:
                self.sampled.append((self._claimed[0].explore_step, self.roles.policy_step, self.end))

    def _end_sampling(self) -> None:
        if self._claimed and self.end == self._sampled_at:
            self.roles.insert(*[self._sampled(group) for group in self._claimed])
            self.roles.decide()
            self._claimed = []

    def _sampled(self, group: ClaimedGroup) -> Group:
        rollouts = [Rollout(index, "ok", float(index), [tokens(float(index), self._version)]) for index in range(2)]
        return Group(rollouts, group.group_id, group.claim_token)

    def _begin_training(self, attempt: Attempt) -> None:
        step = len(self.trained) + 1
        if self._batch is None and step <= STEPS:
            self._batch = attempt.draw(step, BATCH, timeout_s=0)
            if self._batch is not None:
                assert len(self._batch) == BATCH * 2, self._batch.short_reason
                self.trained.append((step, self.end, max(self._batch.rows["staleness"].to_pylist())))
                self._trained_at = self.end + self.train_ticks

    def _end_training(self, attempt: Attempt) -> None:
        if self._batch is not None and self.end == self._trained_at:
            step = self.trained[-1][0]
            self.roles.publish(attempt, step)
            attempt.record_step(step, self._batch, wait_seconds=0, train_seconds=0, publish_seconds=0, metrics={})
            self._batch = None


def recorded(buffer: Buffer, interval: int, offset: int, sample_ticks: int, train_ticks: int) -> Schedule:
    bound = interval - 1 + offset
    roles = Roles(buffer, interval=interval, offset=offset, steps=STEPS, batch_groups=BATCH, max_staleness=bound)
    schedule = Schedule(roles, sample_ticks, train_ticks)
    with roles.attempt() as attempt:
        schedule.run(attempt)
    # Nothing is sampled only to be thrown away.
    assert roles.planned("NOT trainable") == [] and roles.planned() == [(step, BATCH) for step in range(STEPS)]
    assert max(staleness for *_, staleness in schedule.trained) <= bound
    return schedule


def test_on_policy_explorer_and_trainer_take_turns(buffer: Buffer) -> None:
    schedule = recorded(buffer, interval=1, offset=0, sample_ticks=3, train_ticks=2)
    assert schedule.sampled == [(0, 0, 0), (1, 1, 5), (2, 2, 10), (3, 3, 15), (4, 4, 20), (5, 5, 25)]
    assert schedule.trained == [(1, 3, 0), (2, 8, 0), (3, 13, 0), (4, 18, 0), (5, 23, 0), (6, 28, 0)]
    assert schedule.end == 6 * (3 + 2)


def test_every_k_steps_the_explorer_waits_once_for_k_steps(buffer: Buffer) -> None:
    schedule = recorded(buffer, interval=3, offset=0, sample_ticks=3, train_ticks=2)
    assert schedule.sampled == [(0, 0, 0), (1, 0, 3), (2, 1, 6), (3, 3, 11), (4, 3, 14), (5, 4, 17)]
    assert schedule.trained == [(1, 3, 0), (2, 6, 1), (3, 9, 1), (4, 14, 0), (5, 17, 1), (6, 20, 1)]
    assert schedule.end == 22


def test_one_step_off_the_slower_of_the_two_never_waits(buffer: Buffer) -> None:
    schedule = recorded(buffer, interval=1, offset=1, sample_ticks=3, train_ticks=2)
    assert schedule.sampled == [(0, 0, 0), (1, 0, 3), (2, 1, 6), (3, 2, 9), (4, 3, 12), (5, 4, 15)]
    assert schedule.trained == [(1, 3, 0), (2, 6, 1), (3, 9, 1), (4, 12, 1), (5, 15, 1), (6, 18, 1)]
    assert schedule.end == 6 * 3 + 2


@pytest.mark.parametrize(("sample_ticks", "train_ticks"), [(1, 3), (3, 1)])
def test_fully_asynchronous_the_explorer_runs_ahead_to_the_bound_and_no_further(
    buffer: Buffer, sample_ticks: int, train_ticks: int
) -> None:
    schedule = recorded(buffer, interval=1, offset=2, sample_ticks=sample_ticks, train_ticks=train_ticks)
    if sample_ticks < train_ticks:
        assert schedule.sampled == [(0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 1, 4), (4, 2, 7), (5, 3, 10)]
        assert schedule.trained == [(1, 1, 0), (2, 4, 1), (3, 7, 2), (4, 10, 2), (5, 13, 2), (6, 16, 2)]
        assert schedule.end == 1 + 6 * 3, "after the first sampling the trainer never waits"
    else:
        assert schedule.sampled == [(0, 0, 0), (1, 0, 3), (2, 1, 6), (3, 2, 9), (4, 3, 12), (5, 4, 15)]
        assert schedule.trained == [(1, 3, 0), (2, 6, 1), (3, 9, 1), (4, 12, 1), (5, 15, 1), (6, 18, 1)]
        assert schedule.end == 6 * 3 + 1, "the explorer never waits"
