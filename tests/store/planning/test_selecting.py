"""Selectors in the store: their memory survives restarts, explorers share it, people correct it; mixing, sizes and repeats."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rftdata import Buffer, Rollout
from rftdata.config import MixingConfig, SelectorConfig
from rftdata.errors import ConfigError, TaskSourceError
from rftdata.planning.claims import ClaimedGroup
from rftdata.planning.planner import Planner
from rftdata.selectors.difficulty import Difficulty
from tests.support.store_roles import Roles

LEARNING = [
    ("difficulty", {}),
    ("difficulty", {"features": ["weak", "strong"], "temperature": 0.1}),
    ("plr", {"replay": 0.5}),
    ("greso", {}),
]
SELECTORS = pytest.mark.parametrize(
    ("selector", "args"), LEARNING, ids=["difficulty", "with references", "plr", "greso"]
)


def rewards(group: ClaimedGroup) -> list[float]:
    """Some tasks are solved always, some never, some at times."""
    return [float(index < (group.task_id * 7 + group.explore_step) % 5) for index in range(group.group_size)]


def learning_run(buffer: Buffer, selector: str, args: dict[str, Any], **options: Any) -> Roles:
    roles = Roles(
        buffer,
        selector=selector,
        selector_args=args,
        group_size=4,
        batch_groups=4,
        **{"num_tasks": 24, "steps": 12, **options},
    )
    buffer.sql(
        "UPDATE rft.task SET features = jsonb_build_object('weak', task_key::int % 3 / 10.0, 'strong', 0.5 + task_key::int % 4 / 10.0)"
    )
    return roles


def set_tasksets(roles: Roles, *changes: dict[str, Any], **config: Any) -> None:
    tasksets = tuple(t.model_copy(update=c) for t, c in zip(roles.plan_config.tasksets, changes, strict=True))
    roles.plan_config = replace(roles.plan_config, tasksets=tasksets, **config)
    roles.planner = Planner(roles.run, roles.plan_config)


def steps(roles: Roles, first: int, last: int, *, new_process: bool = False, planners: int = 1) -> None:
    pool = [Planner(roles.run, roles.plan_config) for _ in range(planners)] if planners > 1 else []
    with roles.attempt() as attempt:
        for step in range(first, last + 1):
            if new_process:
                roles.planner = Planner(roles.run, roles.plan_config)
            if pool:
                roles.planner = pool[step % planners]
            roles.work(rewards=rewards)
            roles.train(attempt, step)
        attempt.commit_checkpoint(last, f"/checkpoints/{last}")


@SELECTORS
@pytest.mark.parametrize("how", [{"new_process": True}, {"planners": 3}], ids=["restarted", "three explorers"])
def test_another_process_chooses_what_this_one_would_have(
    buffer: Buffer, selector: str, args: dict[str, Any], how: dict[str, Any]
) -> None:
    roles = learning_run(buffer, selector, args)
    steps(roles, 1, 8)
    wanted = [key for _, key in roles.task_order()]
    assert len(wanted) == 32 and len(set(wanted)) > 8
    other = learning_run(buffer, selector, args)
    steps(other, 1, 8, **how)
    assert [key for _, key in other.task_order()] == wanted


@SELECTORS
def test_a_rewound_run_plans_the_same_tasks_again(buffer: Buffer, selector: str, args: dict[str, Any]) -> None:
    """The explorers live on: what they held of the steps left is of no use to them."""
    roles = learning_run(buffer, selector, args)
    steps(roles, 1, 4)
    steps(roles, 5, 8)
    wanted = [key for _, key in roles.task_order()][16:]
    roles.buffer.rewind(roles.run, 4)
    steps(roles, 5, 8)
    assert [key for _, key in roles.task_order()][32:] == wanted
    assert roles.buffer.sql("SELECT * FROM rft.check_task_stat(%s)", [roles.run_id]).num_rows == 0


def posterior(roles: Roles, task_key: str = "1") -> tuple[float, float]:
    """Of a task, as the difficulty selector of the roles' planner believes."""
    held = roles.planner._selectors
    assert held is not None
    selector = held._held["set0"].selector
    assert isinstance(selector, Difficulty)
    (task_id,) = roles.buffer.sql("SELECT task_id FROM rft.task WHERE taskset = 'set0' AND task_key = %s", [task_key])[
        "task_id"
    ].to_pylist()
    (alpha,), (beta,) = selector.posteriors([task_id])
    return float(alpha), float(beta)


