"""Planning: which step may run, how many groups it lacks, which tasks they try; the same after a crash."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import pytest

import rftdata
from rftdata import Buffer
from rftdata.errors import PluginError, TaskSourceError
from rftdata.planning.active_tasks import ActiveTasks
from rftdata.planning.pacing import Pacing
from rftdata.planning.planner import Planner
from tests.support.store_roles import Roles, own_group

PACINGS = [(1, 0), (1, 1), (1, 3), (2, 0), (2, 1), (3, 0), (3, 2), (4, 4)]


@pytest.mark.parametrize(("interval", "offset"), PACINGS)
def test_a_step_may_start_when_the_policy_is_new_enough(interval: int, offset: int) -> None:
    """Step s needs the policy after trainer step floor((s - offset) / interval) · interval, none before offset, and none older than window."""
    for window in (0, 1, 2, 5, 99):
        pacing = Pacing(interval=interval, offset=offset, window=window)
        for policy_step in range(25):
            for step in range(40):
                needed = max((step - offset) // interval * interval, step - window, 0)
                assert pacing.needed_policy(step) == needed
                assert (step <= pacing.last_step(policy_step)) == (policy_step >= needed)


@pytest.mark.parametrize(("interval", "offset"), [(1, 0), (1, 1), (2, 0), (3, 2)])
def test_groups_are_planned_just_as_far_as_the_policy_allows(buffer: Buffer, interval: int, offset: int) -> None:
    roles = Roles(buffer, interval=interval, offset=offset, steps=6)
    with roles.attempt() as attempt:
        for step in range(1, 7):
            roles.work()
            allowed = [s for s in range(6) if step - 1 >= max((s - offset) // interval * interval, 0)]
            assert roles.planned() == [(s, 2) for s in allowed]
            roles.train(attempt, step)
        assert roles.plan() == 0


def test_nothing_is_planned_before_the_first_weights_nor_after_a_stop(buffer: Buffer) -> None:
    roles = Roles(buffer)
    with roles.attempt(publish=False) as attempt:
        assert roles.plan() == 0
        roles.publish(attempt, 0)
        roles.database.run("request_stop", run_id=roles.run_id)
        assert roles.plan() == 0


def test_a_place_that_was_dropped_is_planned_again_for_the_same_step(buffer: Buffer) -> None:
    roles = Roles(buffer, max_refill=3)
    with roles.attempt() as attempt:
        roles.plan()
        first, second = roles.explore()
        roles.decide(keep=lambda row: row["group_id"] != first)
        assert roles.plan() == 1
        assert roles.planned() == [(0, 3)] and roles.planned("is_refill") == [(0, 1)]
        (third,) = roles.explore()
        roles.decide()
        assert roles.plan() == 0
        assert roles.train(attempt, 1) == [second, third]


def test_refills_of_a_step_end_at_max_refill(buffer: Buffer) -> None:
    roles = Roles(buffer, max_refill=3)
    with roles.attempt():
        assert roles.work(keep=lambda row: False) == 2 + 3
        assert roles.planned("is_refill") == [(0, 3)]
        assert roles.plan() == 0


def test_a_group_brought_back_to_life_counts_for_the_next_step(buffer: Buffer) -> None:
    """A refill was planned in its place meanwhile, so one group is over: the next step needs one refill less."""
    roles = Roles(buffer, max_refill=2)
    with roles.attempt() as attempt:
        roles.plan()
        first, _ = roles.explore()
        roles.decide(keep=lambda row: row["group_id"] != first)
        roles.work()
        buffer.sql("UPDATE rft.experience SET reward = 0.5 WHERE group_id = %s", [first])
        roles.decide()
        assert first in roles.train(attempt, 1)
        roles.plan()
        dropped = roles.explore()[0]
        roles.decide(keep=lambda row: row["group_id"] != dropped)
        assert roles.plan() == 0
        assert len(roles.train(attempt, 2)) == 2


def test_a_group_that_a_person_wrote_takes_the_place_of_a_planned_one(buffer: Buffer) -> None:
    roles = Roles(buffer)
    roles.insert(own_group())
    with roles.attempt():
        assert roles.plan() == 1


def test_tasksets_are_mixed_in_proportion_to_their_weights(buffer: Buffer) -> None:
    roles = Roles(buffer, weights=(2.0, 1.0, 1.0), batch_groups=3, steps=8, offset=8)
    with roles.attempt():
        roles.plan()
    names = [taskset for taskset, _ in roles.task_order()]
    for end in range(4, 25, 4):
        assert [names[:end].count(name) for name in ("set0", "set1", "set2")] == [end // 2, end // 4, end // 4]


def test_planners_at_the_same_moment_plan_once(buffer: Buffer) -> None:
    roles = Roles(buffer, batch_groups=30)
    with roles.attempt():
        processes = [rftdata.open(buffer.config) for _ in range(3)]
        planners = [Planner(process.find_run(roles.run_id), roles.plan_config) for process in processes]
        together = threading.Barrier(3)
        counts: list[int] = []

        def plan(planner: Planner) -> None:
            together.wait()
            counts.append(planner.plan())

        threads = [threading.Thread(target=plan, args=[planner]) for planner in planners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for planner, process in zip(planners, processes, strict=True):
            counts.append(planner.plan())
            process.close()
    assert sum(counts) == 30
    assert [key for _, key in roles.task_order()] == [str(n) for n in range(1, 31)]


def test_a_new_process_continues_where_the_selector_stopped(buffer: Buffer) -> None:
    roles = Roles(buffer, selector="shuffle", num_tasks=10, batch_groups=5, steps=4)
    with roles.attempt() as attempt:
        for step in range(1, 5):
            roles.planner = Planner(roles.run, roles.plan_config)
            roles.work()
            roles.train(attempt, step)
    keys = [key for _, key in roles.task_order()]
    assert sorted(keys[:10]) == sorted(keys[10:]) and len(set(keys[:10])) == 10


CRASHING = """
from pathlib import Path
from rftdata.selectors.shuffle import Shuffle

