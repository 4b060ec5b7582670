"""Work that began before a purge and ends after it brings nothing back of what was purged.

Each path on which text is stored is met at three moments: the purge has committed when the work ends, the purge is about to commit, and the work
is about to commit when the purge wants its rows. Afterwards no table holds the secret.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import psycopg
import pyarrow as pa
import pytest

from rftdata import Buffer, Group, Rollout
from rftdata.annotations import Annotation, LabelKind, annotate, define_kinds
from rftdata.annotations.comments import add_comment
from rftdata.annotations.kinds import LabelTarget
from rftdata.attempts.evaluations import (
    Answer,
    claim_evaluation,
    fail_evaluation,
    finish_evaluation,
    plan_evaluations,
)
from rftdata.errors import FencedError, PurgedError, QueryError
from rftdata.experience import AbandonedTry
from rftdata.maintenance import purge
from rftdata.pipeline.queue import read_groups
from rftdata.pipeline.records import CreatedTask, Question, Review, StageRun, Verdicts, dropped
from rftdata.pipeline.scores import StageScores
from rftdata.pipeline.task_verdicts import TaskChange, commit_task_verdicts
from rftdata.pipeline.verdicts import add_features, commit_verdicts
from rftdata.pipeline.versions import commit_replay
from rftdata.planning.partial import Part, PartialAnswer, keep
from rftdata.tasks.embeddings import store_vectors
from rftdata.workers.live_workers import end_worker
from rftdata.workers.worker import Worker
from tests.support.secret_rows import SECRET
from tests.support.store_roles import Roles, own_group, tokens
from tests.support.waiting import wait_until

BLOCKED = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


class Story:
    """A run with two tasks, the first with the secret: a sealed group of each, and the next groups planned; a taskset of two questions, likewise."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.roles = roles = Roles(buffer, num_tasks=2, batch_groups=2, steps=4)
        payload = f'{{"prompt": "{SECRET}", "answer": "{SECRET}"}}'
        buffer.sql("UPDATE rft.task SET payload = %s WHERE task_key = '1'", [payload])
        self.attempt = roles.attempt()
        roles.plan()
        claimed = roles.claim()
        texts = {"prompt": SECRET, "response": SECRET}
        secret = [Rollout(i, "ok", float(i), [tokens(float(i), roles.version, **texts)]) for i in range(2)]
        roles.insert(Group(secret, claimed[0].group_id, claimed[0].claim_token), roles.result(claimed[1], [0.0, 1.0]))
        roles.publish(self.attempt, 1)
        roles.plan()
        self.tasks = buffer.sql("SELECT task_id FROM rft.task ORDER BY 1")["task_id"].to_pylist()

    def purge(self) -> purge.PurgeResult:
        return purge.purge(
            self.buffer, "task_key = '1'", reason="asked to", author="ada", tasks_too=True, runs=["roles"]
        )

    def leaks(self) -> list[str]:
        """Tables with rows that hold the secret."""
        tables = self.buffer.sql(
            "SELECT relname::text AS t FROM pg_class WHERE relnamespace = 'rft'::regnamespace AND relkind = 'r'"
        )["t"].to_pylist()
        count = "SELECT count(*) AS n FROM rft.{} x WHERE x::text LIKE '%Mallory%'"
        return [table for table in tables if self.buffer.sql(count.format(table))["n"].to_pylist() != [0]]

    def verdicts(self, table: pa.Table) -> Verdicts:
        """What stages may say about rows of tasks or experiences."""
        ids = table["experience_id"]
        first = ids[0].as_py()
        scores = pa.table({"experience_id": ids, "said": [SECRET] * len(ids), "wrong": [SECRET] * len(ids)})
        stage = StageRun("judge", 1, len(ids), len(ids), 0, 0.1, error=SECRET)
        task = CreatedTask("made", "made of it", {"prompt": SECRET}, first)
        found = StageScores("judge", "key", scores, pa.nulls(len(ids), pa.int64()), "wrong")
        return Verdicts(dropped(table, "judge", SECRET), [stage], [found], created=[task])


Finish = Callable[[], object]


