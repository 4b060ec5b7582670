"""Rollouts that fail: the end of a run in which none succeeds, and the wait for what its rewards need."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from rftcore.explorer import outage
from rftcore.explorer.outage import Outage
from rftcore.explorer.run_failures import RunFailures
from rftcore.launch.terminal.views import line
from rftcore.reporting.report import build_report
from rftdata.attempts.attempt import Attempt
from rftdata.errors import RolloutsFailedError
from rftdata.experience import Group, Rollout
from rftdata.reports.progress import Failures, Progress
from tests.support.explored_run import OneAtATime, Run, outcomes
from tests.support.waiting import PATIENCE_S

BAD_REWARD = "def score(turn, task):\n    return grade(turn)\n\ndef grade(turn):\n    return float(turn.answr == '2')\n"


def test_a_reward_that_fails_on_every_rollout_ends_the_run_with_the_users_stack(run: Run, attempt: Attempt) -> None:
    (run.folder / "bad.py").write_text(BAD_REWARD)
    run.publish(attempt, 0, "a")
    with pytest.raises(
        RolloutsFailedError, match="not one of the rollouts of explorer step 0 succeeded: 4 failed"
    ) as caught:
        run.explore(OneAtATime(), until=lambda: False, reward="./bad.py:score")
    text = "AttributeError: 'Turn' object has no attribute 'answr' (bad.py, line 5, in grade)"
    assert text in str(caught.value)
    assert "line 2, in score\n    return grade(turn)" in caught.value.stack
    assert outcomes(run) == {"failed": 4}, "what failed is stored, and no refill was tried"
    assert run.rows(
        "SELECT DISTINCT error FROM rft.rollout JOIN rft.rollout_group USING (group_id) WHERE run_id = %s"
    ) == [{"error": text}]
    snapshot = Progress(run.run).snapshot()
    assert snapshot.failures == Failures(num_rollouts=4, num_commonest=4, commonest=text)
    assert f"4 rollouts failed, all with {text}" in line(snapshot)
    report = build_report(run.buffer, run.run_id)
    assert report.rollouts == {"failed": 4} and report.failed_because == {text: 4}
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value), "it comes from another process"


def test_a_rollout_whose_messages_are_no_json_is_stored_with_its_error(run: Run, attempt: Attempt) -> None:
    (run.folder / "own.py").write_text(
        "import datetime\n\n"
        "async def workflow(task, model, score):\n"
        "    return await score(await model.chat([{'role': 'user', 'content': 'a', 'at': datetime.date.today()}]), task)\n"
    )
    run.publish(attempt, 0, "a")
    with pytest.raises(RolloutsFailedError, match=r"the messages of a rollout cannot be stored.*type date is not JSON"):
        run.explore(OneAtATime(), until=lambda: False, workflow="./own.py:workflow")
    assert outcomes(run) == {"failed": 4}


@pytest.mark.parametrize("other", ["np.zeros(1)", "np.array([{}], object)"])
def test_rollouts_whose_arrays_cannot_be_stored_with_those_of_the_others_fail_alone(
    run: Run, attempt: Attempt, other: str
) -> None:
    (run.folder / "own.py").write_text(
        "import itertools\n\nimport numpy as np\n\nnumbers = itertools.count()\n\n\n"
        "async def workflow(task, model, score):\n"
        "    turn = await model.chat([{'role': 'user', 'content': 'a'}])\n"
        f"    turn.sequence.arrays = {{'mine': {other} if next(numbers) == 1 else np.zeros(1, np.float32)}}\n"
        "    return await score(turn, task)\n"
    )
    run.publish(attempt, 0, "a")
    run.explore(OneAtATime(), until=lambda: sum(outcomes(run).values()) == 4, workflow="./own.py:workflow")
    assert outcomes(run) == {"ok": 3, "failed": 1}
    (failed,) = run.rows(
        "SELECT error FROM rft.rollout JOIN rft.rollout_group USING (group_id) WHERE run_id = %s AND error IS NOT NULL"
    )
    assert "arrays" in failed["error"] or "array" in failed["error"]


def test_a_run_may_be_allowed_more_failed_steps(run: Run, attempt: Attempt) -> None:
    """Two steps may start at once; both fail."""
    (run.folder / "bad.py").write_text(BAD_REWARD)
    run.publish(attempt, 0, "a")
    with pytest.raises(RolloutsFailedError, match="of the explorer steps 0 to 1 succeeded"):
        run.explore(
            OneAtATime(),
            until=lambda: False,
            reward="./bad.py:score",
            max_failed_steps=2,
            changes={"sync": {"offset": 1}},
        )


def seal(run: Run, attempt: Attempt, step: int, outcome: str, error: str | None = None) -> None:
    """Store the group of an explorer step, with one rollout that ended so."""
    run.buffer.sql(
        "WITH g AS (INSERT INTO rft.rollout_group (run_id, attempt_id, ordinal, task_id, explore_step, group_size, status, sealed_at)"
        " VALUES (%s, %s, %s, 1, %s, 1, 'sealed', clock_timestamp()) RETURNING group_id)"
        " INSERT INTO rft.rollout (group_id, rollout_index, outcome, num_turns, seconds, error)"
        " SELECT group_id, 0, %s::rft.rollout_outcome, 0, 0, %s FROM g",
        [run.run_id, attempt.attempt_id, step, step, outcome, error],
    )


def test_failed_steps_are_counted_in_whatever_order_they_end(run: Run, attempt: Attempt) -> None:
    steps = RunFailures(run.run, Outage(0.0, 1, lambda: 0), 1, 2)
    steps.record("TimeoutError: long ago", "an old stack")
    steps.record("KeyError: 'answer'", "the stack")
    seal(run, attempt, 1, "failed", "KeyError: 'answer'")
    steps.check({1})
    seal(run, attempt, 0, "failed", "KeyError: 'answer'")
    with pytest.raises(RolloutsFailedError, match="2 failed, the first with KeyError: 'answer'") as caught:
        steps.check({0})
    assert caught.value.stack == "the stack"


def test_failed_steps_do_not_end_a_run_in_which_something_has_succeeded(run: Run, attempt: Attempt) -> None:
    """As an explorer that starts during an outage finds them."""
    failures = RunFailures(run.run, Outage(0.0, 1, lambda: 0), 1, 1)
    seal(run, attempt, 0, "ok")
    seal(run, attempt, 1, "failed")
    failures.check({1})
    assert not run.run.refreshed().has_ended


def test_a_group_that_always_fails_is_stored_although_an_outage_lasts(run: Run) -> None:
    """It is claimed first again, so that no other group would show that the outage is over."""
    outage = Outage(PATIENCE_S, 1, lambda: 0)
    outage.failed("no judge")
    failures = RunFailures(run.run, outage, 1, 1)
    group = Group([Rollout(0, "failed", error="KeyError: 'answer'")], 7, 1, source="explorer")
    assert [failures.of_an_outage([group]) for _ in range(3)] == [True, True, False]


def test_an_evaluation_whose_answers_all_fail_ends_a_run_that_only_evaluates(run: Run, attempt: Attempt) -> None:
    (run.folder / "bad.py").write_text(BAD_REWARD)
    run.ask(attempt, run.publish(attempt, 0, "a"), "a")
    stored = {"tasks": [], "sampling": {"source": {"sql": "select 1"}}, "algorithm": {"name": "sft", "group_size": 1}}
    with pytest.raises(
        RolloutsFailedError, match=r"not one of the 8 answers on validation \(greedy, step 0\) succeeded"
    ) as caught:
        run.explore(OneAtATime(), until=lambda: False, reward="./bad.py:score", changes=stored)
    assert "return grade(turn)" in caught.value.stack


JUDGED = "from pathlib import Path\n\ndef score(turn, task):\n    return float(len(Path({!r}).read_text()))\n"


@pytest.fixture
def judge(run: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the reward `./judged.py:score` cannot do without; two groups without it are an outage."""
    monkeypatch.setattr(outage, "_MOST_GROUPS", 2)
    file = run.folder / "judge"
    file.write_text("1")
    (run.folder / "judged.py").write_text(JUDGED.format(str(file)))
    return file


