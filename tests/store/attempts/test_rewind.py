"""Going back to an earlier step, with and without the rollouts of later ones, and forking a run there (contract C3)."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest

from rftdata import Buffer
from rftdata.attempts.attempt import Attempt
from rftdata.errors import ConfigError, FencedError
from rftdata.postgres.database import fetch
from tests.store.pipeline.test_review_locks import wait_for_waiting
from tests.support.store_roles import Roles
from tests.support.waiting import PATIENCE_S

# Remembers more than a cursor: how often each task succeeded, as far as it was observed.
STATEFUL = """
from collections import Counter
from rftdata.selectors import Selector


class Hardest(Selector):
    \"\"\"The tasks with the fewest successes so far, in the order of their ids.\"\"\"

    def __init__(self, task_ids, seed):
        self._task_ids, self._successes, self._chosen = list(task_ids), Counter(), Counter()

    def select(self, count):
        chosen = []
        for _ in range(count):
            chosen.append(min(self._task_ids, key=lambda i: (self._chosen[i] + 10 * self._successes[i], i)))
            self._chosen[chosen[-1]] += 1
        return chosen

    def observe(self, observations):
        for observation in observations:
            self._successes[observation.task_id] += observation.successes

    def state_dict(self):
        return {"successes": sorted(self._successes.items()), "chosen": sorted(self._chosen.items())}

    def load_state_dict(self, state):
        self._successes, self._chosen = Counter(dict(state["successes"])), Counter(dict(state["chosen"]))

    def metrics(self):
        return {}
"""


@pytest.fixture(params=["sequential", "shuffle", "./hardest.py:Hardest"])
def roles(buffer: Buffer, tmp_path: Path, request: pytest.FixtureRequest) -> Roles:
    (tmp_path / "hardest.py").write_text(STATEFUL)
    return Roles(buffer, num_tasks=7, steps=12, offset=1, selector=request.param, base_dir=tmp_path)


def trained(roles: Roles, first: int, last: int, *, checkpoints: set[int]) -> dict[int, list[int]]:
    """Do steps in one attempt; the groups each drew."""
    drawn = {}
    with roles.attempt() as attempt:
        assert attempt.start_step == first - 1
        for step in range(first, last + 1):
            roles.work()
            drawn[step] = roles.train(attempt, step)
            if step in checkpoints:
                attempt.commit_checkpoint(step, f"/checkpoints/{attempt.attempt_id}-{step}")
    return drawn


def learned(roles: Roles, run_id: int | None = None) -> dict[str, Any]:
    """The state of the run's selectors and statistics."""
    run_id = run_id or roles.run_id
    stats = roles.buffer.sql(
        "SELECT task_id, alpha, beta, attempts, mean_reward FROM rft.task_stat WHERE run_id = %s AND attempts > 0 ORDER BY task_id",
        [run_id],
    )
    states = roles.buffer.sql(
        "SELECT taskset, selector, state FROM rft.selector_state WHERE run_id = %s ORDER BY 1", [run_id]
    )
    return {"stats": stats.to_pylist(), "states": states.to_pylist()}


def tasks_of(roles: Roles, groups: list[int]) -> list[int]:
    rows = roles.buffer.sql(
        "SELECT task_id FROM rft.rollout_group WHERE group_id = ANY (%s) ORDER BY ordinal", [groups]
    )
    found: list[int] = rows["task_id"].to_pylist()
    return found


def test_a_rewound_run_plans_the_same_tasks_again(roles: Roles) -> None:
    first = trained(roles, 1, 4, checkpoints={2, 4})
    then = trained(roles, 5, 8, checkpoints={6, 8})
    roles.buffer.rewind(roles.run, 2)
    again = trained(roles, 3, 8, checkpoints=set())
    for step, groups in {**first, **then}.items():
        if step > 2:
            assert tasks_of(roles, again[step]) == tasks_of(roles, groups), f"step {step}"
            # With an offset of 1, the groups of step 3 were planned before step 2 was done: they stay.
            assert (again[step] == groups) == (step == 3)