def test_an_outcome_counts_in_the_very_next_plan(buffer: Buffer) -> None:
    """Also where that is a refill in the middle of the step; no step lies between feedback and choice."""
    roles = learning_run(buffer, "difficulty", {"forgetting": 0.0}, num_tasks=1, max_refill=4)
    with roles.attempt():
        assert roles.plan() == 4
        roles.explore(lambda group: [1.0, 1.0, 1.0, 0.0], count=1)
        assert posterior(roles) == (1, 1)
        roles.decide(keep=lambda row: False)
        assert roles.plan() == 1
        assert posterior(roles) == (4, 2)


def test_relabels_and_people_change_the_posterior_of_every_explorer(buffer: Buffer) -> None:
    roles = learning_run(buffer, "difficulty", {"forgetting": 0.5, "thompson": False}, num_tasks=1)
    other = Planner(roles.run, roles.plan_config)
    with roles.attempt() as attempt:
        roles.work(rewards=lambda group: [0.0] * 4)
        roles.train(attempt, 1)
        roles.plan()
        assert posterior(roles) == (1, 1 + 16)  # forgets before it adds
        roles.explore(lambda group: [0.0] * 4)
        roles.decide()
        buffer.sql(
            "UPDATE rft.experience SET reward = 1 WHERE group_id = (SELECT min(group_id) FROM rft.rollout_group)"
        )
        roles.decide()
        roles.train(attempt, 2)
        roles.plan()
        # Half of the first outcome is forgotten by now, and so is half of its correction.
        assert posterior(roles) == (1 + 2, 0.5 * 17 + 0.5 + 16 - 2)
        buffer.sql("UPDATE rft.task_stat SET beta = beta + 10")
        roles.explore(lambda group: [0.0] * 4)
        roles.decide()
        roles.train(attempt, 3)
        roles.planner = other
        roles.plan()
        assert posterior(roles) == (0.5 * 3 + 0.5, 0.5 * 23 + 0.5 + 16 + 10)


def test_an_outcome_that_commits_late_is_learned_late_by_everyone(buffer: Buffer) -> None:
    """Its id is lower than those of outcomes learned before it; a process that starts afterwards learns in the same order."""
    roles = learning_run(buffer, "difficulty", {"forgetting": 0.5}, num_tasks=1)
    with roles.attempt() as attempt:
        with roles.database.transaction() as late:
            late.execute(
                "INSERT INTO rft.task_observation (run_id, task_id, kind, successes, trials) SELECT %s, min(task_id), 'manual', 0, 64"
                " FROM rft.task",
                [roles.run_id],
            )
            roles.work(rewards=lambda group: [1.0] * 4)
            roles.train(attempt, 1)
            roles.plan()
            assert posterior(roles) == (17, 1)
        roles.work(rewards=lambda group: [1.0] * 4)
        roles.train(attempt, 2)
        roles.plan()
        assert posterior(roles) == (25, 65)
        roles.work(rewards=lambda group: [1.0] * 4)
        roles.train(attempt, 3)
        roles.planner = Planner(roles.run, roles.plan_config)
        roles.plan()
        assert posterior(roles) == (29, 33)


