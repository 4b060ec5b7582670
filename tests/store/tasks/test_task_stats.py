"""Task statistics of a run follow its outcomes, whether a group, a relabelling or a person writes them."""

from __future__ import annotations

import json
from typing import Any, LiteralString

import psycopg
import pytest

from rftcore.cli import run_command
from rftdata import Buffer, Group, Rollout
from rftdata.errors import QueryError
from rftdata.tasks.stats import check_task_stats, rebuild_task_stats, task_stats
from tests.support.store_roles import Roles, tokens


@pytest.fixture
def roles(buffer: Buffer) -> Roles:
    """Two tasks, each tried once: rewards 0 and 1."""
    roles = Roles(buffer, num_tasks=2, steps=3)
    with roles.attempt():
        roles.work()
    return roles


def stat(roles: Roles, task_key: str = "1") -> dict[str, Any]:
    (row,) = roles.buffer.sql(
        "SELECT alpha, beta, attempts, mean_reward FROM rft.v_task_stat WHERE run_id = %s AND task_key = %s",
        [roles.run_id, task_key],
    ).to_pylist()
    return dict(row)


def observations(roles: Roles, kind: str) -> list[dict[str, Any]]:
    return list(
        roles.buffer.sql(
            "SELECT t.task_key, o.ordinal, o.successes, o.trials, o.author, o.reason FROM rft.task_observation o JOIN rft.task t USING (task_id)"
            " WHERE o.run_id = %s AND o.kind = %s::rft.observation_kind ORDER BY observation_id",
            [roles.run_id, kind],
        ).to_pylist()
    )


def relabel(roles: Roles, reward: float | None, where: str) -> None:
    with roles.database.transaction() as connection:
        connection.execute("SELECT set_config('rft.author', 'ada', true), set_config('rft.reason', 'wrong unit', true)")
        connection.execute(
            f"UPDATE rft.experience e SET reward = %s FROM rft.rollout_group g JOIN rft.task t USING (task_id) WHERE g.group_id = e.group_id AND {where}",  # type: ignore[arg-type]
            [reward],
        )


def test_a_relabel_corrects_the_outcome_of_its_group(roles: Roles) -> None:
    assert stat(roles) == {"alpha": 2, "beta": 2, "attempts": 1, "mean_reward": 0.5}
    relabel(roles, 1.0, "task_key = '1'")
    assert stat(roles) == {"alpha": 3, "beta": 1, "attempts": 1, "mean_reward": 1.0}
    assert stat(roles, "2") == {"alpha": 2, "beta": 2, "attempts": 1, "mean_reward": 0.5}
    relabel(roles, 7.0, "task_key = '1'")  # clipped: no other outcome
    relabel(roles, -1.0, "task_key = '2'")
    assert observations(roles, "correction") == [
        {"task_key": "1", "ordinal": 0, "successes": 1, "trials": 0, "author": "ada", "reason": "wrong unit"},
        {"task_key": "2", "ordinal": 1, "successes": -1, "trials": 0, "author": "ada", "reason": "wrong unit"},
    ]
    assert check_task_stats(roles.run) == []


def test_a_reward_that_comes_later_is_a_trial(buffer: Buffer) -> None:
    roles = Roles(buffer, num_tasks=1, batch_groups=1)
    with roles.attempt():
        roles.work(rewards=lambda group: [None, 1.0])
    assert stat(roles) == {"alpha": 2, "beta": 1, "attempts": 1, "mean_reward": 1.0}
    relabel(roles, 0.0, "reward IS NULL")
    assert stat(roles) == {"alpha": 2, "beta": 2, "attempts": 1, "mean_reward": 0.5}
    relabel(roles, None, "true")
    assert stat(roles) == {"alpha": 1, "beta": 1, "attempts": 1, "mean_reward": None}
    assert check_task_stats(roles.run) == []


def test_a_rollout_of_several_turns_is_one_trial(buffer: Buffer) -> None:
    roles = Roles(buffer, num_tasks=1, batch_groups=1)
    with roles.attempt():
        roles.plan()
        (claimed,) = roles.claim()
        rollouts = [Rollout(i, "ok", 0.0, [tokens(0.0, roles.version) for _ in range(4)]) for i in range(2)]
        roles.insert(Group(rollouts, claimed.group_id, claimed.claim_token))
    relabel(roles, 1.0, "e.turn_index = 3")
    assert stat(roles) == {"alpha": 1.5, "beta": 2.5, "attempts": 1, "mean_reward": 0.25}
    relabel(roles, 1.0, "true")
    assert stat(roles) == {"alpha": 3, "beta": 1, "attempts": 1, "mean_reward": 1.0}


def test_undoing_labels_undoes_what_tasks_seem(roles: Roles) -> None:
    from rftdata import labels

    batch = labels.set_rewards(roles.buffer, {1: 1.0, 2: 1.0}, author="ada")
    assert stat(roles)["alpha"] == 3
    labels.undo(roles.buffer, batch.label_batch_id, author="ada")
    assert stat(roles) == {"alpha": 2, "beta": 2, "attempts": 1, "mean_reward": 0.5}


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE rft.experience SET reward = 1",
        "INSERT INTO rft.task_observation (run_id, task_id, kind, successes, trials) SELECT run_id, task_id, 'manual', 1, 0 FROM rft.task_stat",
    ],
    ids=["relabel", "outcome"],
)
def test_what_a_person_has_not_committed_blocks_no_other_session(roles: Roles, statement: LiteralString) -> None:
    """The same task is tried again meanwhile."""
    with psycopg.connect(roles.buffer.config.uri) as client:
        client.execute(statement)
        with roles.attempt(), roles.database.connection() as connection:
            connection.execute("SET lock_timeout = '60s'")
            connection.execute(
                "INSERT INTO rft.task_observation (run_id, attempt_id, ordinal, task_id, successes, trials)"
                " SELECT run_id, attempt_id, ordinal + 100, task_id, 0, 2 FROM rft.task_observation"
            )
            connection.execute("SET lock_timeout = 0")
        assert stat(roles) == {"alpha": 2, "beta": 4, "attempts": 2, "mean_reward": 0.25}
        client.commit()
    assert stat(roles) == {"alpha": 3, "beta": 3, "attempts": 2, "mean_reward": 0.5}