class Crashing(Shuffle):
    def __init__(self, task_ids, seed, flag):
        super().__init__(task_ids, seed)
        self.flag = Path(flag)

    def state_dict(self):
        if self.flag.exists():
            raise KeyboardInterrupt("killed between choosing tasks and committing the groups")
        return super().state_dict()
"""


def test_a_crash_between_choosing_and_committing_neither_skips_nor_repeats_a_task(
    buffer: Buffer, tmp_path: Path
) -> None:
    (tmp_path / "crashing.py").write_text(CRASHING)
    flag = tmp_path / "crash"
    roles = Roles(
        buffer,
        num_tasks=6,
        batch_groups=2,
        steps=3,
        selector="./crashing.py:Crashing",
        selector_args={"flag": str(flag)},
        base_dir=tmp_path,
    )
    with roles.attempt() as attempt:
        for step in range(1, 4):
            flag.touch()
            with pytest.raises(KeyboardInterrupt):
                roles.plan()
            assert roles.planned() == [(s, 2) for s in range(step - 1)]
            flag.unlink()
            roles.work()
            roles.train(attempt, step)
    assert sorted(key for _, key in roles.task_order()) == [str(n) for n in range(1, 7)]


def test_an_excluded_task_is_not_selected(buffer: Buffer) -> None:
    roles = Roles(buffer, num_tasks=5, batch_groups=8)
    buffer.sql("UPDATE rft.task SET status = 'excluded' WHERE task_key = '3'")
    with roles.attempt():
        roles.plan()
    assert [key for _, key in roles.task_order()] == ["1", "2", "4", "5"] * 2


@pytest.mark.parametrize("selector", ["sequential", "shuffle"])
def test_tasks_excluded_and_added_in_the_middle_of_an_epoch_make_none_repeat(buffer: Buffer, selector: str) -> None:
    roles = Roles(buffer, num_tasks=10, batch_groups=5, steps=4, selector=selector)
    with roles.attempt() as attempt:
        roles.work()
        seen = {key for _, key in roles.task_order()}
        assert len(seen) == 5
        left = sorted({str(n) for n in range(1, 11)} - seen)
        gone = [min(seen), left[0]]
        buffer.sql("UPDATE rft.task SET status = 'excluded' WHERE task_key = ANY (%s)", [gone])
        buffer.sql("INSERT INTO rft.task (taskset, task_key, payload) VALUES ('set0', 'new', '{}')")
        for step in range(1, 4):
            roles.train(attempt, step)
            roles.work()
    keys = [key for _, key in roles.task_order()]
    assert sorted(keys[5:9]) == left[1:]
    assert sorted(keys[9:18]) == sorted({"new", *map(str, range(1, 11))} - set(gone))


def test_task_ids_are_read_again_only_when_they_changed(buffer: Buffer) -> None:
    Roles(buffer)
    active = ActiveTasks()
    with buffer.database.transaction() as connection:
        first = active.task_ids(connection, "set0")
        assert active.task_ids(connection, "set0") is first
    for change in (
        "UPDATE rft.task SET status = 'excluded' WHERE task_key = '1'",
        "UPDATE rft.task SET status = (ARRAY['active', 'excluded'])[task_key::int]::rft.task_status WHERE task_key IN ('1', '2')",
        "INSERT INTO rft.task (taskset, task_key, payload) VALUES ('set0', 'new', '{}')",
        "DELETE FROM rft.task WHERE task_key = 'new'",
    ):
        buffer.sql(change)
        wanted = buffer.sql("SELECT task_id FROM rft.task WHERE status = 'active' ORDER BY 1")["task_id"].to_pylist()
        with buffer.database.transaction() as connection:
            assert active.task_ids(connection, "set0").tolist() == wanted


def test_a_change_of_tasks_that_commits_late_is_not_missed(buffer: Buffer) -> None:
    """Begun before another one, committed after it and after a look in between."""
    Roles(buffer)
    active = ActiveTasks()

    def ids() -> list[int]:
        with buffer.database.transaction() as connection:
            return active.task_ids(connection, "set0").tolist()

    insert = "INSERT INTO rft.task (taskset, task_key, payload) VALUES ('set0', %s, '{}')"
    with buffer.database.transaction() as late:
        late.execute(insert, ["late"])
        assert len(ids()) == 40
        buffer.sql(insert, ["early"])
        assert len(ids()) == 41
    assert len(ids()) == 42


def test_many_changes_of_tasks_are_counted_in_one_row(buffer: Buffer) -> None:
    Roles(buffer)
    active = ActiveTasks()
    for n in range(300):
        buffer.sql("UPDATE rft.task SET features = jsonb_build_object('n', %s::int) WHERE task_key = '1'", [n])
    with buffer.database.transaction() as connection:
        first = active.task_ids(connection, "set0")
        assert active.task_ids(connection, "set0") is first
    rows = buffer.sql("SELECT num_changes FROM rft.task_change WHERE taskset = 'set0'")
    assert rows["num_changes"].to_pylist() == [301]


def test_selectors_learn_every_outcome_once_by_task(buffer: Buffer, tmp_path: Path) -> None:
    (tmp_path / "learning.py").write_text(LEARNING)
    roles = Roles(buffer, num_tasks=2, steps=2, selector="./learning.py:Learning", base_dir=tmp_path)
    with roles.attempt() as attempt:
        roles.work(rewards=lambda group: [1.0, 0.0])
        buffer.sql("UPDATE rft.task SET status = 'excluded' WHERE task_key = '1'")
        roles.train(attempt, 1)
        roles.work()
        roles.train(attempt, 2)
    ids = buffer.sql("SELECT task_id FROM rft.task ORDER BY 1")["task_id"].to_pylist()
    (state,) = buffer.sql("SELECT state FROM rft.selector_state WHERE taskset = 'set0'")["state"].to_pylist()
    assert sorted(state["seen"]) == [[ids[0], 1.0, 2.0], [ids[1], 1.0, 2.0]]


LEARNING = """
from rftdata.selectors.sequential import Sequential

