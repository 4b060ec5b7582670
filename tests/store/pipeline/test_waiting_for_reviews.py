"""A group that waits for a person does not keep a trainer from ready groups if explorers may be ahead; otherwise it is named."""

from __future__ import annotations

import re

import pytest

from operators.chain.build import build_chain
from operators.chain.chain import Chain
from rftdata import Buffer
from rftdata.attempts.attempt import Attempt
from rftdata.planning.claims import ClaimedGroup
from tests.store.pipeline.test_pipeline_worker import rows, run_pipeline
from tests.support.store_roles import Roles

HELD = 2  # the id of the group that is asked about


@pytest.fixture(scope="module")
def chain() -> Chain:
    return build_chain([{"human_review": {"where": "reward = 0.5", "timeout": "1 h", "otherwise": "pass"}}])


def doubtful(group: ClaimedGroup) -> list[float]:
    return [0.5, 1.0] if group.group_id == HELD else [0.0, 1.0]


def answer(buffer: Buffer, value: str) -> None:
    buffer.sql(f"UPDATE rft.review SET answer = '{value}'")


def waits_for(roles: Roles, attempt: Attempt, step: int) -> str | None:
    """Return what a draw without result reports to wait for."""
    reported: list[str | None] = []
    assert attempt.draw(step, roles.batch_groups, stop=lambda: bool(reported), waiting=reported.append) is None
    return reported[-1]


def test_groups_sampled_ahead_replace_a_waiting_group_which_is_drawn_once_answered(
    buffer: Buffer, chain: Chain
) -> None:
    roles = Roles(buffer, batch_groups=4, offset=1)
    drawn: list[int] = []
    with roles.attempt() as attempt:
        for step in (1, 2, 3, 4):
            roles.plan()
            roles.explore(doubtful)
            run_pipeline(roles, chain)
            if step == 3:
                answer(buffer, "pass")
                assert run_pipeline(roles, chain) == [HELD]
            groups = roles.train(attempt, step)
            assert len(groups) == 4
            assert (HELD in groups) == (step == 3)  # first in, first out as soon as it may
            drawn += groups
    assert sorted(drawn) == list(range(1, 17))  # every group once, and none was planned beside them
    assert roles.planned() == [(0, 4), (1, 4), (2, 4), (3, 4)]
    staleness = rows(buffer, "SELECT min(staleness) AS least, max(staleness) AS most FROM rft.draw")
    assert staleness == [{"least": 0, "most": 2}]


def test_without_groups_ahead_the_draw_waits_and_names_the_group(buffer: Buffer, chain: Chain) -> None:
    roles = Roles(buffer, batch_groups=4, offset=0, max_refill=4)
    with roles.attempt() as attempt:
        roles.plan()
        roles.explore(doubtful)
        run_pipeline(roles, chain)
        assert waits_for(roles, attempt, 1) == f"the review of group {HELD}"
        assert roles.plan() == 0  # it counts as one that can train
        answer(buffer, "pass")
        assert run_pipeline(roles, chain) == [HELD]
        assert roles.train(attempt, 1) == [1, 2, 3, 4]


def test_a_group_that_the_answer_drops_is_refilled_for_the_step_that_lacks_it(buffer: Buffer, chain: Chain) -> None:
    roles = Roles(buffer, batch_groups=4, offset=1, max_refill=4)
    with roles.attempt() as attempt:
        roles.plan()
        roles.explore(lambda group: [0.5, 0.5] if group.group_id == HELD else [0.0, 1.0])
        run_pipeline(roles, chain)
        assert roles.train(attempt, 1) == [1, 3, 4, 5]
        answer(buffer, "drop")
        assert run_pipeline(roles, chain) == [HELD]
        assert roles.group(HELD)["trainable"] is False
        roles.work()
        assert len(roles.train(attempt, 2)) == 4
        assert roles.planned("is_refill") == [(1, 1)]


def test_nothing_is_drawn_ahead_while_a_group_of_the_step_is_still_sampled(buffer: Buffer, chain: Chain) -> None:
    roles = Roles(buffer, batch_groups=4, offset=1)
    with roles.attempt() as attempt:
        roles.plan()
        claimed = roles.claim()
        late = next(group for group in claimed if group.group_id == 3)
        roles.insert(*[roles.result(group, doubtful(group)) for group in claimed if group is not late])
        run_pipeline(roles, chain)
        assert waits_for(roles, attempt, 1) is None  # ready groups
        roles.insert(roles.result(late, [0.0, 1.0]))
        run_pipeline(roles, chain)
        assert roles.train(attempt, 1) == [1, 3, 4, 5]