def test_what_a_person_sets_is_an_outcome_of_their_own(roles: Roles) -> None:
    with roles.database.transaction() as connection:
        connection.execute("SELECT set_config('rft.author', 'ada', true), set_config('rft.reason', 'unsolvable', true)")
        connection.execute(
            "UPDATE rft.task_stat s SET alpha = 1, beta = 20 FROM rft.task t WHERE t.task_id = s.task_id AND task_key = '2'"
        )
    assert stat(roles, "2") == {"alpha": 1, "beta": 20, "attempts": 1, "mean_reward": 0.0}
    assert observations(roles, "manual") == [
        {"task_key": "2", "ordinal": None, "successes": -1, "trials": 17, "author": "ada", "reason": "unsolvable"}
    ]
    assert check_task_stats(roles.run) == []
    rebuild_task_stats(roles.run)
    assert stat(roles, "2")["beta"] == 20 and stat(roles) == {"alpha": 2, "beta": 2, "attempts": 1, "mean_reward": 0.5}


def test_a_person_may_add_an_outcome(roles: Roles) -> None:
    roles.buffer.sql(
        "INSERT INTO rft.task_observation (run_id, task_id, kind, successes, trials) SELECT %s, task_id, 'manual', 0, 8 FROM rft.task"
        " WHERE task_key = '1'",
        [roles.run_id],
    )
    assert stat(roles) == {"alpha": 2, "beta": 10, "attempts": 1, "mean_reward": 0.1}


@pytest.mark.parametrize(
    ("statement", "hint"),
    [
        ("UPDATE rft.task_observation SET successes = 5", "INSERT an observation of kind manual"),
        ("DELETE FROM rft.task_observation", "INSERT an observation of kind manual"),
        ("UPDATE rft.task_stat SET mean_reward = 1", "SET alpha = …, beta = … alone"),
        ("UPDATE rft.task_stat SET attempts = 0", "SET alpha = …, beta = … alone"),
        ("UPDATE rft.task_stat SET beta = 0", "SET alpha = …, beta = … alone"),
        ("UPDATE rft.task SET taskset = 'other'", "Exclude it"),
    ],
)
def test_what_would_break_the_fold_is_refused(roles: Roles, statement: str, hint: str) -> None:
    with pytest.raises(QueryError, match=hint):
        roles.buffer.sql(statement)
    assert check_task_stats(roles.run) == []


def broken(roles: Roles) -> None:
    """As after a restored table or a defect: the statistics differ from the outcomes."""
    with roles.database.transaction() as connection:
        connection.execute("SELECT set_config('rft.folding', 'rebuild', true)")
        connection.execute(
            "UPDATE rft.task_stat s SET alpha = 9 FROM rft.task t WHERE t.task_id = s.task_id AND task_key = '2'"
        )


def test_the_fold_is_compared_and_rebuilt(roles: Roles) -> None:
    relabel(roles, 1.0, "task_key = '1'")
    broken(roles)
    (row,) = check_task_stats(roles.run)
    assert (row["task_key"], row["alpha"], row["alpha_of_fold"]) == ("2", 9, 2)
    assert rebuild_task_stats(roles.run) == 2
    assert check_task_stats(roles.run) == []
    assert {row["task_key"] for row in task_stats(roles.run)} == {"1", "2"}
    assert observations(roles, "manual") == []


def test_a_relabel_and_a_rebuild_in_one_transaction_count_once(roles: Roles) -> None:
    with roles.database.transaction() as connection:
        connection.execute("UPDATE rft.experience SET reward = 1")
        connection.execute("SELECT rft.rebuild_task_stat(%s)", [roles.run_id])
    assert stat(roles)["alpha"] == 3
    assert check_task_stats(roles.run) == []


def test_the_command_shows_compares_and_rebuilds(
    roles: Roles, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RFT_BUFFER", roles.buffer.config.uri)
    monkeypatch.setenv("RFT_SEGMENTS", str(roles.buffer.config.segments))

    def rft(*args: str) -> tuple[int, str]:
        return run_command(["tasks", "stats", *args]), capsys.readouterr().out

    code, text = rft("roles", "--json")
    assert code == 0, text
    assert {row["task_key"] for row in json.loads(text)} == {"1", "2"}
    assert rft("--run", "roles", "--json") == (code, text)
    assert rft("--run", "other")[0] == 2 and rft("roles", "--run", "roles")[0] == 2
    assert rft("--check")[0] == 0
    broken(roles)
    code, text = rft("--check", "--json")
    assert code == 1 and [row["alpha"] for row in json.loads(text)] == [9]
    assert rft("--rebuild") == (0, "2 tasks folded again\n")
    assert rft("--check")[0] == 0