def test_statistics_and_selectors_are_those_of_the_step(roles: Roles) -> None:
    with roles.attempt() as attempt:
        for step in (1, 2):
            roles.work()
            roles.train(attempt, step)
        attempt.commit_checkpoint(2, "/checkpoints/2")
        then = learned(roles)
        for step in (3, 4, 5):
            roles.work(rewards=lambda group: [1.0] * group.group_size)
            roles.train(attempt, step)
        attempt.commit_checkpoint(5, "/checkpoints/5")
    assert learned(roles) != then
    roles.buffer.rewind(roles.run, 2)
    assert learned(roles) == then


def test_a_relabel_during_a_rewind_does_not_reach_the_selectors(roles: Roles) -> None:
    trained(roles, 1, 2, checkpoints={1})
    row = roles.buffer.sql(
        "SELECT e.experience_id, g.task_id FROM rft.experience e JOIN rft.rollout_group g USING (group_id)"
        " WHERE g.planned_policy_step >= 1 ORDER BY 1 LIMIT 1"
    ).to_pylist()[0]
    with psycopg.connect(roles.database.uri) as person:
        person.execute(
            "UPDATE rft.experience SET reward = 1 - coalesce(reward, 0) WHERE experience_id = %s",
            [row["experience_id"]],
        )
        going_back = threading.Thread(target=roles.buffer.rewind, args=(roles.run, 1))
        going_back.start()
        wait_for_waiting(roles.buffer, 1, behind=person.info.backend_pid)
        person.commit()
    going_back.join(PATIENCE_S)
    left = roles.buffer.sql(
        "SELECT o.kind::text AS kind, o.applied, o.applied_seq FROM rft.task_observation o"
        " JOIN rft.rollout_group g USING (run_id, attempt_id, ordinal) WHERE g.left_by IS NOT NULL"
    ).to_pylist()
    assert {"explicit", "correction"} == {one["kind"] for one in left}
    assert all(one["applied"] and one["applied_seq"] is None for one in left)


def test_left_groups_stay_stored_and_are_not_used_again(roles: Roles) -> None:
    trained(roles, 1, 4, checkpoints={2, 4})
    stored = roles.buffer.sql("SELECT experience_id, response, reward FROM rft.experience ORDER BY 1").to_pylist()
    roles.buffer.rewind(roles.run, 2)
    assert (
        roles.buffer.sql("SELECT experience_id, response, reward FROM rft.experience ORDER BY 1").to_pylist() == stored
    )
    left = {
        g
        for (g,) in (
            (row["group_id"],)
            for row in roles.buffer.sql("SELECT group_id FROM rft.rollout_group WHERE left_by IS NOT NULL").to_pylist()
        )
    }
    assert left
    # A label does not bring one back, either.
    roles.buffer.sql("UPDATE rft.experience SET reward = 0.75 WHERE group_id = ANY (%s)", [sorted(left)])
    again = trained(roles, 3, 8, checkpoints=set())
    assert not left & {group for groups in again.values() for group in groups}
    assert all(roles.group(group)["closed_reason"] == "the run went back to step 2" for group in left)


def test_kept_rollouts_are_drawn_again(roles: Roles) -> None:
    before = trained(roles, 1, 4, checkpoints={2, 4})
    roles.buffer.rewind(roles.run, 2, keep_rollouts=True)
    assert roles.planned("left_by IS NOT NULL") == []
    again = trained(roles, 3, 4, checkpoints=set())
    assert {step: again[step] for step in (3, 4)} == {step: before[step] for step in (3, 4)}