class Learning(Sequential):
    seen = ()

    def observe(self, observations):
        self.seen = [*self.seen, *([o.task_id, o.successes, o.trials] for o in observations)]

    def state_dict(self):
        return {**super().state_dict(), "seen": list(self.seen)}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.seen = state["seen"]
"""


def test_ordinals_grow_in_planning_order_without_gaps(buffer: Buffer) -> None:
    roles = Roles(buffer, steps=6, offset=6)
    with roles.attempt():
        roles.plan()
    ordinals = buffer.sql("SELECT ordinal FROM rft.rollout_group ORDER BY explore_step, ordinal")["ordinal"].to_pylist()
    assert ordinals[0] == 0 and all(b == a + 1 for a, b in pairwise(ordinals))


def test_a_taskset_without_tasks_is_a_clear_error(buffer: Buffer) -> None:
    roles = Roles(buffer)
    buffer.sql("UPDATE rft.task SET status = 'excluded'")
    with roles.attempt(), pytest.raises(TaskSourceError, match="'set0' has no active task"):
        roles.plan()


def test_an_unknown_selector_names_the_nearest_one(buffer: Buffer) -> None:
    roles = Roles(buffer, selector="shufle")
    with roles.attempt(), pytest.raises(PluginError, match="did you mean 'shuffle'"):
        roles.plan()


def test_outcomes_are_folded_once_and_the_fold_can_be_rebuilt(buffer: Buffer) -> None:
    roles = Roles(buffer, num_tasks=2, batch_groups=2, steps=2)
    with roles.attempt() as attempt:
        roles.work(rewards=lambda group: [1.0, 1.0])
        roles.train(attempt, 1)
        roles.work(rewards=lambda group: [0.0, 3.0])
    query = "SELECT task_id, alpha, beta, attempts, mean_reward FROM rft.task_stat ORDER BY task_id"
    folded = buffer.sql(query).to_pylist()
    assert [(row["alpha"], row["beta"], row["attempts"], row["mean_reward"]) for row in folded] == [
        (4.0, 2.0, 2, 0.75)
    ] * 2
    buffer.sql("SELECT rft.rebuild_task_stat(%s)", [roles.run_id])
    assert buffer.sql(query).to_pylist() == folded
    assert buffer.sql("SELECT count(*) AS n FROM rft.task_observation WHERE applied")["n"].to_pylist() == [2]
