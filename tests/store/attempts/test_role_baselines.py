"""Running baselines of roles: advanced once for each trained rollout, on whatever history, and stored with the step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rftcore.algorithms import build_algorithm
from rftcore.algorithms.algorithm import Algorithm
from rftcore.algorithms.base import Signals
from rftcore.trainer.batches.drawn import ARRAYS, train_batch
from rftcore.trainer.batches.role_baselines import RoleBaselines
from rftdata import Buffer, Group, Rollout, Run
from rftdata.attempts.attempt import Attempt
from rftdata.errors import RftError
from rftdata.experience import Sequence
from rftdata.pipeline.queue import claim_sealed_groups
from rftdata.pipeline.records import Verdicts, kept
from rftdata.pipeline.verdicts import commit_verdicts
from tests.support.store_roles import publish_versions

DECAY = 0.5
RAE = {"advantage": {"decay": DECAY}}


def game(task: int, index: int, won: float) -> Rollout:
    """x gets `won` in two rows, the second with the last turn, and o the opposite."""

    def side(role: str, turn: int, reward: float) -> Sequence:
        return Sequence(
            f"go {task}",
            role,
            [1, 2, 3],
            2,
            "stop",
            reward=reward,
            behavior_logprobs=[-1.0],
            turn_index=turn,
            role=role,
        )

    return Rollout(index, "ok", won, [side("x", 0, 9.0), side("o", 1, -won), side("x", 2, won)])


@pytest.fixture
def run(buffer: Buffer) -> Run:
    """Four groups of one taskset and one of another, of one or two games."""
    publish_versions(buffer, 1)
    run = buffer.create_run(name="games", config={}, seed=1, steps=9, pipeline_version="none")
    with buffer.writer(run) as writer:
        for task, won in enumerate([(1.0, -1.0), (1.0,), (0.0, 1.0), (1.0,)]):
            named: dict[str, Any] = {"taskset": "chess", "task_key": str(task), "source": "import"}
            writer.insert(Group([game(task, index, reward) for index, reward in enumerate(won)], **named))
    return run


def steps(buffer: Buffer, attempt: Attempt, first: int, last: int) -> Iterator[dict[str, list[float]]]:
    """Train steps of one group each with `rae`; yield the advantages of each role."""
    algorithm: Algorithm = build_algorithm("rae", RAE)
    baselines = RoleBaselines(attempt, algorithm)
    for step in range(first, last + 1):
        drawn = attempt.draw(step, 1, ARRAYS, timeout_s=5)
        assert drawn is not None and len(drawn)
        batch, advanced = baselines.advance(drawn, train_batch(drawn, algorithm))
        found = algorithm.plan(batch.for_algorithm(step), Signals()).advantages_N.tolist()
        attempt.record_step(
            step, drawn, wait_seconds=0, train_seconds=0, publish_seconds=0, metrics={}, baselines=advanced
        )
        roles = drawn.rows["role"].to_pylist()
        yield {role: [a for a, of in zip(found, roles, strict=True) if of == role] for role in ("x", "o")}


def decide(buffer: Buffer, run: Run) -> None:
    """Verdicts of a worker on the groups that a label has reopened."""
    process: dict[str, Any] = {"role": "pipeline", "host": "here", "pid": 1, "pid_space": "", "pid_started": 0}
    worker_id = buffer.database.fetch("insert_worker", run_id=run.run_id, **process)[0]["worker_id"]
    batch = claim_sealed_groups(run, worker_id, count=9, lease_s=60)
    assert batch is not None
    commit_verdicts(run, worker_id, "none", batch, Verdicts(kept(batch.table)))


def stored(buffer: Buffer, run: str) -> list[tuple[Any, ...]]:
    rows = buffer.sql(
        "SELECT trainer_step, role, baseline, num_rollouts FROM rft.v_role_baseline WHERE run = %s AND taskset = 'chess' ORDER BY 1, 2",
        [run],
    )
    return [tuple(row.values()) for row in rows.to_pylist()]


def test_each_trained_rollout_advances_its_role_once(buffer: Buffer, run: Run) -> None:
    with buffer.attempt(run) as attempt:
        first, second = steps(buffer, attempt, 1, 2)
    # x: 1 - 0, then b = 0.5 and -1 - 0.5; both rows of a game have its advantage. o is the opposite.
    assert first == {"x": [1.0, 1.0, -1.5, -1.5], "o": [-1.0, 1.5]}
    # b = 0.5 · 0.5 - 0.5 = -0.25.
    assert second == {"x": [1.25, 1.25], "o": [-1.25]}
    assert stored(buffer, "games") == [(1, "o", 0.25, 2), (1, "x", -0.25, 2), (2, "o", -0.375, 3), (2, "x", 0.375, 3)]
    with pytest.raises(RftError, match="holds facts"):
        buffer.sql("UPDATE rft.role_baseline SET baseline = 0")


def test_a_resumed_run_computes_what_it_would_have_computed(buffer: Buffer, run: Run) -> None:
    with buffer.attempt(run) as attempt:
        (_, second, third) = steps(buffer, attempt, 1, 3)
        attempt.commit_checkpoint(1, "folder")
    before = stored(buffer, "games")
    with buffer.attempt(run) as attempt:
        assert attempt.start_step == 1
        assert stored(buffer, "games") == before[:2]  # steps 2 and 3 are left
        assert list(steps(buffer, attempt, 2, 3)) == [second, third]
    assert stored(buffer, "games") == before
    fork = buffer.fork("games", name="fork", step=1)
    assert stored(buffer, "fork") == before[:2]
    with buffer.attempt(fork) as attempt:
        baselines = attempt.role_baselines()
    assert {role: found.baseline for (_, role), found in baselines.items()} == {"x": -0.25, "o": 0.25}


def test_a_corrected_reward_counts_where_it_is_trained_and_changes_no_baseline_afterwards(
    buffer: Buffer, run: Run
) -> None:
    (last,) = buffer.sql(
        "SELECT experience_id FROM rft.v_experience WHERE task_key = '3' AND role = 'x' ORDER BY turn_index DESC LIMIT 1"
    )["experience_id"].to_pylist()
    buffer.sql("UPDATE rft.experience SET reward = 3 WHERE experience_id = %s", [last])
    decide(buffer, run)
    with buffer.attempt(run) as attempt:
        *_, found = steps(buffer, attempt, 1, 4)
    before = stored(buffer, "games")
    earlier, later = (baseline for step, role, baseline, _ in before if role == "x" and step >= 3)
    assert found["x"] == [3.0 - earlier, 3.0 - earlier]
    assert later == DECAY * earlier + (1 - DECAY) * 3.0
    buffer.sql("UPDATE rft.experience SET reward = 7 WHERE role = 'x'")
    assert stored(buffer, "games") == before


def test_an_algorithm_that_reads_no_baselines_stores_none(buffer: Buffer, run: Run) -> None:
    algorithm = build_algorithm("grpo")
    with buffer.attempt(run) as attempt:
        drawn = attempt.draw(1, 1, ARRAYS, timeout_s=5)
        assert drawn is not None
        batch = train_batch(drawn, algorithm)
        assert RoleBaselines(attempt, algorithm).advance(drawn, batch) == (batch, [])
        with pytest.raises(RftError, match="one reward for all roles"):
            train_batch(drawn, build_algorithm("remax"))
