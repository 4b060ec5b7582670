"""Whole groups of a stored selection: what is drawn of them, by which weights, and what an algorithm refuses before a run is stored."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rftcore.config.run import parse_config
from rftcore.launch.preparation import prepare_run
from rftcore.resolved import ResolvedRun
from rftdata import Buffer, Group, Rollout
from rftdata.attempts import stored_selection
from rftdata.errors import ConfigError, QueryError
from rftdata.run import Run
from tests.support.store_roles import own_group, tokens

pytestmark = pytest.mark.usefixtures("beside_a_model")

GROUPS = "select group_id from rft.v_group where run = 'source'"
# Group n has the priority n.
WEIGHTED = "select group_id as priority, group_id from rft.v_group where run = 'source'"


@pytest.fixture
def stored(buffer: Buffer) -> Buffer:
    """Six groups of two rollouts, the second of two turns each."""
    run = buffer.create_run(name="source", config={}, seed=1, steps=1, pipeline_version="none", mode="train")
    with buffer.writer(run) as writer:
        for number in range(6):
            rollouts = [
                Rollout(index, "ok", float(index), [tokens(float(index)) for _ in range(index + 1)]) for index in (0, 1)
            ]
            writer.insert(Group(rollouts, source="import", taskset="mine", task_key=str(number), payload={}))
    return buffer


def selecting(buffer: Buffer, sql: str = GROUPS, *, exponent: float | None = None, epochs: int = 1) -> Run:
    selected = stored_selection.select(buffer.database, sql, priority_exponent=exponent, epochs=epochs)
    return buffer.create_run(
        name="selecting",
        config={},
        seed=1,
        steps=100,
        pipeline_version="none",
        mode="train",
        selected=selected,
    )


def drawn(attempt: Any, step: int, count: int) -> list[dict[str, Any]]:
    batch = attempt.draw(step, count, timeout_s=5)
    assert batch is not None
    rows: list[dict[str, Any]] = batch.rows.to_pylist()
    return rows


def configured(sql: str, algorithm: str = "grpo", **sampling: Any) -> ResolvedRun:
    raw = {
        "run": {"name": "again"},
        "model": {"path": "./model"},
        "algorithm": {"name": algorithm},
        "trainer": {"batch_groups": 4},
        "sampling": {"source": {"sql": sql}, **sampling},
    }
    return ResolvedRun(parse_config(raw, Path(), "test"))


def test_groups_are_drawn_whole_in_the_order_of_rollouts_and_turns(stored: Buffer) -> None:
    with stored.attempt(selecting(stored)) as attempt:
        steps = [drawn(attempt, step, 4) for step in (1, 2, 3)]
    assert [len(rows) for rows in steps] == [4 * 3, 2 * 3, 0]
    for rows in steps:
        for first in range(0, len(rows), 3):
            group = rows[first : first + 3]
            assert len({row["group_id"] for row in group}) == 1
            assert [(row["rollout_index"], row["turn_index"], row["reward"]) for row in group] == [
                (0, 0, 0.0),
                (1, 0, 1.0),
                (1, 1, 1.0),
            ]
    assert {row["group_id"] for rows in steps for row in rows} == set(range(1, 7))


def test_groups_written_into_the_run_later_are_not_part_of_its_selection(stored: Buffer) -> None:
    run = selecting(stored)
    with stored.writer(run) as writer:
        writer.insert(own_group(task_key="late"))
    with stored.attempt(run) as attempt:
        assert {row["group_id"] for row in drawn(attempt, 1, 10)} == set(range(1, 7))


class TestWeights:
    def test_groups_are_drawn_in_proportion_to_their_weights_and_weighed_against_it(self, stored: Buffer) -> None:
        with stored.attempt(selecting(stored, WEIGHTED, exponent=1.0, epochs=200)) as attempt:
            steps = [drawn(attempt, step, 1) for step in range(1, 421)]
        times = Counter(rows[0]["group_id"] for rows in steps)
        # 420 draws, shares n / 21, exact but for the ends.
        assert all(abs(times[n] - 20 * n) <= 2 for n in range(1, 7)), times
        with stored.attempt(selecting(stored, WEIGHTED, exponent=1.0)) as attempt:
            rows = drawn(attempt, 1, 6)
        assert {row["group_id"]: row["importance_weight"] for row in rows} == pytest.approx(
            {n: (1 / n) ** 0.4 for n in range(1, 7)}
        )

    def test_a_rewound_history_draws_the_same_again_and_ends_after_as_many_draws(self, stored: Buffer) -> None:
        with stored.attempt(selecting(stored, WEIGHTED, exponent=0.6, epochs=3)) as straight:
            expected = [drawn(straight, step, 4) for step in range(1, 6)]
        assert [len(rows) for rows in expected] == [12, 12, 12, 12, 6]
        run = selecting(stored, WEIGHTED, exponent=0.6, epochs=3)
        with stored.attempt(run) as first:
            for step in (1, 2, 3):
                assert drawn(first, step, 4) == expected[step - 1]
                if step == 2:
                    first.commit_checkpoint(2, "/nowhere")
        with stored.attempt(run) as second:
            batch = second.draw(3, 4, timeout_s=5)
            assert batch is not None
            second.release(batch)
            assert [drawn(second, step, 4) for step in (3, 4, 5, 6)] == [*expected[2:], []]

    def test_weights_are_part_of_the_hash(self, stored: Buffer) -> None:
        hashes = {
            stored_selection.select(stored.database, sql, priority_exponent=1.0).content_hash
            for sql in (WEIGHTED, f"select group_id, 1 as priority from ({GROUPS}) g")
        }
        assert len(hashes) == 2

    @pytest.mark.parametrize("value", ["null::float8", "-1", "'NaN'::float8", "'high'"])
    def test_a_priority_that_is_not_a_number_is_refused(self, stored: Buffer, value: str) -> None:
        with pytest.raises(QueryError, match=r"priority of 1 .*finite numbers of at least 0; replace NULL"):
            stored_selection.select(
                stored.database, f"select group_id, {value} as priority from ({GROUPS}) g", priority_exponent=1.0
            )

    def test_a_prioritised_order_needs_priorities(self, stored: Buffer) -> None:
        with pytest.raises(QueryError, match="select a number as priority"):
            prepare_run(configured(GROUPS, order="prioritized"), stored)


class TestWhatAlgorithmsRefuse:
    def test_parts_of_groups_where_rollouts_are_compared(self, stored: Buffer) -> None:
        some = "select experience_id from rft.experience"
        for algorithm in ("grpo", "rloo", "opmd"):
            with pytest.raises(
                ConfigError, match=rf"{algorithm} compares the rollouts of whole groups.*select distinct group_id"
            ):
                prepare_run(configured(some, algorithm), stored)
        assert prepare_run(configured(GROUPS), stored).source_kind == "group"
        assert prepare_run(configured(some, "reinforce"), stored).source_kind == "experience"
        assert prepare_run(configured(GROUPS, "reinforce"), stored).source_rows == 6

    def test_rows_without_what_they_learn_from(self, stored: Buffer) -> None:
        imported = Group(
            [Rollout(i, "ok", 1.0, [tokens(1.0, behavior_logprobs=None)]) for i in (0, 1)],
            source="import",
            taskset="mine",
            task_key="chat",
            payload={},
        )
        with stored.writer("source") as writer:
            writer.insert(imported)
        with pytest.raises(
            ConfigError, match=r"2 of the experiences .* no log-probabilities.*first is experience 19.*with sft"
        ):
            prepare_run(configured(GROUPS), stored)
        assert prepare_run(configured(GROUPS, "mix"), stored).source_rows == 7
        with stored.writer("source") as writer:
            writer.insert(own_group([1.0], task_key="alone"))
        with pytest.raises(
            ConfigError, match=r"1 of the 8 groups .* too few rollouts for grpo; the first is group 8 \(got 1"
        ):
            prepare_run(configured(GROUPS), stored)
        stored.sql("UPDATE rft.experience SET reward = NULL WHERE experience_id = 4")
        with pytest.raises(ConfigError, match=r"1 of the experiences .* no reward.*first is experience 4"):
            prepare_run(configured(f"{GROUPS} and group_id < 7"), stored)
        assert [run["name"] for run in stored.sql("SELECT name FROM rft.run WHERE name = 'again'").to_pylist()] == [
            "again"
        ]


def test_a_resumed_run_keeps_its_order_and_exponent(stored: Buffer) -> None:
    sampling = {"order": "prioritized", "priority": {"exponent": 0.5}}
    row = prepare_run(configured(WEIGHTED, **sampling), stored)
    assert prepare_run(configured(WEIGHTED, **sampling), stored, resumed=row).source_hash == row.source_hash
    for key, changed in {"order": {}, r"priority\.exponent": {"order": "prioritized"}}.items():
        with pytest.raises(ConfigError, match=rf"sampling\.{key} has changed"):
            prepare_run(configured(WEIGHTED, **changed), stored, resumed=row)