def test_nothing_is_used_twice_on_the_new_history(roles: Roles) -> None:
    trained(roles, 1, 4, checkpoints={2, 4})
    trained(roles, 5, 6, checkpoints={6})
    roles.buffer.rewind(roles.run, 4)
    trained(roles, 5, 7, checkpoints={7})
    roles.buffer.rewind(roles.run, 2, keep_rollouts=True)
    trained(roles, 3, 6, checkpoints={6})
    consumed = roles.buffer.sql("SELECT experience_id, trainer_step FROM rft.v_consumption").to_pylist()
    assert Counter(Counter(row["experience_id"] for row in consumed).values()).keys() == {1}
    assert {row["trainer_step"] for row in consumed} == set(range(1, 7))
    curve = roles.buffer.sql("SELECT trainer_step FROM rft.v_train_step ORDER BY 1")["trainer_step"].to_pylist()
    assert curve == list(range(1, 7))


def test_going_back_to_the_beginning(roles: Roles) -> None:
    first = trained(roles, 1, 3, checkpoints={3})
    roles.buffer.rewind(roles.run, 0)
    assert learned(roles)["stats"] == []
    with roles.attempt() as attempt:
        assert attempt.checkpoint is None and attempt.start_step == 0
    again = trained(roles, 1, 3, checkpoints=set())
    assert [tasks_of(roles, again[s]) for s in (1, 2, 3)] == [tasks_of(roles, first[s]) for s in (1, 2, 3)]


def test_a_step_without_a_checkpoint_is_refused_and_nothing_changes(roles: Roles) -> None:
    trained(roles, 1, 4, checkpoints={2, 4})
    with pytest.raises(ConfigError, match=r"no checkpoint of step 3.*allowed.*0, 2, 4"):
        roles.buffer.rewind(roles.run, 3)
    with pytest.raises(ConfigError, match="no checkpoint of step 3"):
        roles.buffer.fork(roles.run, name="other", step=3)
    assert roles.planned("left_by IS NOT NULL") == []
    assert roles.buffer.sql("SELECT count(*) AS n FROM rft.run")["n"].to_pylist() == [1]
    assert trained(roles, 5, 6, checkpoints=set())


def test_a_run_that_is_being_trained_is_not_taken_back(roles: Roles) -> None:
    trained(roles, 1, 2, checkpoints={2})
    with roles.attempt(), pytest.raises(FencedError, match="is being trained by process"):
        roles.buffer.rewind(roles.run, 2)


def forked(roles: Roles, **options: Any) -> Roles:
    """Roles for a fork of the run."""
    other = object.__new__(Roles)
    other.__dict__.update(roles.__dict__)
    other.run = roles.buffer.fork(roles.run, name="other", **options)
    other.run_id = other.run.run_id
    other.planner = type(roles.planner)(other.run, roles.plan_config)
    other.worker_id = fetch_worker(other)
    other.version, other.policy_step = None, -1
    return other


def fetch_worker(roles: Roles) -> int:
    with roles.database.connection() as connection:
        row = fetch(
            connection,
            "insert_worker",
            run_id=roles.run_id,
            role="explorer",
            host="here",
            pid=1,
            pid_space="",
            pid_started=0,
        )[0]
    return int(row["worker_id"])


