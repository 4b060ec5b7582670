"""The schedule of each mode, recorded: when trainer and explorer work and wait, and how old what is trained on is.

Explorer, pipeline and trainer do everything that they do in a run to a real database; only sampling and training are replaced by a number of
ticks of a clock. All modes are one rule (`sync.interval`, `sync.offset`, `sampling.max_staleness`, `sampling.over_sampling`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from rftdata import Buffer
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.batch import Batch
from rftdata.experience import Group, Rollout
from rftdata.planning.claims import ClaimedGroup
from rftdata.planning.planner import Planner
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
            self.roles.insert(*[sampled(group, self._version) for group in self._claimed])
            self.roles.decide()
            self._claimed = []

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


def sampled(group: ClaimedGroup, version: int | None) -> Group:
    rollouts = [Rollout(index, "ok", float(index), [tokens(float(index), version)]) for index in range(2)]
    return Group(rollouts, group.group_id, group.claim_token)


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


def sealed(roles: Roles, *groups: ClaimedGroup) -> None:
    roles.insert(*[roles.result(group, (0.0, 1.0)) for group in groups])
    roles.decide()


def drawn(attempt: Attempt, step: int) -> list[int] | None:
    batch = attempt.draw(step, BATCH, timeout_s=0)
    return None if batch is None else sorted(set(batch.rows["group_id"].to_pylist()))


def test_over_sampling_trains_on_what_is_ready_first_and_later_on_the_rest(buffer: Buffer) -> None:
    roles = Roles(buffer, steps=3, batch_groups=BATCH, sampling={"over_sampling": 0.5})
    with roles.attempt() as attempt:
        roles.plan()
        slow, *others = roles.claim()
        assert len(others) == BATCH
        sealed(roles, *others)
        assert drawn(attempt, 1) == [2, 3]
        roles.publish(attempt, 1)
        assert roles.plan() == BATCH
        fourth, fifth = roles.claim()
        sealed(roles, fourth)
        assert drawn(attempt, 2) is None, "one of two groups is ready"
        sealed(roles, slow)
        assert drawn(attempt, 2) == [1, 4]
        roles.publish(attempt, 2)
        assert roles.plan() == 1, "the last step takes what is left"
        sealed(roles, fifth, *roles.claim())
        assert drawn(attempt, 3) == [5, 6]
    assert roles.planned("status = 'ready'") == [(0, 3), (1, 2), (2, 1)]


def test_a_lost_group_of_the_surplus_is_planned_again(buffer: Buffer) -> None:
    roles = Roles(buffer, steps=3, batch_groups=BATCH, max_refill=4, sampling={"over_sampling": 1.0})
    with roles.attempt():
        assert roles.plan() == 2 * BATCH
        roles.explore()
        roles.decide(keep=lambda row: row["group_id"] != 4)
        assert roles.plan() == 1 and roles.planned("is_refill") == [(0, 1)]
        assert roles.plan() == 0


def test_a_group_that_the_next_step_would_refuse_is_waited_for(buffer: Buffer) -> None:
    roles = Roles(buffer, steps=4, batch_groups=BATCH, max_staleness=1, sampling={"over_sampling": 1.0})
    with roles.attempt() as attempt:
        roles.plan()
        slow, *others = roles.claim()
        sealed(roles, *others)
        assert drawn(attempt, 1) == [2, 3]
        roles.publish(attempt, 1)
        roles.plan()
        sealed(roles, *roles.claim())
        assert drawn(attempt, 2) is None, "a full batch is ready, and the slow group would be too old for step 3"
        sealed(roles, slow)
        assert drawn(attempt, 2) == [1, 4]


def test_explorers_do_not_sample_what_would_be_too_old(buffer: Buffer) -> None:
    roles = Roles(buffer, steps=9, offset=100, batch_groups=BATCH, max_staleness=2)
    with roles.attempt() as attempt:
        roles.plan()
        assert roles.planned() == [(0, 2), (1, 2), (2, 2)]
        sealed(roles, *roles.claim())
        roles.train(attempt, 1)
        roles.plan()
        assert roles.planned("status = 'planned'") == [(3, 2)]


def with_a_slow_group(buffer: Buffer, over_sampling: float) -> list[tuple[int, int]]:
    """(first tick, greatest staleness) of each step on-policy, where the second of four groups takes six ticks, the others and training two."""
    roles = Roles(buffer, steps=STEPS, batch_groups=4, sampling={"over_sampling": over_sampling})
    trained: list[tuple[int, int]] = []
    sampling: dict[int, list[Group]] = {}
    batch, published_at = None, 0
    with roles.attempt() as attempt:
        for tick in range(100):
            step = len(trained)
            if batch is not None and tick == published_at:
                roles.publish(attempt, step)
                attempt.record_step(step, batch, wait_seconds=0, train_seconds=0, publish_seconds=0, metrics={})
                batch = None
                if step == STEPS:
                    break
            if tick in sampling:
                roles.insert(*sampling.pop(tick))
                roles.decide()
            if batch is None and (batch := attempt.draw(step + 1, 4, timeout_s=0)) is not None:
                trained.append((tick, max(batch.rows["staleness"].to_pylist())))
                published_at = tick + 2
            roles.plan()
            for group in roles.claim():
                sampling.setdefault(tick + (6 if group.ordinal % 4 == 1 else 2), []).append(
                    sampled(group, roles.version)
                )
    assert roles.planned("NOT trainable OR status <> 'ready'") == [], "nothing is sampled only to be thrown away"
    assert sum(n for _, n in roles.planned()) == STEPS * 4
    return trained


@pytest.mark.parametrize(
    ("over_sampling", "trained"),
    [
        (0.0, [(6, 0), (14, 0), (22, 0), (30, 0), (38, 0), (46, 0)]),
        (0.5, [(2, 0), (6, 1), (10, 1), (14, 1), (18, 1), (22, 1)]),
    ],
)
def test_over_sampling_hides_the_slowest_group(
    buffer: Buffer, over_sampling: float, trained: list[tuple[int, int]]
) -> None:
    assert with_a_slow_group(buffer, over_sampling) == trained


def test_tasks_that_are_used_up_do_not_end_a_run_whose_step_has_its_groups(buffer: Buffer) -> None:
    roles = Roles(
        buffer,
        steps=3,
        batch_groups=BATCH,
        num_tasks=3,
        max_refill=4,
        sampling={"over_sampling": 0.5},
        selector="shuffle",
    )
    once = tuple(taskset.model_copy(update={"max_repeats": 1}) for taskset in roles.plan_config.tasksets)
    roles.planner = Planner(roles.run, replace(roles.plan_config, tasksets=once))
    with roles.attempt() as attempt:
        assert roles.plan() == 3
        sealed(roles, *roles.claim())
        roles.buffer.sql(
            "UPDATE rft.rollout_group SET trainable = false, status = 'ready', decided_by = 'p1' WHERE group_id = 3"
        )
        roles.buffer.sql("UPDATE rft.worklist SET available = false WHERE item_id = 3")
        assert roles.plan() == 0, "the group that is lost is not one that the step needs"
        assert drawn(attempt, 1) == [1, 2]