def test_an_explorer_waits_for_a_judge_that_is_gone_for_a_while(run: Run, attempt: Attempt, judge: Path) -> None:
    version = run.publish(attempt, 0, "a")
    reported: list[str] = []

    def until() -> bool:
        """Remove the judge after some success, ask for an evaluation when the explorer pauses, and restore the judge at the next pause."""
        waits = run.rows("SELECT waiting_for FROM rft.worker WHERE run_id = %s AND waiting_for LIKE 'what its%%'")
        if not reported and outcomes(run).get("ok"):
            judge.unlink(missing_ok=True)
        if waits and waits[0]["waiting_for"] not in reported and len(reported) < 2:
            reported.append(waits[0]["waiting_for"])
            if len(reported) == 1:
                run.ask(attempt, version, "a")
            else:
                assert [row["status"] for row in run.evaluations()] == ["planned"], (
                    "no evaluation ends with failed answers alone"
                )
                judge.write_text("1")
        return len(reported) == 2 and run.all_answered()

    larger = {"trainer": {"batch_groups": 12}}
    run.explore(OneAtATime(), until, reward="./judged.py:score", claim_groups=1, changes=larger)
    assert "2 groups in a row failed, the last with FileNotFoundError" in reported[0]
    assert "3 groups in a row failed" in reported[1]
    assert run.evaluations() == [{"status": "done", "mean_reward": 1.0, "error": None}]
    assert not run.run.refreshed().has_ended