def test_a_plan_that_fails_leaves_no_trace_in_the_process(buffer: Buffer, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    flag = tmp_path / "fail"
    args = {"flag": str(flag)}
    roles = learning_run(buffer, "./failing.py:Failing", args, base_dir=tmp_path)
    steps(roles, 1, 6)
    wanted = [key for _, key in roles.task_order()]
    other = learning_run(buffer, "./failing.py:Failing", args, base_dir=tmp_path)
    with other.attempt() as attempt:
        for step in range(1, 7):
            flag.touch()
            with pytest.raises(KeyboardInterrupt):
                other.plan()
            flag.unlink()
            other.work(rewards=rewards)
            other.train(attempt, step)
    assert [key for _, key in other.task_order()] == wanted


FAILING = """
from pathlib import Path
from rftdata.selectors.difficulty import Difficulty

class Failing(Difficulty):
    def __init__(self, task_ids, seed, flag):
        super().__init__(task_ids, seed)
        self.flag = Path(flag)

    def metrics(self):
        if self.flag.exists():
            raise KeyboardInterrupt("after choosing and learning, before the commit")
        return super().metrics()
"""


def test_selectors_learn_again_when_tasks_change(buffer: Buffer) -> None:
    roles = learning_run(buffer, "difficulty", {}, num_tasks=6)
    steps(roles, 1, 3)
    before = posterior(roles, "1")
    assert before != (1, 1)
    buffer.sql("UPDATE rft.task SET status = 'excluded' WHERE task_key IN ('5', '6')")
    seen = len(roles.task_order())
    steps(roles, 4, 6)
    assert {key for _, key in roles.task_order()[seen:]} <= {"1", "2", "3", "4"}
    assert sum(posterior(roles, "1")) > 2


def test_the_state_saved_is_small_whatever_was_learned(buffer: Buffer) -> None:
    roles = learning_run(buffer, "difficulty", {}, num_tasks=500, offset=0)
    steps(roles, 1, 8)
    sizes = buffer.sql("SELECT taskset, length(state::text) AS n FROM rft.selector_state").to_pylist()
    assert {row["taskset"] for row in sizes} == {"*", "set0"} and max(row["n"] for row in sizes) < 100


def test_metrics_of_selectors_are_stored(buffer: Buffer) -> None:
    roles = learning_run(buffer, "difficulty", {})
    steps(roles, 1, 2)
    (row,) = roles.database.fetch("selector_metrics", run_id=roles.run_id)
    assert row["taskset"] == "set0" and row["metrics"]["tried"] > 0 and 0 < row["metrics"]["chosen_pass_rate"] < 1


def test_a_missing_feature_names_the_task(buffer: Buffer) -> None:
    roles = learning_run(buffer, "easy_to_hard", {"features": ["weak"]})
    buffer.sql("UPDATE rft.task SET features = '{\"weak\": \"much\"}' WHERE task_key = '7'")
    with (
        roles.attempt(),
        pytest.raises(TaskSourceError, match=r"'set0' needs the feature 'weak', which is not a number for 1.*task '7'"),
    ):
        roles.plan()


def test_every_taskset_may_have_a_selector_and_a_group_size_of_its_own(buffer: Buffer) -> None:
    roles = learning_run(buffer, "sequential", {}, weights=(1.0, 1.0))
    easy = SelectorConfig.model_validate({"type": "easy_to_hard", "features": "weak"})
    set_tasksets(roles, {"group_size": 2}, {"selector": easy})
    steps(roles, 1, 2)
    rows = buffer.sql(
        "SELECT taskset, task_key, group_size, (SELECT count(*) FROM rft.rollout o WHERE o.group_id = g.group_id) AS rollouts"
        " FROM rft.rollout_group g JOIN rft.task USING (task_id) ORDER BY ordinal"
    ).to_pylist()
    assert [(row["task_key"], row["group_size"], row["rollouts"]) for row in rows if row["taskset"] == "set0"] == [
        (str(n), 2, 2) for n in range(1, 5)
    ]
    assert [(row["task_key"], row["group_size"], row["rollouts"]) for row in rows if row["taskset"] == "set1"] == [
        (str(n), 4, 4) for n in (2, 5, 8, 11)
    ]
    kinds = buffer.sql("SELECT taskset, selector FROM rft.selector_state ORDER BY 1").to_pylist()
    assert [row["selector"] for row in kinds] == ["credit", "sequential", "easy_to_hard"]


def test_groups_of_different_sizes_are_drawn_whole(buffer: Buffer) -> None:
    roles = learning_run(buffer, "sequential", {}, weights=(1.0, 1.0))
    set_tasksets(roles, {"group_size": 2}, {"group_size": 5})
    with roles.attempt() as attempt:
        roles.work(rewards=rewards)
        batch = attempt.draw(1, 4, timeout_s=5)
        assert batch is not None
        assert sorted(Counter(batch.rows["group_id"].to_pylist()).values()) == [2, 2, 5, 5]


def test_weights_follow_their_schedule_over_explorer_steps(buffer: Buffer) -> None:
    roles = learning_run(buffer, "sequential", {}, weights=(1.0, 1.0), steps=8, offset=8)
    set_tasksets(roles, {"weight": ((0, 1.0), (4, 0.0))}, {"weight": ((0, 0.0), (4, 1.0))})
    with roles.attempt():
        roles.plan()
    names = [taskset for taskset, _ in roles.task_order()]
    assert [names[4 * step : 4 * step + 4].count("set1") for step in range(8)] == [0, 1, 2, 3, 4, 4, 4, 4]


def test_sizes_of_tasksets_count_with_a_temperature(buffer: Buffer) -> None:
    roles = learning_run(buffer, "sequential", {}, weights=(1.0, 1.0), steps=10, offset=10)
    buffer.sql("UPDATE rft.task SET status = 'excluded' WHERE taskset = 'set1' AND task_key::int > 6")
    set_tasksets(roles, {}, {}, mixing=MixingConfig(temperature=2.0))
    with roles.attempt():
        roles.plan()
    names = Counter(taskset for taskset, _ in roles.task_order())
    assert names["set0"] == pytest.approx(40 * 2 / 3, abs=1)  # sqrt(24) : sqrt(6)


@pytest.mark.parametrize(
    "selector", ["sequential", "shuffle", "random", "difficulty", "plr", "greso", "./stubborn.py:Stubborn"]
)
def test_no_task_is_tried_more_often_than_it_may(buffer: Buffer, tmp_path: Path, selector: str) -> None:
    """Also where several processes plan; the other taskset takes the places that are left."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    roles = learning_run(buffer, selector, {}, weights=(1.0, 1.0), num_tasks=5, base_dir=tmp_path)
    set_tasksets(roles, {"max_repeats": 2}, {})
    steps(roles, 1, 9, planners=2)
    counts = Counter(roles.task_order())
    limited = {key: n for (taskset, key), n in counts.items() if taskset == "set0"}
    assert limited == {str(n): 2 for n in range(1, 6)}
    assert sum(counts.values()) == 36


STUBBORN = """
from rftdata.selectors.random import Random

class Stubborn(Random):
    def retire(self, task_ids):
        return False
"""


def test_a_run_whose_tasks_are_used_up_ends_with_a_clear_error(buffer: Buffer) -> None:
    roles = learning_run(buffer, "shuffle", {}, num_tasks=6)
    set_tasksets(roles, {"max_repeats": 1})
    with roles.attempt() as attempt:
        roles.work(rewards=rewards)
        roles.train(attempt, 1)
        assert roles.plan() == 2
        with pytest.raises(TaskSourceError, match=r"has reached max_repeats.*raise max_repeats"):
            roles.plan()
    assert len(set(roles.task_order())) == len(roles.task_order()) == 6


def test_tasks_that_are_used_up_early_do_not_end_steps_that_have_their_groups(buffer: Buffer) -> None:
    roles = learning_run(buffer, "shuffle", {}, num_tasks=6)
    set_tasksets(roles, {"max_repeats": 1}, pacing=replace(roles.plan_config.pacing, interval=2))
    with roles.attempt() as attempt:
        assert roles.plan() == 6  # of two steps of four
        assert roles.plan() == 0
        roles.insert(*[roles.result(group, rewards(group)) for group in roles.claim(6)])
        roles.decide()
        roles.train(attempt, 1)
        with pytest.raises(TaskSourceError, match="has reached max_repeats"):
            roles.plan()


def test_a_group_that_was_screened_out_is_dropped_whole_and_its_place_refilled(buffer: Buffer) -> None:
    roles = learning_run(buffer, "speed", {"screen_rollouts": 2}, max_refill=4)
    why = "screened out: 0 of 2 first rollouts succeeded, a pass rate not above 0"
    with roles.attempt():
        roles.plan()
        first, *others = roles.claim()
        group = roles.result(first, [0.0, 0.0])
        group.rollouts += [Rollout(index, "cancelled", error=why) for index in (2, 3)]
        roles.insert(group, *[roles.result(g, rewards(g)) for g in others])
        roles.decide()
        closed = roles.group(first.group_id)
        assert (closed["trainable"], closed["closed_reason"]) == (False, f"dropped by screening: {why}")
        verdicts = buffer.sql(
            "SELECT kept, stage, reason FROM rft.verdict WHERE group_id = %s", [first.group_id]
        ).to_pylist()
        assert verdicts == [{"kept": False, "stage": "screening", "reason": why}] * 2
        assert all(roles.group(g.group_id)["trainable"] for g in others)
        assert roles.plan() == 1
        (seen,) = buffer.sql(
            "SELECT successes, trials FROM rft.task_observation WHERE run_id = %s AND ordinal = %s",
            [roles.run_id, first.ordinal],
        ).to_pylist()
        assert (seen["successes"], seen["trials"]) == (0, 2)
        # A relabel does not make up for the rollouts that it was spared.
        buffer.sql(
            "UPDATE rft.experience SET reward = 1 WHERE group_id = %s AND experience_id %% 2 = 0", [first.group_id]
        )
        roles.decide()
        assert roles.group(first.group_id)["closed_reason"] == f"dropped by screening: {why}"


def test_weights_of_which_none_is_above_0_are_refused(buffer: Buffer) -> None:
    roles = learning_run(buffer, "shuffle", {})
    with pytest.raises(ConfigError, match="at explorer step 3"):
        set_tasksets(roles, {"weight": ((0, 1.0), (3, 0.0))})


def test_a_fork_continues_with_what_its_parent_learned(buffer: Buffer) -> None:
    roles = learning_run(buffer, "difficulty", {})
    steps(roles, 1, 4)
    steps(roles, 5, 6)
    wanted = [key for _, key in roles.task_order()][16:24]
    fork = learning_run(buffer, "difficulty", {})
    fork.run = buffer.fork(roles.run, name="fork", step=4)
    fork.run_id = fork.run.run_id
    fork.planner = Planner(fork.run, fork.plan_config)
    steps(fork, 5, 6)
    assert [key for _, key in fork.task_order()] == wanted
    assert buffer.sql("SELECT * FROM rft.check_task_stat(%s)", [fork.run_id]).num_rows == 0