def of_a_pipeline(story: Story) -> Finish:
    batch = story.roles.claim_sealed()
    assert batch is not None and len(batch.group_ids) == 2
    secret = batch.table.filter(pa.compute.equal(batch.table["group_id"], batch.group_ids[0]))
    verdicts = story.verdicts(secret)
    row = secret.to_pylist()[0]
    asked = Question(row["experience_id"], row["group_id"], "ask", Review("q", SECRET, 60.0, "pass"))
    verdicts.questions.append(asked)
    return lambda: commit_verdicts(story.roles.run, story.roles.worker_id, "p1", batch, verdicts)


def of_a_replay(story: Story) -> Finish:
    batch = read_groups(story.buffer.database, [1, 2])
    verdicts = story.verdicts(batch.table.filter(pa.compute.equal(batch.table["group_id"], 1)))
    verdicts.created.clear()
    return lambda: commit_replay(story.roles.run, story.roles.worker_id, "other", batch, verdicts)


def of_a_stage_that_creates(story: Story) -> Finish:
    made = Group(
        [Rollout(0, "ok", 1.0, [tokens(prompt=SECRET, response=SECRET, parent_id=1)])],
        source="synthesis",
        taskset="made",
        task_key="new",
        payload={"prompt": SECRET},
    )
    return lambda: refused(lambda: story.roles.insert(made))


def of_a_person_who_answers(story: Story) -> Finish:
    made = own_group()
    made.taskset, made.task_key = "set0", "1"
    made.rollouts[0].sequences[0].response = SECRET
    return lambda: refused(lambda: story.roles.insert(made))


def of_an_explorer(story: Story) -> Finish:
    (claimed,) = [group for group in story.roles.claim() if group.task_key == "1"]
    rollouts = [
        Rollout(0, "ok", 1.0, [tokens(prompt=SECRET, response=SECRET)]),
        Rollout(1, "failed", None, [], error=SECRET),
    ]
    late = Group(rollouts, claimed.group_id, claimed.claim_token)
    return lambda: refused(lambda: story.roles.insert(late))


def of_an_explorer_that_keeps_tokens(story: Story) -> Finish:
    (claimed,) = [group for group in story.roles.claim() if group.task_key == "1"]
    answer = PartialAnswer(
        rollout_index=0,
        generation_index=0,
        input_digest=b"d",
        token_ids=[7],
        logprobs=[0.0],
        version_spans=[(0, 1)],
        finish_reason=None,
    )
    part = Part(group_id=claimed.group_id, claim_token=claimed.claim_token, first_token=0, answer=answer)
    return lambda: keep(story.roles.run, [part])


def of_a_task_pipeline(story: Story) -> Finish:
    ids = pa.array(story.tasks[:1], pa.int64())
    verdicts = story.verdicts(pa.table({"experience_id": ids, "group_id": ids}))
    changes = {story.tasks[0]: TaskChange({"topic": SECRET}, {"prompt": SECRET})}
    return lambda: commit_task_verdicts(story.buffer.database, "set0", "v", verdicts, changes)


def of_an_encoder(story: Story) -> Finish:
    vectors = np.ones((2, 3), np.float32)
    return lambda: store_vectors(story.buffer.database, "m", story.tasks, [SECRET, "other"], vectors)


def of_features_of_a_created_task(story: Story) -> Finish:
    created = CreatedTask("set0", "2", {}, 1, {"topic": SECRET})
    return lambda: add_features(story.buffer.database, created)


def evaluation(story: Story) -> int:
    plan_evaluations(
        story.attempt,
        policy_version_id=story.roles.version or 0,
        trainer_step=1,
        purpose="validation",
        tasksets=["set0"],
        decodings=["greedy"],
        uri="/w",
        checksum="0",
    )
    claimed = claim_evaluation(story.roles.run, story.roles.worker_id, lease_s=600)
    assert claimed is not None
    return claimed.evaluation_id


def of_an_evaluation(story: Story) -> Finish:
    key = evaluation(story)
    answers = [
        Answer(
            task_id=story.tasks[0], reward=0.0, response=SECRET, num_response_tokens=3, finish_reason="stop", error=SECRET,
            outcome="failed", chats=[{"messages": [{"role": "assistant", "content": SECRET}], "turns": []}],
        ),
        Answer(task_id=story.tasks[1], reward=1.0, response="2", num_response_tokens=1, finish_reason="stop"),
    ]  # fmt: skip
    return lambda: finish_evaluation(story.roles.run, key, story.roles.worker_id, answers, 1.0)


