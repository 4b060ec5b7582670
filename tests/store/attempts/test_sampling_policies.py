"""Formulas for priorities, ratios of draws to inserts, and another policy after a resume."""

from __future__ import annotations

from typing import Any

import pytest

from rftdata import Buffer
from rftdata.attempts.sampling import SamplingConfig, checked_formula
from rftdata.errors import ConfigError
from tests.store.attempts.test_sampling import add, draw, groups_of, stored
from tests.support.store_roles import Roles


def test_samples_per_insert_paces_explorers_and_draws(buffer: Buffer) -> None:
    roles = Roles(
        buffer,
        batch_groups=4,
        steps=6,
        sampling={"order": "uniform", "max_times_sampled": 0, "samples_per_insert": {"ratio": 2}, "max_staleness": 100},
    )
    with roles.attempt() as attempt:
        assert attempt.draw(1, 4, timeout_s=0) is None
        roles.work()
        first = draw(attempt, 1, 4)
        assert (first.num_groups, first.short_reason) == (
            2,
            "2 of 4 groups survived: 2 planned and 0 refilled, explorer.max_refill is used up",
        )
        roles.publish(attempt, 1)
        assert attempt.draw(2, 4, timeout_s=0) is None  # the explorers' turn
        for step in range(2, 6):
            roles.work()
            batch = draw(attempt, step, 4)
            assert batch.num_groups == 4 and batch.short_reason is None
            roles.publish(attempt, step)
        assert roles.planned() == [(step, 2) for step in range(5)]


def test_a_draw_beyond_the_ratio_waits_until_more_has_come(buffer: Buffer) -> None:
    limit = {"ratio": 1.5, "min_size_to_sample": 4, "error_buffer": 2}
    roles = Roles(
        buffer,
        batch_groups=2,
        max_refill=0,
        steps=9,
        offset=5,
        sampling={"max_times_sampled": 0, "samples_per_insert": limit, "max_staleness": 100},
    )
    with roles.attempt() as attempt:
        roles.plan()
        roles.explore(count=3)
        roles.decide()
        assert attempt.draw(1, 2, timeout_s=0) is None  # 3 of at least 4
        roles.explore(count=1)
        roles.decide()
        draw(attempt, 1, 2)  # (4 - 4) · 1.5 + 2
        assert attempt.draw(2, 2, timeout_s=0) is None
        roles.explore(count=1)
        roles.decide()
        assert attempt.draw(2, 2, timeout_s=0) is None
        roles.explore(count=1)
        roles.decide()
        draw(attempt, 2, 2)
        attempt.commit_checkpoint(1, "/checkpoints/1")
        assert attempt.draw(3, 2, timeout_s=0) is None
    with roles.attempt(publish=False) as again:  # step 2 was released
        draw(again, 2, 2)
        assert again.draw(3, 2, timeout_s=0) is None


def test_a_ratio_that_nothing_can_meet_any_more_ends_in_short_batches(buffer: Buffer) -> None:
    roles = stored(buffer, 6, max_times_sampled=0, samples_per_insert={"ratio": 1})
    with roles.attempt() as attempt:
        assert [draw(attempt, step, 4).num_groups for step in (1, 2, 3)] == [4, 2, 0]
        assert draw(attempt, 4, 4).short_reason == "sampling.samples_per_insert allows 0 of 4 groups: 6 became ready"


FORMULA = "mean_reward * (1 - mean_reward) / (1 + times_sampled)"


def test_a_formula_follows_writes_labels_and_draws(buffer: Buffer) -> None:
    roles = stored(buffer, 2, order="prioritized", max_times_sampled=0, priority={"formula": FORMULA, "exponent": 1.0})
    with roles.attempt() as attempt:
        assert weights(buffer) == pytest.approx({1: 0.25, 2: 0.25})
        add(roles, 1, rewards=(0.0, 0.2))
        assert weights(buffer) == pytest.approx({1: 0.25, 2: 0.25, 3: 0.09})
        buffer.sql("UPDATE rft.experience SET reward = 1 WHERE group_id = 1")
        roles.decide(version="none")
        assert weights(buffer) == pytest.approx({1: 1e-6, 2: 0.25, 3: 0.09})
        first = groups_of(draw(attempt, 1, 1))[0]
        draw(attempt, 2, 1)
        assert weights(buffer)[first] == pytest.approx({2: 0.125, 3: 0.045}[first])


def weights(buffer: Buffer) -> dict[int, float]:
    rows = buffer.sql("SELECT item_id, draw_weight FROM rft.worklist WHERE consumer = 'trainer' ORDER BY 1", [])
    return {row["item_id"]: row["draw_weight"] for row in rows.to_pylist()}


def test_a_relabelled_group_that_can_be_drawn_again_is_decided_on_again_first(buffer: Buffer) -> None:
    roles = stored(buffer, 2, max_times_sampled=2, cooldown_steps=2)
    with roles.attempt() as attempt:
        assert groups_of(draw(attempt, 1, 2)) == [1, 2]
        buffer.sql("UPDATE rft.experience SET reward = 0.5 WHERE group_id IN (1, 2)")
        assert attempt.draw(3, 2, timeout_s=0) is None
        assert roles.decide(keep=lambda row: row["group_id"] == 1, version="none") == [1, 2]
        batch = draw(attempt, 3, 2)
        assert groups_of(batch) == [1] and set(batch.rows["reward"].to_pylist()) == {0.5}
        # Used up now: a label changes no history.
        buffer.sql("UPDATE rft.experience SET reward = 0.75 WHERE group_id = 1")
        assert roles.group(1)["status"] == "ready"