def test_while_groups_ahead_are_sampled_they_are_what_is_waited_for(buffer: Buffer, chain: Chain) -> None:
    roles = Roles(buffer, batch_groups=4, offset=1)
    with roles.attempt() as attempt:
        roles.plan()
        claimed = roles.claim()
        ahead = [group for group in claimed if group.explore_step == 1]
        roles.insert(*[roles.result(group, doubtful(group)) for group in claimed if group.explore_step == 0])
        run_pipeline(roles, chain)
        assert waits_for(roles, attempt, 1) is None
        roles.insert(*[roles.result(group, [0.0, 1.0]) for group in ahead])
        run_pipeline(roles, chain)
        assert roles.train(attempt, 1) == [1, 3, 4, 5]


def test_many_reviews_are_listed_briefly_and_a_deadline_that_has_passed_is_no_review(buffer: Buffer) -> None:
    chain = build_chain([{"human_review": {"timeout": "1 h", "otherwise": "pass"}}])
    roles = Roles(buffer, batch_groups=5)
    with roles.attempt() as attempt:
        roles.plan()
        roles.explore()
        run_pipeline(roles, chain)
        assert waits_for(roles, attempt, 1) == "the review of groups 1, 2, 3 and 2 more"
        buffer.sql("UPDATE rft.worklist SET lease_until = rft.clock() WHERE consumer = 'pipeline'")
        assert waits_for(roles, attempt, 1) is None


def test_each_lane_draws_ahead_from_itself(buffer: Buffer, chain: Chain) -> None:
    roles = Roles(buffer, batch_groups=4, offset=1, weights=(1.0, 1.0), sampling={"stratify": "taskset"})
    with roles.attempt() as attempt:
        roles.plan()
        roles.explore(doubtful)
        run_pipeline(roles, chain)
        roles.train(attempt, 1)
    drawn = rows(
        buffer,
        "SELECT taskset, count(DISTINCT group_id) AS n, bool_or(explore_step = 1) AS ahead FROM rft.draw d"
        " JOIN rft.rollout_group g ON g.group_id = d.item_id JOIN rft.task USING (task_id) GROUP BY 1 ORDER BY 1",
    )
    held = rows(buffer, f"SELECT taskset FROM rft.rollout_group JOIN rft.task USING (task_id) WHERE group_id = {HELD}")
    assert [row["n"] for row in drawn] == [2, 2]
    assert [row["taskset"] for row in drawn if row["ahead"]] == [held[0]["taskset"]]


def test_a_refused_draw_queries_once_what_can_come_and_what_waits_for_people(buffer: Buffer, chain: Chain) -> None:
    roles = Roles(buffer, batch_groups=4, offset=0)
    with roles.attempt() as attempt:
        roles.plan()
        roles.explore(doubtful)
        run_pipeline(roles, chain)
        with buffer.database.transaction() as connection:
            connection.execute("SET LOCAL track_functions = 'all'")
            drawn = connection.execute(
                "SELECT * FROM rft.draw_groups(%s, %s, 1, 4, 0)", [roles.run_id, attempt.attempt_id]
            ).fetchall()
            calls = connection.execute(
                "SELECT funcname, calls FROM pg_stat_xact_user_functions WHERE funcname IN ('outlook', 'held_for_review') ORDER BY 1"
            ).fetchall()
    assert drawn == [{"outcome": "not yet", "reason": f"the review of group {HELD}"}]
    assert calls == [{"funcname": "held_for_review", "calls": 1}, {"funcname": "outlook", "calls": 1}]


def test_groups_that_wait_for_people_are_found_without_reading_the_queues(buffer: Buffer, chain: Chain) -> None:
    roles = Roles(buffer, batch_groups=4, offset=0)
    with roles.attempt():
        roles.plan()
        roles.explore(doubtful)
        run_pipeline(roles, chain)
    buffer.sql(
        "INSERT INTO rft.worklist (run_id, consumer, item_kind, item_id, sort_key, available) SELECT %s, c, 'group', 1000 + n, n, a"
        " FROM generate_series(1, 20000) n, (VALUES ('pipeline'::rft.consumer, true), ('trainer', false)) AS v (c, a)",
        [roles.run_id],
    )
    buffer.sql("ANALYZE rft.worklist")
    body = rows(buffer, "SELECT prosrc FROM pg_proc WHERE proname = 'held_for_review'")[0]["prosrc"]
    values = {"of_run": str(roles.run_id), "step": "1", "later_too": "true", "short_lanes": "NULL::text[]"}
    for name, value in values.items():
        body = re.sub(rf"\b{name}\b", value, body)
    with buffer.database.connection() as connection:
        found = connection.execute(body).fetchall()
        plan = connection.execute("EXPLAIN " + body).fetchall()
    assert [list(row.values())[-1] for row in found] == [f"group {HELD}"]
    text = "\n".join(row["QUERY PLAN"] for row in plan)
    assert "worklist_waiting" in text and "Seq Scan on worklist" not in text