def of_an_evaluation_that_fails(story: Story) -> Finish:
    key = evaluation(story)
    return lambda: fail_evaluation(story.roles.run, key, story.roles.worker_id, f"the first: {SECRET}")


def of_a_worker_that_fails(story: Story) -> Finish:
    worker = Worker(story.roles.run, "explorer")
    return lambda: worker.stop(f"ValueError: {SECRET}")


def of_a_worker_that_waits(story: Story) -> Finish:
    worker = Worker(story.roles.run, "explorer")

    def waits_and_is_killed() -> None:
        worker.set_state("pauses", f"what its rollouts need: all failed, the last with ValueError: {SECRET}")
        worker._stopped.set()  # no further heartbeat
        row = story.buffer.sql("SELECT waiting_for FROM rft.worker WHERE worker_id = %s", [worker.worker_id])
        assert str(row["waiting_for"][0]).startswith("what its rollouts need")

    return waits_and_is_killed


def of_a_supervisor_that_sees_a_crash(story: Story) -> Finish:
    run = story.roles.run
    return lambda: end_worker(run, "here", 1, f"ValueError: {SECRET}", pid_space="", crashed=True)


def of_a_run_that_fails(story: Story) -> Finish:
    return lambda: story.roles.run.end("failed", f"not one succeeded: {SECRET}")


# The first of them meets the purge, the others come after it.
TARGETS: list[tuple[LabelTarget, int]] = [("rollout", 1), ("experience", 1), ("group", 1), ("task", 1)]


def of_people_who_comment(story: Story) -> Finish:
    def write() -> None:
        for target, target_id in TARGETS:
            refused(partial(add_comment, story.buffer, target, target_id, SECRET, author="ada"))

    return write


def of_people_who_annotate(story: Story) -> Finish:
    kinds = [LabelKind(f"about_{target}", "text", target=target) for target, _ in TARGETS]
    define_kinds(story.buffer, kinds, author="ada")

    def write() -> None:
        for target, target_id in TARGETS:
            refused(partial(annotate, story.buffer, [Annotation(f"about_{target}", target_id, SECRET)], author="ada"))

    return write


def refused(write: Callable[[], object]) -> None:
    """A write may come before the purge, or be refused because of it."""
    with contextlib.suppress(FencedError, PurgedError):
        write()


# The table that a path writes last, at which it can be stopped before it commits.
PATHS: dict[Callable[[Story], Finish], str] = {
    of_a_pipeline: "operator_run",
    of_a_replay: "operator_run",
    of_a_stage_that_creates: "segment",
    of_a_person_who_answers: "segment",
    of_an_explorer: "segment",
    of_an_explorer_that_keeps_tokens: "partial_tokens",
    of_a_task_pipeline: "task_score",
    of_an_encoder: "task_embedding",
    of_features_of_a_created_task: "task",
    of_an_evaluation: "evaluation_answer",
    of_an_evaluation_that_fails: "evaluation",
    of_a_worker_that_fails: "worker",
    of_a_worker_that_waits: "worker",
    of_a_supervisor_that_sees_a_crash: "worker",
    of_a_run_that_fails: "run",
    of_people_who_comment: "archive",
    of_people_who_annotate: "question",
}


@pytest.fixture
def story(buffer: Buffer) -> Story:
    return Story(buffer)


@pytest.fixture(params=PATHS, ids=lambda path: path.__name__)
def path(request: pytest.FixtureRequest) -> Callable[[Story], Finish]:
    found: Callable[[Story], Finish] = request.param
    return found


def check(story: Story, but: Sequence[str] = ()) -> None:
    assert set(story.leaks()) == set(but)
    rows = story.buffer.sql(
        "SELECT (SELECT count(*) FROM rft.partial_tokens) AS tokens,"
        " (SELECT count(*) FROM rft.task_embedding e JOIN rft.task USING (task_id) WHERE task_key = '1') AS vectors,"
        " (SELECT count(*) FROM rft.rollout_group g JOIN rft.task USING (task_id)"
        "  WHERE task_key = '1' AND g.status <> 'abandoned') AS groups"
    ).to_pylist()
    assert rows == [{"tokens": 0, "vectors": 0, "groups": 0}]


