"""The explorer on a real buffer with a test engine: its requests, its claims, and how it ends."""

from __future__ import annotations

import pytest

from rftdata.attempts.attempt import Attempt
from rftdata.errors import EngineStoppedError
from rftdata.planning.claims import release_groups
from tests.support.chat_server import ChatServer
from tests.support.explored_run import Gated, OneAtATime, Run, outcomes
from tests.support.waiting import PATIENCE_S


def test_an_engine_that_ends_ends_the_explorer_and_leaves_the_evaluation_to_another(run: Run, attempt: Attempt) -> None:
    run.ask(attempt, run.publish(attempt, 0, "a"), "a")
    with pytest.raises(EngineStoppedError, match="out of memory"):
        run.explore(OneAtATime(dies_at=3), until=run.all_answered)
    assert run.evaluations() == [{"status": "planned", "mean_reward": None, "error": None}]
    assert "out of memory" in run.rows("SELECT error FROM rft.worker WHERE run_id = %s")[0]["error"]


def test_an_engine_that_ends_during_rollouts_records_no_failed_rollouts(run: Run, attempt: Attempt) -> None:
    run.publish(attempt, 0, "a")
    with pytest.raises(EngineStoppedError, match="out of memory"):
        run.explore(OneAtATime(dies_at=1), until=lambda: False)
    assert run.rows("SELECT outcome FROM rft.rollout JOIN rft.rollout_group g USING (group_id) WHERE run_id = %s") == []
    groups = run.rows("SELECT DISTINCT status::text AS status FROM rft.rollout_group WHERE run_id = %s")
    assert groups == [{"status": "planned"}]


def test_an_explorer_screens_the_groups_of_a_taskset_whose_selector_reports_it(run: Run, attempt: Attempt) -> None:
    """The engine is always right: after two rollouts of six nothing more is to be learned."""
    run.publish(attempt, 0, "a")
    engine = OneAtATime()
    own = {"name": "train", "source": "none", "group_size": 6, "selector": {"type": "speed", "screen_rollouts": 2}}
    sealed = "SELECT group_id FROM rft.rollout_group WHERE run_id = %s AND status = 'sealed'"
    run.explore(engine, until=lambda: len(run.rows(sealed)) == 2, changes={"tasks": [own]})
    outcomes = run.rows(
        "SELECT o.outcome::text AS outcome, count(*) AS n, max(o.error) AS error FROM rft.rollout o JOIN rft.rollout_group g USING (group_id)"
        " WHERE run_id = %s GROUP BY 1 ORDER BY 1"
    )
    why = "screened out: 2 of 2 first rollouts succeeded, a pass rate not below 1"
    assert outcomes == [{"outcome": "cancelled", "n": 8, "error": why}, {"outcome": "ok", "n": 4, "error": None}]
    assert engine.asked == 4


def test_groups_whose_leases_ended_are_claimed_again_and_written_once(run: Run, attempt: Attempt) -> None:
    """As after a restart of the database that lasts longer than a lease: both claims' rollouts could end at the same time."""
    engine, released = Gated(), []
    run.publish(attempt, 0, "first")

    def until() -> bool:
        if not released and engine.asked == 4:
            holder = run.buffer.sql("SELECT DISTINCT claimed_by FROM rft.rollout_group WHERE claimed_by IS NOT NULL")
            released.append(release_groups(run.run, holder["claimed_by"][0].as_py()))
        engine.is_open = engine.asked >= 8
        return run.buffer.sql("SELECT count(*) AS n FROM rft.rollout WHERE outcome = 'ok'")["n"][0].as_py() >= 4

    run.explore(engine, until, claim_groups=8, engine_args={"max_num_seqs": 16})
    assert released == [2]
    written = run.buffer.sql("SELECT group_id, count(*) AS n FROM rft.rollout GROUP BY 1 ORDER BY 1").to_pylist()
    assert [row["n"] for row in written] == [2, 2]


