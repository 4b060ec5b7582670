"""The explorer on a real buffer with a test engine: its requests, when it loads which weights, and how it ends."""

from __future__ import annotations

import asyncio
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rftdata
from rftcore.config.run import parse_config
from rftcore.engines.base import Decoding, Engine, Generation
from rftcore.explorer import outage
from rftcore.explorer.outage import Outage
from rftcore.explorer.role import Explorer
from rftcore.explorer.run_failures import RunFailures
from rftcore.launch.terminal.views import line
from rftcore.reporting.report import build_report
from rftcore.resolved import ResolvedRun
from rftcore.run.join import JoinedRun
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.evaluations import (
    Answer,
    claim_evaluation,
    finish_evaluation,
    plan_evaluations,
    validation_scores,
)
from rftdata.errors import EngineStoppedError, ModelError, RolloutsFailedError
from rftdata.experience import Group, Rollout
from rftdata.planning.claims import release_groups
from rftdata.reports.progress import Failures, Progress
from rftdata.workers.worker import Worker
from tests.support.models import make_character_tokenizer
from tests.support.waiting import PATIENCE_S

CONFIG: dict[str, Any] = {
    "run": {"name": "explored", "seed": 7},
    "model": {"path": "nowhere"},
    "tasks": [{"name": "train", "source": "none"}],
    "algorithm": {"name": "grpo", "group_size": 2},
    "trainer": {"batch_groups": 2},
    "steps": 4,
}


class OneAtATime(Engine):
    """Answers `2` to everything, one request after the other."""

    def __init__(self, seconds: float = 0.0, dies_at: int | None = None) -> None:
        self.tokenizer = make_character_tokenizer()
        self.policy_version_id = 0
        self.num_generated_tokens = 0
        self.loaded: list[str] = []
        self.asked = 0
        self._seconds = seconds
        self._dies_at = dies_at
        self._turn = asyncio.Lock()

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        self.asked += 1
        if self._dies_at is not None and self.asked >= self._dies_at:
            raise EngineStoppedError("the engine stopped: out of memory")
        async with self._turn:
            await asyncio.sleep(self._seconds)
        return Generation(self.tokenizer.encode("2"), [-0.5], "2", "stop", [(0, self.policy_version_id)])

    def load_weights(self, uri: str, policy_version_id: int, checksum: str | None = None) -> float:
        if not Path(uri).is_file():
            raise ModelError(f"the weights file {uri} does not exist")
        self.loaded.append(Path(uri).name)
        self.policy_version_id = policy_version_id
        return 0.0

    def close(self) -> None:
        pass


class Gated(OneAtATime):
    """Answers nothing before `is_open` is set."""

    is_open = False

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        self.asked += 1
        while not self.is_open:
            await asyncio.sleep(0.01)
        return Generation(self.tokenizer.encode("2"), [-0.5], "2", "stop", [(0, self.policy_version_id)])


class Sorted(OneAtATime):
    """Answers greedy requests and others only while they are let through."""

    answers_greedy = False
    answers_sampled = False

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        self.asked += decoding.temperature > 0
        while not (self.answers_sampled if decoding.temperature else self.answers_greedy):
            await asyncio.sleep(0.01)
        return Generation(self.tokenizer.encode("2"), [-0.5], "2", "stop", [(0, self.policy_version_id)])


class Run:
    """A run whose trainer is the test."""

    def __init__(self, buffer: rftdata.Buffer, folder: Path) -> None:
        self.buffer = buffer
        self.folder = folder
        self.run = buffer.create_run(name="explored", config={}, seed=7, steps=4, pipeline_version="p1")
        self.run_id: int = self.run.run_id
        for taskset in ("train", "validation"):
            buffer.sql(
                "INSERT INTO rft.task (taskset, task_key, payload)"
                """ SELECT %s, n::text, '{"prompt": "1+1=", "answer": "2"}' FROM generate_series(1, 8) AS n""",
                [taskset],
            )

    def publish(self, attempt: Attempt, step: int, name: str, *, exists: bool = True) -> int:
        if exists:
            (self.folder / name).write_text(name)
        return attempt.publish(step, method="memory", uri=str(self.folder / name), num_bytes=1, checksum=name)

    def ask(self, attempt: Attempt, version: int, name: str, *decodings: str, step: int = 0) -> None:
        plan_evaluations(
            attempt,
            policy_version_id=version,
            trainer_step=step,
            purpose="validation",
            tasksets=["validation"],
            decodings=decodings or ["greedy"],
            uri=str(self.folder / name),
            checksum=name,
        )

    def explore(
        self,
        engine: Engine,
        until: Callable[[], bool],
        changes: dict[str, Any] | None = None,
        missing_weights_s: float = 10.0,
        **explorer: Any,
    ) -> None:
        """Run an explorer until something holds, then ask it to stop; `changes`: of other sections of the configuration."""
        section = {"reward": "exact_match", "engine_args": {"max_num_seqs": 1}, **explorer}
        config = parse_config({**CONFIG, "explorer": section, **(changes or {})}, self.folder, "test")

        async def explore() -> None:
            joined = JoinedRun(self.buffer, self.run, ResolvedRun(config))
            explorer = asyncio.create_task(
                Explorer(joined, worker, engine, missing_weights_s=missing_weights_s).explore()
            )
            deadline = time.monotonic() + PATIENCE_S
            while not until() and not explorer.done():
                assert time.monotonic() < deadline, self.evaluations()
                await asyncio.sleep(0.05)
            self.buffer.sql("UPDATE rft.run SET stop_requested = true WHERE run_id = %s", [self.run_id])
            await asyncio.wait_for(explorer, PATIENCE_S)

        with Worker(self.run, "explorer") as worker:
            asyncio.run(explore())

    def evaluations(self) -> list[dict[str, Any]]:
        return self.rows(
            "SELECT status::text AS status, mean_reward, error FROM rft.evaluation WHERE run_id = %s ORDER BY evaluation_id"
        )

    def all_answered(self) -> bool:
        return all(row["status"] == "done" for row in self.evaluations())

    def all_ended(self) -> bool:
        return all(row["status"] in ("done", "failed") for row in self.evaluations())

    def rows(self, query: str) -> list[dict[str, Any]]:
        return self.buffer.sql(query, [self.run_id]).to_pylist()