def test_work_that_ends_after_a_purge_stores_nothing_of_it(story: Story, path: Callable[[Story], Finish]) -> None:
    finish = path(story)
    story.purge()
    finish()
    check(story)


def test_work_that_ends_while_a_purge_commits_waits_for_it(story: Story, path: Callable[[Story], Finish]) -> None:
    finish = path(story)
    with ThreadPoolExecutor(1) as threads, psycopg.connect(story.buffer.config.uri) as other:
        other.execute(
            "INSERT INTO rft.purge (kind, selection, reason, author, tasks_too) VALUES ('request', 'x', 'y', 'z', true)"
        )
        other.execute("SELECT rft.purge_texts('{1, 2}', 1, true)")
        done = threads.submit(finish)
        wait_until(lambda: done.done() or story.buffer.sql(BLOCKED).num_rows, "the work ends, or waits")
        other.commit()
        done.result()
    check(story)


def test_work_that_commits_while_a_purge_waits_is_purged_too(story: Story, path: Callable[[Story], Finish]) -> None:
    finish = path(story)

    def num_blocked() -> int:
        return story.buffer.sql(BLOCKED).num_rows

    with ThreadPoolExecutor(2) as threads, psycopg.connect(story.buffer.config.uri) as gate:
        gate.execute(f"LOCK TABLE rft.{PATHS[path]} IN ACCESS EXCLUSIVE MODE")  # type: ignore[arg-type]
        work = threads.submit(finish)
        wait_until(lambda: work.done() or num_blocked(), "the work is about to commit")
        assert not work.done(), work.result()
        purged = threads.submit(story.purge)
        wait_until(lambda: purged.done() or num_blocked() > 1, "the purge waits")
        gate.commit()
        work.result()
        done = purged.result()
    assert done.num_experiences >= 2
    # What was made before a purge is not part of it: the purge reports it.
    made = ["task"] if done.made_tasks else []
    made = ["experience", "group_prompt", "task"] if done.made_experiences else made
    check(story, but=made)


def test_numbers_of_an_evaluation_survive(story: Story) -> None:
    finish = of_an_evaluation(story)
    story.purge()
    finish()
    rows = story.buffer.sql("SELECT num_tasks, mean_reward, error FROM rft.evaluation").to_pylist()
    assert rows == [{"num_tasks": 2, "mean_reward": 0.5, "error": "1 of 2 answers failed and count 0"}]
    answers = story.buffer.sql("SELECT reward, response, error FROM rft.evaluation_answer ORDER BY task_id").to_pylist()
    assert answers == [
        {"reward": 0.0, "response": "[purged]", "error": "[purged]"},
        {"reward": 1.0, "response": "2", "error": None},
    ]


def test_what_is_refused_is_counted_and_the_other_groups_are_decided(story: Story) -> None:
    batch = story.roles.claim_sealed()
    assert batch is not None
    story.purge()
    done = commit_verdicts(
        story.roles.run, story.roles.worker_id, "p1", batch, Verdicts(dropped(batch.table, "gate", "not wanted"))
    )
    assert (done.decided, done.num_purged) == ([2], 1)


def test_a_task_purged_while_it_is_planned_is_never_sampled(story: Story) -> None:
    planner = story.roles.planner
    chosen = story.buffer.database.fetch("active_task_ids", taskset="set0")
    story.purge()
    with story.buffer.database.transaction() as connection:
        connection.execute("UPDATE rft.task SET status = 'active'")  # as the planner read it before
    story.roles.publish(story.attempt, 2)
    assert planner.plan() and len(chosen[0]["task_ids"]) == 2
    assert {group.task_key for group in story.roles.claim()} == {"2"}
    why = "SELECT DISTINCT closed_reason FROM rft.rollout_group JOIN rft.task USING (task_id) WHERE task_key = '1' ORDER BY 1"
    assert story.buffer.sql(why)["closed_reason"].to_pylist() == ["purged: asked to", "purged: the task"]