def test_a_reward_that_never_returns_times_out_and_the_run_continues(run: Run, attempt: Attempt) -> None:
    """The only process is busy with it twice: others wait for longer than their own limit."""
    source = "def score(turn, task):\n    while task.task_key == '1':\n        pass\n    return 1.0\n"
    (run.folder / "endless.py").write_text(source)
    run.publish(attempt, 0, "a")
    run.explore(
        OneAtATime(),
        until=lambda: sum(outcomes(run).values()) >= 16,
        reward="./endless.py:score",
        rollout_timeout_s=3.0,
        reward_processes=1,
        engine_args={"max_num_seqs": 16},
        changes={"trainer": {"batch_groups": 8}},
    )
    errors = run.rows(
        "SELECT DISTINCT error FROM rft.rollout JOIN rft.rollout_group USING (group_id) WHERE run_id = %s AND outcome = 'timeout'"
    )
    assert outcomes(run) == {"ok": 14, "timeout": 2}, "those that only waited for a free process are good"
    assert all("(endless.py, line" in row["error"] for row in errors), errors


def test_rewards_that_take_long_do_not_stop_sampling(run: Run, attempt: Attempt) -> None:
    """64 rollouts, whose rewards keep the processor busy and do not end: the engine is asked for all of them at once."""
    (run.folder / "slow.py").write_text("def score(turn, task):\n    while True:\n        pass\n")
    run.publish(attempt, 0, "a")
    engine = OneAtATime()
    run.explore(
        engine,
        until=lambda: engine.asked >= 64,
        reward="./slow.py:score",
        reward_timeout_s=2 * PATIENCE_S,
        rollout_timeout_s=2 * PATIENCE_S,
        engine_args={"max_num_seqs": 64},
        changes={"algorithm": {"name": "grpo", "group_size": 8}, "trainer": {"batch_groups": 8}},
    )
    assert engine.asked == 64, "none of them waited for a reward"


def test_each_taskset_is_explored_by_its_own_workflow_and_evaluated_by_it(run: Run, attempt: Attempt) -> None:
    (run.folder / "flow.py").write_text(
        "from rftcore.workflows.task import Score\n"
        "async def twice(task, model, score):\n"
        "    chat = [{'role': 'user', 'content': task.prompt}]\n"
        "    for _ in range(3):\n"
        "        turn = await model.chat(chat)\n"
        "        chat += [turn.message, {'role': 'user', 'content': 'again'}]\n"
        "    return Score(0.25)\n"
    )
    own = {"name": "train", "source": "x", "workflow": "./flow.py:twice", "max_turns": 3}
    tasks = {"tasks": [own], "eval": {"every": 20, "tasks": [{"name": "validation", "source": "y"}]}}
    run.ask(attempt, run.publish(attempt, 0, "a"), "a")
    stored = "SELECT num_turns, reward FROM rft.rollout JOIN rft.rollout_group USING (group_id) WHERE run_id = %s"
    run.explore(OneAtATime(), until=lambda: run.all_answered() and bool(run.rows(stored)), changes=tasks)
    assert {(row["num_turns"], row["reward"]) for row in run.rows(stored)} == {(3, 0.25)}
    assert run.evaluations()[0]["mean_reward"] == 1.0


def test_rules_a_judge_and_a_reward_over_the_group_are_stored_as_parts_and_the_judge_is_counted(
    run: Run, attempt: Attempt
) -> None:
    server = ChatServer(lambda *_: '{"score": 5}')
    try:
        run.publish(attempt, 0, "a")
        judge = {"name": "judge", "weight": 0.5, "endpoint": {"url": server.url, "model": "judge"}}
        run.explore(
            OneAtATime(),
            until=lambda: sum(outcomes(run).values()) >= 4,
            reward=["exact_match", judge, {"name": "shortest_correct", "weight": 2}],
            changes={"trainer": {"batch_groups": 1}, "algorithm": {"name": "grpo", "group_size": 4}},
        )
    finally:
        server.close()
    parts = run.rows(
        "SELECT name, value, count(*) AS n, min(reward) AS reward FROM rft.v_reward_part WHERE run_id = %s GROUP BY 1, 2 ORDER BY 1"
    )
    values = {"exact_match": 1.0, "judge": 0.5, "shortest_correct": 0.0}
    assert parts == [{"name": name, "value": value, "n": 4, "reward": 1.25} for name, value in values.items()]
    usage = run.rows("SELECT name, num_calls FROM rft.endpoint_usage WHERE run_id = %s")
    assert usage == [{"name": "reward/judge", "num_calls": len(server.requests)}]