def test_a_division_by_zero_in_one_group_gives_it_priority_0(buffer: Buffer) -> None:
    formula = {"formula": "1 / (max_reward - min_reward)", "exponent": 1.0}
    roles = stored(buffer, 1, order="prioritized", priority=formula)
    with roles.attempt():
        add(roles, 1, rewards=(0.5, 0.5))
        add(roles, 1, rewards=(0.0, 0.5))
    assert weights(buffer) == pytest.approx({1: 1.0, 2: 1e-6, 3: 2.0})


@pytest.mark.parametrize(
    ("formula", "reason"),
    [
        ("meen_reward", 'column "meen_reward" does not exist'),
        ("1; DROP TABLE rft.draw", "semicolon"),
        ("1); DROP TABLE rft.draw; SELECT (1", "semicolon"),
        ("tableoid::bigint", "tableoid"),
        ("1)::float8) STORED, ADD COLUMN more float8 DEFAULT ((1", "syntax error"),
        (
            "rft.race_time(1, group_id, 1)",
            r"function rft.race_time\(bigint,bigint,integer\), which is not part of PostgreSQL",
        ),
        ("(SELECT max(reward) FROM rft.experience)", "table rft.experience, which is not part"),
        ("(SELECT 1)", "cannot use subquery"),
        ("random()", "not immutable"),
        ("pg_sleep(5)::text::float8", "not immutable"),
        ("avg(mean_reward)", "aggregate functions are not allowed"),
        ("'a'", "invalid input syntax"),
        ("mean_reward --", None),
    ],
)
def test_a_formula_is_one_expression_over_the_columns_of_a_group(
    buffer: Buffer, formula: str, reason: str | None
) -> None:
    if reason is None:
        assert checked_formula(buffer.database, formula) == "mean_reward"
        return
    with pytest.raises(ConfigError, match=reason) as caught:
        checked_formula(buffer.database, formula)
    assert "mean_reward" in str(caught.value) and "sampling.priority.formula" in str(caught.value)
    assert buffer.sql("SELECT count(*) AS n FROM rft.draw")["n"].to_pylist() == [0]


def test_a_wrong_formula_starts_no_attempt(buffer: Buffer) -> None:
    roles = stored(buffer, 1, order="prioritized", priority={"formula": "nonsense"})
    with pytest.raises(ConfigError, match="nonsense"):
        roles.attempt()
    assert buffer.sql("SELECT count(*) AS n FROM rft.run_attempt")["n"].to_pylist() == [0]


def test_another_policy_after_a_resume_places_every_group(buffer: Buffer) -> None:
    roles = stored(buffer, 8)
    with roles.attempt() as attempt:
        assert groups_of(draw(attempt, 1, 2)) == [1, 2]
        attempt.commit_checkpoint(1, "/checkpoints/1")
    roles.sampling = SamplingConfig(order="newest", max_staleness=1000)
    with roles.attempt() as attempt:
        assert groups_of(draw(attempt, 2, 2)) == [8, 7]
        attempt.commit_checkpoint(2, "/checkpoints/2")
    roles.sampling = SamplingConfig(max_times_sampled=2, max_staleness=1000)
    with roles.attempt() as attempt:
        assert groups_of(draw(attempt, 3, 8)) == [1, 2, 3, 4, 5, 6, 7, 8]
    roles.sampling = SamplingConfig(order="uniform", max_times_sampled=3, max_staleness=1000)
    with roles.attempt() as attempt:  # step 3 never took place
        draw(attempt, 3, 8)
    limit = {"ratio": 1}
    roles.sampling = SamplingConfig(max_times_sampled=2, max_staleness=1000, samples_per_insert=limit)
    with roles.attempt() as attempt:
        # Counted from here: what was never drawn on this history, of the eight.
        assert groups_of(draw(attempt, 3, 8)) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("sampling", "what"),
    [
        ({"order": "random"}, "order"),
        ({"mixture": [{"ratio": 1}]}, "either a source or a taskset"),
        ({"mixture": [{"source": "human", "ratio": 0}]}, "ratio"),
        ({"mixture": [{"source": "human", "ratio": 1}] * 2}, "human more than once"),
        ({"mixture": [{"source": "replay", "ratio": 1}]}, "replay alone"),
        ({"mixture": [{"source": "human", "ratio": 1}], "stratify": "taskset"}, "both divide a batch"),
        ({"samples_per_insert": {"ratio": 4, "error_buffer": 2}}, "stops every draw"),
        ({"over_sampling": 1.5, "max_staleness": 1}, "trained on up to 2 steps later"),
        ({"priority": {"exponent": 1}}, "no effect without order: prioritized"),
        ({"cooldown_steps": 0}, "cooldown_steps"),
    ],
)
def test_policies_that_mean_nothing_are_refused(sampling: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        SamplingConfig.model_validate(sampling)