@pytest.fixture
def run(buffer: rftdata.Buffer, tmp_path: Path) -> Run:
    return Run(buffer, tmp_path)


@pytest.fixture
def attempt(run: Run) -> Iterator[Attempt]:
    with run.buffer.attempt(run.run) as attempt:
        yield attempt


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


def test_waiting_for_the_engine_does_not_count_as_time_of_an_answer(run: Run, attempt: Attempt) -> None:
    run.ask(attempt, run.publish(attempt, 0, "a"), "a")
    # Eight questions of 0.7 s, one after the other: 5.6 s in all, and each at most twice its own.
    run.explore(OneAtATime(seconds=0.7), until=run.all_answered, rollout_timeout_s=4.5)
    assert run.evaluations() == [{"status": "done", "mean_reward": 1.0, "error": None}]


def test_an_evaluation_whose_answers_all_took_too_long_has_no_score(run: Run, attempt: Attempt) -> None:
    run.ask(attempt, run.publish(attempt, 0, "a"), "a")
    run.explore(OneAtATime(seconds=3600), until=run.all_ended, rollout_timeout_s=0.1)
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
            assert run.evaluations()[0]["status"] == "planned" and engine.loaded == ["new"]
            engine.answers_sampled = True
        return bool(asked) and run.all_answered() and engine.loaded[-1] == "new"

    run.explore(engine, until=goes_on)
    assert engine.loaded == ["new", "old", "new"]


def test_an_explorer_to_which_an_evaluation_brought_the_newest_weights_explores_with_them(
    run: Run, attempt: Attempt
) -> None:
    """They were published, and the evaluation asked for, while it answered another."""
    run.ask(attempt, run.publish(attempt, 0, "a"), "a")
    engine = Gated()
    published: list[int] = []

    def goes_on() -> bool:
        if engine.asked and not published:
            published.append(run.publish(attempt, 1, "b"))
            run.ask(attempt, published[0], "b", step=1)
            engine.is_open = True
        newest = (
            "SELECT count(*) AS n FROM rft.rollout_group WHERE run_id = %s AND explore_step = 1 AND status <> 'planned'"
        )
        return bool(published) and run.all_answered() and run.rows(newest) != [{"n": 0}]

    run.explore(engine, until=goes_on, changes={"sync": {"offset": 0}})
    assert engine.loaded == ["a", "b"]


def test_weights_that_are_published_again_are_not_loaded_again(run: Run, attempt: Attempt) -> None:
    run.publish(attempt, 0, "a")
    versions = [0]
    engine = OneAtATime()

    def renamed() -> bool:
        if engine.loaded and len(versions) == 1:
            versions.append(run.publish(attempt, 1, "a"))
        return engine.policy_version_id == versions[-1] > 0

    run.explore(engine, until=renamed)
    assert engine.loaded == ["a"]


def test_weights_of_a_live_trainer_that_never_appear_end_the_explorer_and_name_the_method(run: Run) -> None:
    with run.buffer.attempt(run.run, lease_s=1.5) as attempt:
        run.publish(attempt, 0, "elsewhere", exists=False)
        with pytest.raises(ModelError, match=r"sync\.method 'memory'") as caught:
            run.explore(OneAtATime(), until=lambda: False, missing_weights_s=0.5)
    assert socket.gethostname() in str(caught.value)


class Looks(OneAtATime):
    num_looks = 0

    def load_weights(self, uri: str, policy_version_id: int, checksum: str | None = None) -> float:
        self.num_looks += 1
        return super().load_weights(uri, policy_version_id, checksum)


def test_weights_that_a_trainer_removed_on_leaving_are_waited_for(run: Run) -> None:
    """Those of a live trainer would be an error at the second look, since they may be missing for no time at all."""
    with run.buffer.attempt(run.run) as attempt:
        run.publish(attempt, 0, "gone", exists=False)
    run.explore(engine := Looks(), until=lambda: engine.num_looks >= 3, missing_weights_s=0.0)


def test_weights_lost_with_a_killed_trainer_are_waited_for_while_its_lease_is_valid(run: Run) -> None:
    # A lease that is not renewed during the test, as that of a killed process is not.
    with run.buffer.attempt(run.run, lease_s=1e6) as attempt:
        run.publish(attempt, 0, "gone", exists=False)
        run.explore(engine := Looks(), until=lambda: engine.num_looks >= 3, missing_weights_s=0.0)


BAD_REWARD = "def score(turn, task):\n    return grade(turn)\n\ndef grade(turn):\n    return float(turn.answr == '2')\n"


def outcomes(run: Run) -> dict[str, int]:
    rows = run.rows(
        "SELECT o.outcome::text AS outcome, count(*) AS n FROM rft.rollout o JOIN rft.rollout_group g USING (group_id)"
        " WHERE run_id = %s GROUP BY 1"
    )
    return {row["outcome"]: row["n"] for row in rows}


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
                    "not one of which all answers failed"
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