def test_a_fork_continues_alone(roles: Roles) -> None:
    first = trained(roles, 1, 4, checkpoints={2, 4})
    other = forked(roles, step=2)
    assert other.run.name == "other"
    row = roles.buffer.find_run("other")
    assert row.parent_run_id == roles.run_id
    in_fork = trained(other, 3, 6, checkpoints={4, 6})
    on = trained(roles, 5, 6, checkpoints={6})
    for step in (3, 4):
        assert tasks_of(other, in_fork[step]) == tasks_of(roles, first[step]), f"step {step}"
    groups = {group for drawn in (*in_fork.values(),) for group in drawn}
    assert not groups & {group for drawn in (*first.values(), *on.values()) for group in drawn}
    for run, steps in ((roles, 6), (other, 6)):
        used = roles.buffer.sql(
            "SELECT experience_id, trainer_step FROM rft.v_consumption WHERE run_id = %s", [run.run_id]
        ).to_pylist()
        assert {u["trainer_step"] for u in used} == set(range(1, steps + 1))
        assert len({u["experience_id"] for u in used}) == len(used)
        curve = roles.buffer.sql("SELECT trainer_step FROM rft.v_train_step WHERE run_id = %s ORDER BY 1", [run.run_id])
        assert curve["trainer_step"].to_pylist() == list(range(1, steps + 1))
    shared = roles.buffer.sql(
        "SELECT count(*) AS n FROM rft.v_consumption a JOIN rft.v_consumption b USING (experience_id) WHERE a.run_id = %s AND b.run_id = %s",
        [roles.run_id, other.run_id],
    )
    assert shared["n"].to_pylist() == [2 * 2 * 2], "the steps before the fork: two steps of two groups of two"


def test_a_fork_copies_groups_that_were_not_drawn(roles: Roles) -> None:
    trained(roles, 1, 4, checkpoints={2, 4})
    roles.buffer.sql("UPDATE rft.experience SET reward = 0.25, reward_final = true WHERE reward = 1")
    before = roles.buffer.sql(
        "SELECT g.ordinal, o.rollout_index, e.response, e.reward, e.reward_sampled, e.segment_id, e.segment_row, e.experience_id AS parent_id"
        " FROM rft.experience e JOIN rft.rollout_group g USING (group_id) JOIN rft.rollout o USING (rollout_id)"
        " WHERE g.explore_step >= 2 ORDER BY 1, 2"
    ).to_pylist()
    other = forked(roles, step=2, keep_rollouts=True)
    copies = roles.buffer.sql(
        "SELECT g.ordinal, o.rollout_index, e.response, e.reward, e.reward_sampled, e.segment_id, e.segment_row, e.parent_id"
        " FROM rft.experience e JOIN rft.rollout_group g USING (group_id) JOIN rft.rollout o USING (rollout_id)"
        " WHERE e.run_id = %s ORDER BY 1, 2",
        [other.run_id],
    ).to_pylist()
    assert copies == before and copies
    assert other.decide(), "the fork's own pipeline decides on them"
    with other.attempt() as attempt:
        batch = attempt.draw(3, 2, timeout_s=5)
        assert batch is not None
        parents = roles.buffer.sql(
            "SELECT parent_id FROM rft.experience WHERE experience_id = ANY (%s)",
            [batch.rows["experience_id"].to_pylist()],
        )
        assert set(parents["parent_id"].to_pylist()) <= {row["parent_id"] for row in before}
        assert list(batch.packed("token_ids")[:5]) == [5, 6, 7, 8, 9]
        assert set(batch.rows["reward"].to_pylist()) == {0.0, 0.25}


def test_a_fork_knows_what_its_parent_knew(roles: Roles) -> None:
    trained(roles, 1, 4, checkpoints={2, 4})
    other = forked(roles)
    roles.buffer.rewind(roles.run, 4)
    assert learned(roles, other.run_id) == learned(roles)
    with other.attempt() as attempt:
        assert attempt.start_step == 4
        assert attempt.checkpoint is not None and attempt.checkpoint.run_id == roles.run_id


def test_checkpoints_that_another_run_began_with_are_marked_as_needed(roles: Roles) -> None:
    trained(roles, 1, 4, checkpoints={2, 4})
    other = forked(roles, step=2)

    def needed(attempt: Attempt) -> dict[int, bool]:
        rows = roles.database.fetch("kept_checkpoints", attempt_id=attempt.attempt_id)
        return {row["trainer_step"]: row["needed"] for row in rows}

    with roles.attempt() as attempt:
        assert needed(attempt) == {2: True, 4: False}
    with other.attempt() as attempt:
        attempt.commit_checkpoint(3, "/checkpoints/other-3")
        assert needed(attempt) == {2: True, 3: False}
