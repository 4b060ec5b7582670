"""The protocol against a model of it: any order of planning, writing, deciding, labelling, drawing, checkpoints and crashes.

The model is a few Python dicts. What must hold after every step: a batch holds whole groups that the pipeline kept, each as often
as its sampling policy allows on the history that the attempt continues, with current rewards; acknowledged data is
never lost; a process that lost a claim or the run cannot write.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rftdata import Buffer
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.batch import Batch
from rftdata.errors import FencedError
from rftdata.maintenance.verification import verify
from rftdata.pipeline.records import SealedBatch
from rftdata.planning.claims import ClaimedGroup
from tests.support.store_roles import Roles, own_group

REWARDS = st.sampled_from([0.0, 0.25, 1.0])
NEVER_STALE = 10**6
POLICIES: list[dict[str, Any]] = [
    {},
    {"over_sampling": 1.5},
    {"order": "uniform"},
    {"max_times_sampled": 2},
    {"order": "prioritized", "max_times_sampled": 3, "cooldown_steps": 2, "priority": {"formula": "mean_reward"}},
    {
        "mixture": [
            {"source": "explorer", "ratio": 2},
            {"source": "import", "ratio": 1, "order": "uniform", "max_times_sampled": 2},
        ]
    },
    {
        "mixture": [
            {"source": "explorer", "ratio": 1},
            {"source": "import", "ratio": 1, "max_times_sampled": 2},
            {"source": "replay", "ratio": 1, "order": "uniform", "max_times_sampled": 3},
        ]
    },
]


@dataclass
class Stored:
    """A group that was acknowledged: the reward of each experience, and where it stands."""

    rewards: list[float]
    decided: bool = False
    kept: bool = True
    stale: bool = False  # a label came after the verdict
    left: bool = False  # the run went back to before it was planned
    source: str = "explorer"


@dataclass
class History:
    """The steps on the way of the present attempt: which groups each drew, and where its checkpoints are."""

    draws: dict[int, list[int]] = field(default_factory=dict)
    checkpoints: list[int] = field(default_factory=lambda: [0])

    @property
    def checkpoint(self) -> int:
        return self.checkpoints[-1]

    @property
    def drawn(self) -> set[int]:
        return {group for groups in self.draws.values() for group in groups}

    def steps(self, group: int) -> list[int]:
        return [step for step, groups in self.draws.items() if group in groups]


class Protocol(RuleBasedStateMachine):
    """One run; `buffer` is shared by all examples."""

    buffer: Buffer

    @initialize(
        group_size=st.integers(1, 3),
        offset=st.integers(0, 3),
        batch_groups=st.integers(1, 3),
        policy=st.sampled_from(POLICIES),
    )
    def start(self, group_size: int, offset: int, batch_groups: int, policy: dict[str, Any]) -> None:
        self.roles = Roles(
            self.buffer,
            num_tasks=60,
            steps=30,
            batch_groups=batch_groups,
            group_size=group_size,
            offset=offset,
            max_refill=2,
            sampling={"max_staleness": NEVER_STALE, **policy},
        )
        self.stored: dict[int, Stored] = {}
        self.planned_at: dict[int, int] = {}  # the step at which the policy stood
        self.history = History()
        self.held: list[ClaimedGroup] = []
        self.lost: list[ClaimedGroup] = []
        self.fenced: list[Attempt] = []
        self.deciding: SealedBatch | None = None
        self.attempt = self.roles.attempt()
        self.step = 0
        self.tried = 0  # the step up to which groups that rest were woken
        self.open_batch: Batch | None = None

    def teardown(self) -> None:
        if hasattr(self, "attempt"):
            for attempt in (*self.fenced, self.attempt):
                attempt.close()

    # Explorers.

    @rule()
    def plan(self) -> None:
        self.roles.plan()
        for row in self.rows(
            "SELECT group_id FROM rft.rollout_group WHERE run_id = %s AND status = 'planned'", [self.roles.run_id]
        ):
            self.planned_at.setdefault(row["group_id"], self.roles.policy_step)

    @rule(count=st.integers(1, 3))
    def claim(self, count: int) -> None:
        self.held += self.roles.claim(count)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        group = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        rewards = data.draw(st.lists(REWARDS, min_size=group.group_size, max_size=group.group_size))
        assert self.roles.insert(self.roles.result(group, rewards)) == [group.group_id]
        self.stored[group.group_id] = Stored(rewards)

    @precondition(lambda self: self.deciding is None)
    @rule(reward=REWARDS, drop=st.booleans())
    def explore_and_decide(self, reward: float, drop: bool) -> None:
        """All usual operations of a run in one rule, because random rules would rarely complete a batch."""
        self.plan()
        self.claim(3)
        for group in self.held:
            rewards = [reward] * group.group_size
            self.roles.insert(self.roles.result(group, rewards))
            self.stored[group.group_id] = Stored(rewards)
        self.held = []
        self.claim_sealed()
        if self.deciding is not None:
            self.decide(drop and reward == 0)

    @rule(rewards=st.lists(REWARDS, min_size=1, max_size=3), key=st.integers(0, 5))
    def import_group(self, rewards: list[float], key: int) -> None:
        (group_id,) = self.roles.insert(own_group(rewards, task_key=str(key)))
        self.stored[group_id] = Stored(rewards, source="import")

    @precondition(lambda self: self.held)
    @rule()
    def explorer_dies(self) -> None:
        self.buffer.sql(
            "UPDATE rft.rollout_group SET lease_until = now() - interval '1 s' WHERE run_id = %s AND status = 'claimed'",
            [self.roles.run_id],
        )
        self.roles.database.fetch("release_lost_claims", run_id=self.roles.run_id)
        self.lost, self.held = self.lost + self.held, []

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def a_dead_explorer_writes(self, data: st.DataObject) -> None:
        group = self.lost.pop(data.draw(st.integers(0, len(self.lost) - 1)))
        with pytest.raises(FencedError):
            self.roles.insert(self.roles.result(group, [1.0] * group.group_size))

    # The pipeline: what it claims and what it commits may have a label in between.

    @precondition(lambda self: self.deciding is None)
    @rule()
    def claim_sealed(self) -> None:
        self.deciding = self.roles.claim_sealed()

    @precondition(lambda self: self.deciding is not None)
    @rule(drop=st.booleans())
    def decide(self, drop: bool) -> None:
        assert self.deciding is not None
        decided = self.roles.commit(self.deciding, keep=lambda row: not drop)
        for group_id in decided:
            group = self.stored[group_id]
            assert not group.left
            group.decided, group.kept, group.stale = True, not drop, False
        self.deciding = None

    @precondition(lambda self: self.stored)
    @rule(data=st.data(), reward=REWARDS)
    def label(self, data: st.DataObject, reward: float) -> None:
        self._label(data.draw(st.sampled_from(sorted(self.stored))), data, reward)

    @precondition(lambda self: self.history.drawn)
    @rule(data=st.data(), reward=REWARDS)
    def label_what_was_drawn(self, data: st.DataObject, reward: float) -> None:
        self._label(data.draw(st.sampled_from(sorted(self.history.drawn))), data, reward)

    def _label(self, group_id: int, data: st.DataObject, reward: float) -> None:
        group = self.stored[group_id]
        place = data.draw(st.integers(0, len(group.rewards) - 1))
        self.buffer.sql(
            "UPDATE rft.experience e SET reward = %s FROM rft.rollout o"
            " WHERE o.rollout_id = e.rollout_id AND o.group_id = %s AND o.rollout_index = %s",
            [reward, group_id, place],
        )
        if group.rewards[place] != reward:
            group.rewards[place] = reward
            group.stale = self._may_be_drawn(group_id) and not group.left

    def _lane(self, group_id: int) -> dict[str, Any]:
        """The policy for a group as often drawn as it is."""
        lanes = self.roles.sampling.policy()["lanes"]
        fits = [lane for lane in lanes if lane["source"] in (None, self.stored[group_id].source)]
        times = len(self.history.steps(group_id))
        fits = sorted((lane for lane in fits if times or not lane["replay"]), key=lambda lane: bool(lane["replay"]))
        left = [lane for lane in fits if times < (lane["max_times_sampled"] or NEVER_STALE)]
        found: dict[str, Any] = (left or fits)[0]
        return found

    def _may_be_drawn(self, group_id: int) -> bool:
        """Now or after it has rested."""
        return len(self.history.steps(group_id)) < (self._lane(group_id)["max_times_sampled"] or NEVER_STALE)

    def _rests(self, group_id: int, step: int) -> bool:
        steps = self.history.steps(group_id)
        return bool(steps) and steps[-1] + self._lane(group_id)["cooldown_steps"] > step

    # The trainer.

    @precondition(lambda self: self.open_batch is None and self.step < 29)
    @rule()
    def draw(self) -> None:
        batch = self.attempt.draw(self.step + 1, self.roles.batch_groups, timeout_s=0)
        self.tried = self.step + 1
        if batch is None:
            return
        self.open_batch = batch
        rows = batch.rows.to_pylist()
        groups = list(dict.fromkeys(row["group_id"] for row in rows))
        for group_id in groups:
            group = self.stored[group_id]
            assert self._may_be_drawn(group_id), "drawn too often on one history"
            assert not self._rests(group_id, self.tried)
            assert group.decided and group.kept and not group.stale and not group.left
            assert [row["reward"] for row in rows if row["group_id"] == group_id] == group.rewards
        assert len(groups) == self.roles.batch_groups or batch.short_reason
        self.history.draws[self.step + 1] = groups
        again = sum(len(self.history.steps(group)) > 1 for group in groups)
        event(f"drawn {'full' if groups else 'empty'}{', some again' if again else ''}")

    @precondition(lambda self: self.open_batch is not None)
    @rule()
    def train(self) -> None:
        assert self.open_batch is not None
        self.step += 1
        self.roles.publish(self.attempt, self.step)
        self.attempt.record_step(
            self.step, self.open_batch, wait_seconds=0, train_seconds=0, publish_seconds=0, metrics={}
        )
        self.open_batch = None

    @precondition(lambda self: self.open_batch is not None)
    @rule()
    def release(self) -> None:
        assert self.open_batch is not None
        self.attempt.release(self.open_batch)
        self._undo(self.step)
        self.open_batch = None

    @precondition(lambda self: self.open_batch is None and self.step > self.history.checkpoint)
    @rule()
    def checkpoint(self) -> None:
        self.attempt.commit_checkpoint(self.step, f"/checkpoints/{self.step}")
        self.history.checkpoints.append(self.step)

    @rule()
    def trainer_is_lost(self) -> None:
        self.buffer.sql(
            "UPDATE rft.run_attempt SET lease_until = now() - interval '1 s' WHERE run_id = %s", [self.roles.run_id]
        )
        self.fenced.append(self.attempt)
        event(f"trainer died after {'some' if self.history.draws else 'no'} draws")
        self._go_on()

    @rule(data=st.data(), keep=st.booleans())
    def go_back(self, data: st.DataObject, keep: bool) -> None:
        """To any checkpoint of the present history, or to the initial weights."""
        step = data.draw(st.sampled_from(self.history.checkpoints))
        self.attempt.close()
        self.buffer.rewind(self.roles.run, step, keep_rollouts=keep)
        self.history.checkpoints = [s for s in self.history.checkpoints if s <= step]
        if not keep:
            for group_id, group in self.stored.items():
                group.left = group.left or self._planned_after(group_id, step)
            gone = [group for group in self.held if self._planned_after(group.group_id, step)]
            self.lost += gone
            self.held = [group for group in self.held if group not in gone]
        event(f"went back {'some' if step < self.step else 'no'} steps{', rollouts kept' if keep else ''}")
        self.fenced.append(self.attempt)
        self._go_on()

    def _planned_after(self, group_id: int, step: int) -> bool:
        return self.planned_at.get(group_id, -1) >= step  # an import was never planned

    def _go_on(self) -> None:
        """Let a new attempt take over the run."""
        self.attempt = self.roles.attempt()
        self.step = self.tried = self.attempt.start_step
        assert self.step == self.history.checkpoint
        self._undo(self.step)
        self.open_batch = None

    @precondition(lambda self: self.fenced)
    @rule()
    def a_dead_trainer_acts(self) -> None:
        for act in (
            lambda attempt: attempt.draw(self.step + 1, 1, timeout_s=0),
            lambda attempt: attempt.commit_checkpoint(99, "/checkpoints/99"),
            lambda attempt: attempt.publish(99, method="memory", uri="/w", num_bytes=1, checksum="0"),
            lambda attempt: attempt.finish("done"),
        ):
            with pytest.raises(FencedError):
                act(self.fenced[-1])

    def _undo(self, step: int) -> None:
        """Steps after `step` never took place; labels that came while their groups counted as drawn make them stale now."""
        for later in [s for s in self.history.draws if s > step]:
            del self.history.draws[later]
        for group_id, group in self.stored.items():
            drawable = group.decided and not group.left and self._may_be_drawn(group_id)
            if drawable and self._labelled_since_verdict(group_id):
                group.stale = True

    def _labelled_since_verdict(self, group_id: int) -> bool:
        (row,) = self.rows(
            "SELECT coalesce(max(l.label_id), 0) > (SELECT max(v.label_cut) FROM rft.verdict v WHERE v.group_id = %s) AS newer"
            " FROM rft.experience e JOIN rft.label l USING (experience_id) WHERE e.group_id = %s",
            [group_id, group_id],
        )
        return bool(row["newer"])

    # What must hold.

    def rows(self, query: str, parameters: list[Any]) -> list[dict[str, Any]]:
        return self.buffer.sql(query, parameters).to_pylist()

    @invariant()
    def nothing_acknowledged_is_lost(self) -> None:
        if not hasattr(self, "stored"):
            return
        found: dict[int, list[float]] = {}
        for row in self.rows(
            "SELECT group_id, reward FROM rft.v_experience WHERE run_id = %s ORDER BY group_id, rollout_index",
            [self.roles.run_id],
        ):
            found.setdefault(row["group_id"], []).append(row["reward"])
        assert found == {group_id: group.rewards for group_id, group in self.stored.items()}

    @invariant()
    def what_was_decided_and_not_drawn_waits_to_be_drawn(self) -> None:
        if not hasattr(self, "stored"):
            return
        # The next draw wakes those that have rested long enough before it picks any.
        waiting = self.rows(
            "SELECT w.item_id FROM rft.worklist w JOIN rft.rollout_group g ON g.group_id = w.item_id"
            " WHERE w.run_id = %s::bigint AND w.consumer = 'trainer'"
            " AND (w.available OR (w.resume_step <= %s AND g.status = 'ready' AND g.trainable))",
            [self.roles.run_id, self.tried],
        )
        assert {row["item_id"] for row in waiting} == {
            group_id
            for group_id, group in self.stored.items()
            if group.decided
            and group.kept
            and not group.stale
            and not group.left
            and self._may_be_drawn(group_id)
            and not self._rests(group_id, self.tried)
        }

    @invariant()
    def consumed_is_what_checkpoints_contain(self) -> None:
        if not hasattr(self, "stored"):
            return
        consumed = self.rows(
            "SELECT DISTINCT trainer_step, item_id FROM rft.v_consumption WHERE run_id = %s", [self.roles.run_id]
        )
        expected = {(s, g) for s, gs in self.history.draws.items() if s <= self.history.checkpoint for g in gs}
        assert {(row["trainer_step"], row["item_id"]) for row in consumed} == expected


def test_any_order_of_events_keeps_the_contracts(buffer: Buffer) -> None:
    class Machine(Protocol):
        pass

    Machine.buffer = buffer
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            # A failing example is readable as it is, and shrinking takes minutes.
            phases=(Phase.explicit, Phase.reuse, Phase.generate),
        ),
    )
    assert list(verify(buffer)) == []