def test_errors_of_rollouts_without_an_answer_are_purged_with_their_group_or_task(story: Story) -> None:
    roles = story.roles
    claimed = roles.claim()
    (secret,) = [group for group in claimed if group.task_key == "1"]
    failed = [Rollout(i, "failed", None, [], error=SECRET) for i in range(2)]
    roles.insert(Group(failed, secret.group_id, secret.claim_token))
    roles.insert(own_group(task_key="other"))
    half = own_group(task_key="half")
    tried = AbandonedTry(SECRET, [{"messages": [{"role": "assistant", "content": SECRET}], "turns": []}])
    half.rollouts[1] = Rollout(1, "failed", None, [], error=SECRET, tries=[tried, tried])
    half.rollouts[0].tries = [tried]
    roles.insert(half)
    purge.purge(story.buffer, "task_key = 'half'", reason="asked to", author="ada")
    assert story.buffer.sql("SELECT DISTINCT error FROM rft.rollout WHERE error IS NOT NULL ORDER BY 1")[
        "error"
    ].to_pylist() == ["[purged]", SECRET]
    tries = story.buffer.sql("SELECT error, chats::text AS chats FROM rft.v_rollout_try").to_pylist()
    assert tries == [{"error": "[purged]", "chats": "[]"}] * 2
    story.purge()
    check(story)


def test_tasks_without_an_experience_are_purged(story: Story) -> None:
    buffer = story.buffer
    for key, prompt in (("a", SECRET), ("b", "b")):
        payload = f'{{"prompt": "{prompt}"}}'
        buffer.sql("INSERT INTO rft.task (taskset, task_key, payload) VALUES ('held_out', %s, %s)", [key, payload])

    def purged(where: str, **options: object) -> purge.PurgeResult:
        return purge.purge(buffer, where, reason="x", author="ada", **options)  # type: ignore[arg-type]

    for where, tasks_too in (("task_key = 'a'", False), ("task_key = 'a' AND reward < 2", True)):
        with pytest.raises(QueryError, match="no experience meets"):
            purged(where, tasks_too=tasks_too)
    assert purged("task_key = 'a'", tasks_too=True, dry_run=True).num_unanswered_tasks == 1
    done = purged("v_experience.prompt LIKE '%Mal%lory%'", tasks_too=True)
    assert (done.num_unanswered_tasks, done.num_experiences) == (1, 2)
    rows = buffer.sql(
        "SELECT task_key, payload::text AS p, status::text AS s FROM rft.task WHERE taskset = 'held_out' ORDER BY 1"
    )
    assert rows["p"].to_pylist() == ['{"purged": true}', '{"prompt": "b"}']
    check(story)


def test_tasks_can_be_purged_after_their_experiences(story: Story) -> None:
    purge.purge(story.buffer, "task_key = '1'", reason="asked to", author="ada")
    assert "task" in story.leaks()
    assert story.purge().num_experiences == 0
    check(story)


def test_what_is_said_of_a_group_without_answers_goes_with_its_task_and_a_judge_may_quote_another_answer(
    story: Story,
) -> None:
    buffer = story.buffer
    (claimed,) = [group for group in story.roles.claim() if group.task_key == "1"]
    failed = [Rollout(i, "failed", None, [], error=SECRET) for i in range(2)]
    story.roles.insert(Group(failed, claimed.group_id, claimed.claim_token))
    purge.purge(buffer, "experience_id = 1", reason="asked to", author="ada", runs=["roles"])
    define_kinds(buffer, [LabelKind("fine", "bool")], author="ada")
    annotate(buffer, [Annotation("fine", 2, True)], author="ada")
    with pytest.raises(PurgedError, match="or another answer of its group"):
        annotate(buffer, [Annotation("fine", 2, True, reason=SECRET)], author="judge", source="judge")
    story.purge()
    for target in ("rollout", "group"):
        (found,) = buffer.sql(f"SELECT max({target}_id) AS id FROM rft.rollout WHERE group_id = {claimed.group_id}")[
            "id"
        ].to_pylist()
        with pytest.raises(PurgedError, match=f"{target} {found} was purged"):
            add_comment(buffer, target, found, SECRET, author="ada")  # type: ignore[arg-type]
