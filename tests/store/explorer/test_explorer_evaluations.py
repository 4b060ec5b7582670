"""Evaluations by an explorer: when they are made, which weights they load, and which score they have."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rftcore.cli import run_command
from rftcore.engines.base import Decoding, Generation
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.evaluations import (
    Answer,
    claim_evaluation,
    finish_evaluation,
    reserve_evaluation,
    store_answers,
    validation_scores,
)
from rftdata.workers.worker import Worker
from tests.support.explored_run import OneAtATime, Run, Sorted
from tests.support.waiting import wait_until


def test_waiting_for_the_engine_does_not_count_as_time_of_an_answer(run: Run, attempt: Attempt) -> None:
    run.ask(attempt, run.publish(attempt, 0, "a"), "a")
    # Eight questions of 0.7 s, one after the other: 5.6 s in all, and each at most twice its own.
    run.explore(OneAtATime(seconds=0.7), until=run.all_answered, rollout_timeout_s=4.5)
    assert run.evaluations() == [{"status": "done", "mean_reward": 1.0, "error": None}]


def test_an_evaluation_whose_answers_all_took_too_long_has_no_score(run: Run, attempt: Attempt) -> None:
    run.ask(attempt, run.publish(attempt, 0, "a"), "a")
    engine = Sorted()
    engine.answers_sampled = True  # rollouts run beside it
    run.explore(engine, until=run.all_ended, rollout_timeout_s=0.1)
    (evaluation,) = run.evaluations()
    assert (evaluation["status"], evaluation["mean_reward"]) == ("failed", None)
    assert (
        "8 of 8 answers failed" in evaluation["error"] and "explorer.rollout_timeout_s = 0.1 s" in evaluation["error"]
    )


def test_an_evaluation_is_left_when_the_run_is_asked_to_stop(run: Run, attempt: Attempt) -> None:
    run.ask(attempt, run.publish(attempt, 0, "a"), "a")
    engine = OneAtATime(seconds=3600)
    run.explore(engine, until=lambda: engine.asked > 0)
    assert run.evaluations() == [{"status": "planned", "mean_reward": None, "error": None}]


class Some(OneAtATime):
    """Answers three greedy requests, and all others that are not greedy."""

    num_left = 3

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        if not decoding.temperature:
            while self.num_left == 0:
                await asyncio.sleep(0.01)
            self.num_left -= 1
        return await super().generate(prompt_token_ids, decoding)


@pytest.mark.parametrize("weights", ["present", "older"])
def test_answers_of_the_last_seconds_are_stored_when_the_run_is_asked_to_stop(
    run: Run, attempt: Attempt, weights: str
) -> None:
    version = run.publish(attempt, 0, "a")
    if weights == "older":  # it is answered alone, and otherwise beside the rollouts
        run.publish(attempt, 1, "b")
    run.ask(attempt, version, "a")
    engine = Some()
    run.explore(engine, until=lambda: engine.num_left == 0)
    assert run.evaluations() == [{"status": "planned", "mean_reward": None, "error": None}]
    assert [row["reward"] for row in run.rows("SELECT reward FROM rft.v_evaluation_answer WHERE run_id = %s")] == [
        1.0
    ] * 3


def test_evaluations_of_one_set_of_weights_load_it_once(run: Run, attempt: Attempt) -> None:
    old = run.publish(attempt, 0, "old")
    run.publish(attempt, 1, "new")
    run.ask(attempt, old, "old", "greedy", "sampled")
    engine = OneAtATime()
    run.explore(engine, until=lambda: run.all_answered() and engine.loaded[-1] == "new")
    assert engine.loaded == ["new", "old", "new"]


def test_an_evaluation_of_the_version_in_the_engine_loads_no_file(run: Run, attempt: Attempt) -> None:
    """Weights that were sent into the engine have another checksum than the file that an evaluation names."""
    version = run.publish(attempt, 0, "as-sent")
    (run.folder / "as-file").write_text("as-file")
    run.ask(attempt, version, "as-file")
    engine = OneAtATime()
    run.explore(engine, until=run.all_answered)
    assert engine.loaded == ["as-sent"]


def test_an_evaluation_of_the_present_weights_waits_for_no_rollouts_and_newer_weights_wait_for_it(
    run: Run, attempt: Attempt
) -> None:
    version = run.publish(attempt, 0, "a")
    engine, steps = Sorted(), list[str]()

    def goes_on() -> bool:
        if not steps and engine.asked:
            run.ask(attempt, version, "a")
            steps.append("asked")
        elif steps == ["asked"] and run.evaluations()[0]["status"] == "claimed":
            run.publish(attempt, 1, "b")
            steps.append("published")
            engine.answers_greedy = True
        elif steps[-1:] == ["published"] and run.all_answered():
            steps.append("answered")
            assert run.rows("SELECT 1 AS a FROM rft.experience WHERE run_id = %s") == [], "rollouts go on"
        return steps[-1:] == ["answered"] and engine.loaded[-1] == "b"

    run.explore(engine, until=goes_on)
    assert engine.loaded == ["a", "b"]


def test_older_weights_are_evaluated_after_the_rollouts(run: Run, attempt: Attempt) -> None:
    old = run.publish(attempt, 0, "old")
    run.publish(attempt, 1, "new")
    engine, asked = Sorted(), list[int]()
    engine.answers_greedy = True

    def goes_on() -> bool:
        if not asked and engine.asked:
            run.ask(attempt, old, "old")
            asked.append(engine.asked)
        elif asked and not engine.answers_sampled:
            assert run.evaluations()[0]["status"] in ("planned", "claimed") and engine.loaded == ["new"]
            engine.answers_sampled = True
        return bool(asked) and run.all_answered() and engine.loaded[-1] == "new"

    run.explore(engine, until=goes_on)
    assert engine.loaded == ["new", "old", "new"]


def test_an_evaluation_with_many_failed_answers_chooses_no_checkpoint(run: Run, attempt: Attempt) -> None:
    """Step 2 is the best of those that are answered, which says nothing: the judge was gone for half of the answers."""
    for step, num_failed in ((1, 0), (2, 4), (3, 1)):
        run.ask(attempt, run.publish(attempt, step, str(step)), str(step), step=step)
        with Worker(run.run, "explorer") as worker:
            asked = claim_evaluation(run.run, worker.worker_id, lease_s=60.0)
            assert asked is not None
            answers = [
                Answer(
                    task_id=task_id,
                    reward=0.0 if task_id <= num_failed else 0.5 * step,
                    response="",
                    num_response_tokens=0,
                    finish_reason="stop",
                    error="no judge" if task_id <= num_failed else None,
                )
                for task_id in range(1, 9)
            ]
            assert finish_evaluation(run.run, asked.evaluation_id, worker.worker_id, answers, 1.0)

    def scores(max_failed: float) -> dict[int, float]:
        return validation_scores(run.run, ["validation"], "greedy", max_failed=max_failed)

    assert scores(0.0) == {1: 0.5}
    assert scores(0.125) == {1: 0.5, 3: 1.5 * 7 / 8}
    assert sorted(scores(1.0)) == [1, 2, 3]


def test_one_explorer_alone_leaves_its_rollouts_for_an_evaluation_of_older_weights(run: Run, attempt: Attempt) -> None:
    old = run.publish(attempt, 0, "old")
    run.ask(attempt, old, "old", "greedy", "sampled")
    with Worker(run.run, "explorer") as one, Worker(run.run, "explorer") as other:

        def reserved(worker: Worker, **changes: Any) -> str | None:
            arguments = {"lease_s": 60.0, "but": [], "after_s": 0.0, **changes}
            found = reserve_evaluation(run.run, worker.worker_id, **arguments)
            return None if found is None else found.decoding

        assert reserved(one, after_s=60.0) is None, "an engine that has the weights comes first"
        assert reserved(one, but=[old]) is None
        assert reserved(one) == "greedy"
        assert reserved(other) is None, "it goes on with its rollouts"
        run.buffer.sql("UPDATE rft.evaluation SET status = 'done' WHERE status = 'claimed'")
        assert reserved(other) == "sampled"


def test_an_explorer_whose_end_is_being_recorded_reserves_nothing(run: Run, attempt: Attempt) -> None:
    old = run.publish(attempt, 0, "old")
    run.ask(attempt, old, "old")
    waits = "SELECT 1 AS n FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with Worker(run.run, "explorer") as worker, ThreadPoolExecutor(1) as thread:
        with run.run.database.transaction() as connection:
            connection.execute("UPDATE rft.worker SET stopped_at = now() WHERE worker_id = %s", [worker.worker_id])
            reserved = thread.submit(reserve_evaluation, run.run, worker.worker_id, lease_s=60.0, but=[], after_s=0.0)
            wait_until(lambda: run.buffer.sql(waits).num_rows, "the reservation that waits for the end")
        assert reserved.result() is None
    assert run.evaluations()[0]["status"] == "planned"


def test_several_answers_are_stored_with_their_rollouts_and_only_missing_ones_are_asked_for_again(
    run: Run, attempt: Attempt, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    version = run.publish(attempt, 0, "a")
    run.ask(attempt, version, "a", "sampled", num_answers=3)
    with Worker(run.run, "explorer") as worker:
        asked = claim_evaluation(run.run, worker.worker_id, lease_s=60.0)
        assert asked is not None and asked.num_answers == 3
        early = [_answer(task_id, index) for task_id in (9, 10) for index in range(3)]
        assert store_answers(run.run, asked.evaluation_id, worker.worker_id, early)
        assert store_answers(run.run, asked.evaluation_id, worker.worker_id, early), "a repetition changes nothing"
        assert not store_answers(run.run, asked.evaluation_id, worker.worker_id + 1, early), "another worker's claim"
    engine = OneAtATime()
    run.explore(engine, until=run.all_answered)
    rows = run.rows(
        "SELECT task_id, answer_index, reward, response, outcome::text AS outcome, num_turns, reward_parts::text AS parts, messages::text AS messages"
        " FROM rft.v_evaluation_answer WHERE run_id = %s ORDER BY 1, 2"
    )
    assert [(row["task_id"], row["answer_index"]) for row in rows] == [(t, i) for t in range(9, 17) for i in range(3)]
    (evaluation,) = run.rows("SELECT num_tasks, mean_reward, num_answers FROM rft.evaluation WHERE run_id = %s")
    assert evaluation == {"num_tasks": 8, "mean_reward": (6 * 0.5 + 18) / 24, "num_answers": 3} and engine.asked >= 18
    last = rows[-1]
    assert (last["outcome"], last["num_turns"], json.loads(last["parts"])) == ("ok", 1, {"exact_match": 1.0})
    assert [message["content"] for message in json.loads(last["messages"])] == ["1+1=", "2"]
    monkeypatch.setenv("RFT_BUFFER", run.buffer.config.uri)
    monkeypatch.setenv("RFT_SEGMENTS", str(run.buffer.config.segments))
    assert run_command(["show", "--evaluation", "1", "--task", "3"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line.startswith("answer")] == [f"answer {number} of 3" for number in (1, 2, 3)]
    assert shown.count("┃   2") == 3 and "  parts: exact_match 1" in shown
    assert run_command(["show", "--evaluation", "1"]) == 2 and "lowest rewards are 1, 2, " in capsys.readouterr().err


def test_failed_answers_beside_those_of_another_explorer_count_as_0(run: Run, attempt: Attempt) -> None:
    run.ask(attempt, run.publish(attempt, 0, "a"), "a")
    with Worker(run.run, "explorer") as worker:
        asked = claim_evaluation(run.run, worker.worker_id, lease_s=60.0)
        assert asked is not None
        early = [_answer(task_id, 0) for task_id in range(9, 16)]
        assert store_answers(run.run, asked.evaluation_id, worker.worker_id, early)
    run.explore(Sorted(), until=run.all_ended, rollout_timeout_s=0.1)
    (evaluation,) = run.evaluations()
    assert (evaluation["status"], evaluation["mean_reward"]) == ("done", 7 * 0.5 / 8)
    assert evaluation["error"].startswith("1 of 8 answers failed and count 0")


def _answer(task_id: int, index: int) -> Answer:
    return Answer(
        task_id=task_id, answer_index=index, reward=0.5, response="x", num_response_tokens=1, finish_reason="stop"
    )