def test_an_evaluation_that_always_fails_is_no_outage(run: Run, attempt: Attempt) -> None:
    """Its tasks are not what the reward expects. The run goes on, and chooses no checkpoint by it."""
    source = "def score(turn, task):\n    return {'train': 1.0}[task.taskset]\n"
    (run.folder / "picky.py").write_text(source)
    version = run.publish(attempt, 0, "a")
    asked: list[int] = []

    def until() -> bool:
        good = outcomes(run).get("ok", 0)
        if good and not asked:
            asked.append(good)
            run.ask(attempt, version, "a")
        return bool(asked) and run.all_ended() and good > asked[0]

    larger = {"trainer": {"batch_groups": 12}}
    run.explore(OneAtATime(), until, reward="./picky.py:score", claim_groups=1, changes=larger)
    (evaluation,) = run.evaluations()
    assert evaluation["status"] == "failed" and "8 of 8 answers failed" in evaluation["error"]


def test_an_outage_that_outlasts_the_explorers_patience_ends_the_run(run: Run, attempt: Attempt, judge: Path) -> None:
    run.publish(attempt, 0, "a")

    def until() -> bool:
        if outcomes(run).get("ok"):
            judge.unlink(missing_ok=True)
        return False

    larger = {"trainer": {"batch_groups": 12}}
    with pytest.raises(
        RolloutsFailedError,
        match=r"of the last \d s \(explorer.patience_s\) succeeded: 2 failed, the first with FileNotFound",
    ):
        run.explore(OneAtATime(), until, reward="./judged.py:score", claim_groups=1, patience_s=0.5, changes=larger)


def test_a_step_with_one_good_rollout_continues(run: Run, attempt: Attempt) -> None:
    source = BAD_REWARD.replace("return grade(turn)", "return 1.0 if task.task_key == '1' else grade(turn)")
    (run.folder / "bad.py").write_text(source)
    run.publish(attempt, 0, "a")
    larger = {"trainer": {"batch_groups": 8}}
    run.explore(OneAtATime(), until=lambda: sum(outcomes(run).values()) >= 16, reward="./bad.py:score", changes=larger)
    assert outcomes(run)["ok"] >= 2 and outcomes(run)["failed"] >= 14


def test_a_run_resumed_with_a_corrected_reward_does_not_count_earlier_failures(run: Run) -> None:
    (run.folder / "bad.py").write_text(BAD_REWARD)
    with run.buffer.attempt(run.run) as attempt:
        run.publish(attempt, 0, "a")
        with pytest.raises(RolloutsFailedError):
            run.explore(OneAtATime(), until=lambda: False, reward="./bad.py:score")
    run.buffer.sql("UPDATE rft.run SET stop_requested = false WHERE run_id = %s", [run.run_id])
    (run.folder / "bad.py").write_text(BAD_REWARD.replace("return grade(turn)", "return 1.0"))
    with run.buffer.attempt(run.run) as attempt:
        run.publish(attempt, 1, "b")  # the places of the first step are taken until a pipeline drops its groups
        run.explore(OneAtATime(), until=lambda: outcomes(run).get("ok", 0) >= 4, reward="./bad.py:score")
