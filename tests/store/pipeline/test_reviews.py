"""Answers of people: until the deadline they count like labels whenever they arrive, and answering sessions do not block each other."""

from __future__ import annotations

import threading
from collections.abc import Callable

import psycopg
import pyarrow as pa
import pytest

from operators.chain.build import build_chain
from rftcore.pipeline import preview
from rftcore.pipeline.group_decisions import decide_groups
from rftdata import Buffer, Group, RftError, Rollout, labels
from rftdata.maintenance.purge import purge
from rftdata.pipeline.queue import claim_sealed_groups, read_groups
from rftdata.pipeline.records import CreatedTask, Question, Review, StageRun, Verdicts, concatenated, dropped, kept
from rftdata.pipeline.scores import EXPERIENCE_SCORES, StageScores
from rftdata.pipeline.verdicts import ask, commit_verdicts, insert_stage_runs, insert_verdicts
from rftdata.postgres.database import queries
from tests.store.pipeline.test_pipeline_worker import opened_again, rows, run_pipeline
from tests.support.store_roles import Roles, two_sealed_groups
from tests.support.waiting import PATIENCE_S, wait_until

ASKS = [{"human_review": {"timeout": "1 h", "otherwise": "pass"}}]
GONE_S = "3601 s"


@pytest.fixture
def roles(buffer: Buffer) -> Roles:
    return two_sealed_groups(buffer)


@pytest.fixture
def asked(roles: Roles) -> Roles:
    """All four are asked about."""
    assert run_pipeline(roles, build_chain(ASKS)) == []
    return roles


def answer(buffer: Buffer, value: str, where: str = "true") -> None:
    buffer.sql(f"UPDATE rft.review SET answer = '{value}' WHERE {where}")


def later(buffer: Buffer, shift: str) -> Buffer:
    """The buffer at a later time."""
    name = rows(buffer, "SELECT current_database() AS name")[0]["name"]
    buffer.sql(f"""ALTER DATABASE "{name}" SET rft.clock_shift = '{shift}'""")
    return opened_again(buffer)


def test_an_answer_changed_after_a_draw_counts_when_the_group_can_be_drawn_again(buffer: Buffer, asked: Roles) -> None:
    chain = build_chain(ASKS)
    answer(buffer, "pass")
    assert run_pipeline(asked, chain) == [1, 2]
    with asked.attempt() as attempt:
        assert asked.train(attempt, 1, publish=False) == [1, 2]
        answer(buffer, "drop", "experience_id IN (1, 2)")
        assert run_pipeline(asked, chain) == []  # it is drawn, and stays so while the step stands
    with asked.attempt():  # back to the beginning: there is no checkpoint
        assert run_pipeline(asked, chain) == [1]
    kept = rows(
        buffer, "SELECT DISTINCT ON (experience_id) kept FROM rft.verdict ORDER BY experience_id, verdict_id DESC"
    )
    assert [row["kept"] for row in kept] == [False, False, True, True]
    with asked.attempt():
        assert run_pipeline(asked, chain) == []  # what is decided since the answer is decided


def to_replay(roles: Roles, version: str) -> list[int]:
    found = roles.database.fetch("groups_to_replay", run_id=roles.run_id, version=version, after=0, count=9)
    return [row["group_id"] for row in found]


def test_a_replay_decides_again_on_rows_answered_since(buffer: Buffer, asked: Roles) -> None:
    def replay() -> list[int]:
        group_ids = to_replay(asked, "strict")
        batch = read_groups(buffer.database, group_ids)
        with buffer.database.transaction() as connection:
            insert_verdicts(
                connection,
                "strict",
                batch.label_cuts,
                decide_groups(build_chain([{"drop_truncated": {}}]), batch).decisions,
            )
        return group_ids

    assert replay() == [1, 2] and replay() == []
    answer(buffer, "drop", "experience_id = 3")
    assert replay() == [2] and replay() == []
    answer(buffer, "pass", "experience_id = 3")  # changed
    assert replay() == [2] and replay() == []


def test_groups_without_experiences_are_neither_replayed_nor_shown(buffer: Buffer) -> None:
    roles = Roles(buffer, batch_groups=4)
    with roles.attempt():
        roles.plan()
        *failing, last = roles.claim()
        failed = [
            Group([Rollout(i, "failed", None, [], error="x") for i in range(g.group_size)], g.group_id, g.claim_token)
            for g in failing
        ]
        roles.insert(*failed)
        roles.insert(roles.result(last, [0.0, 1.0]))
    assert to_replay(roles, "any") == [last.group_id]
    chain = build_chain([{"drop_truncated": {}}])
    for seed in range(8):
        assert preview.read_sample(roles.run, chain, 1, seed).group_ids == [last.group_id]


def test_a_fork_knows_what_people_answered_and_stages_found_out(buffer: Buffer, asked: Roles) -> None:
    with buffer.database.transaction() as connection:
        table = pa.table({"experience_id": [1, 2], "judge": [0.5, None], "why": [None, "away"]})
        EXPERIENCE_SCORES.store(connection, [StageScores("judge", "key", table, pa.nulls(2, pa.int64()), "why")])
    answer(buffer, "drop", "experience_id = 1")
    answer(buffer, "pass", "experience_id = 2")
    labels.set_rewards(buffer, {3: 0.25}, author="ada")
    new = buffer.fork(asked.run, name="fork", step=0, keep_rollouts=True, config={}, steps=4, pipeline_version="p1")
    batch = claim_sealed_groups(new, asked.worker_id, count=9, lease_s=60)
    assert batch is not None
    stands = {row["parent_id"]: (row["reviews"], row["labelled"]) for row in batch.table.to_pylist()}
    assert stands == {
        1: ('{"review": "drop"}', False),
        2: ('{"review": "pass"}', False),
        3: ('{"review": "pass"}', True),
        4: (None, False),
    }
    assert len(decide_groups(build_chain(ASKS), batch).questions) == 1  # only the unanswered one
    copied = rows(
        buffer,
        "SELECT e.parent_id, s.scores::text AS scores, s.error FROM rft.score s JOIN rft.experience e USING (experience_id)"
        " WHERE e.parent_id IS NOT NULL ORDER BY 1",
    )
    assert [tuple(row.values()) for row in copied] == [
        (1, '{"why": null, "judge": 0.5}', None),
        (2, '{"why": "away", "judge": null}', "away"),
    ]


def test_an_answer_after_the_deadline_changes_nothing(buffer: Buffer, asked: Roles) -> None:
    answer(buffer, "drop", "experience_id = 1")
    with later(buffer, GONE_S) as then:
        answer(then, "drop", "experience_id = 2")
        states = rows(then, "SELECT state FROM rft.v_review ORDER BY experience_id")
        assert [row["state"] for row in states] == ["drop", "pass", "pass", "pass"]
        with pytest.raises(Exception, match="was answered in time, and its deadline has passed: the answer is final"):
            answer(then, "pass", "experience_id = 1")
        told = then.database.fetch("pipeline_of_experience", experience_id=2)
        assert [(row["what"], row["detail"]) for row in told if row["what"] != "asked"] == [
            ("pass", "no answer in time")
        ]


def test_a_reward_corrected_after_the_deadline_brings_back_no_row_that_was_dropped(
    buffer: Buffer, asked: Roles
) -> None:
    answer(buffer, "drop", "experience_id = 1")
    with later(buffer, GONE_S) as then:
        with pytest.raises(Exception, match="a corrected reward does not bring it back"):
            answer(then, "pass", "experience_id = 1")
        labels.set_rewards(then, {1: 0.75}, author="ada")
        batch = claim_sealed_groups(then.find_run(asked.run_id), asked.worker_id, count=9, lease_s=60)
        assert batch is not None
        decided = {
            row["experience_id"]: (row["kept"], row["reason"])
            for row in decide_groups(build_chain(ASKS), batch).decisions.to_pylist()
        }
        assert decided == {1: (False, "review 'review': drop"), 2: (True, None)}
        assert dict(zip(*(batch.table[name].to_pylist() for name in ("experience_id", "reward"))))[1] == 0.75


def test_no_question_waits_longer_than_ten_years_and_a_question_that_was_asked_stays_unchanged(
    buffer: Buffer, roles: Roles
) -> None:
    with buffer.database.transaction() as connection:
        for timeout in (float("inf"), 1e18):
            ask(connection, roles.run_id, [Question(1, 1, "asks", Review(f"in {timeout}", "Well?", timeout, "pass"))])
    years = rows(
        buffer,
        "SELECT DISTINCT extract(epoch FROM deadline - asked_at) > 315359990 AS long, otherwise::text FROM rft.review",
    )
    assert years == [{"long": True, "otherwise": "pass"}]
    with buffer.database.transaction() as connection:
        ask(connection, roles.run_id, [Question(1, 1, "asks", Review("in inf", "Well?", 1.0, "drop"))])
    assert rows(buffer, "SELECT DISTINCT otherwise::text FROM rft.review") == [{"otherwise": "pass"}]


def test_only_groups_that_still_wait_are_asked_about(buffer: Buffer, asked: Roles) -> None:
    purge(buffer, "experience_id = 1", reason="asked to", author="ada")
    assert [row["experience_id"] for row in labels.review_queue(buffer, None, 10)] == [3, 4]
    assert labels.num_open_reviews(buffer, asked.run_id) == 2
    purged = rows(buffer, "SELECT answer, author, question FROM rft.review WHERE experience_id = 1")
    assert purged == [{"answer": None, "author": None, "question": "[purged]"}]
    buffer.rewind(asked.run, 0)
    assert labels.review_queue(buffer, None, 10) == []
    assert labels.num_open_reviews(buffer, asked.run_id) == 0


def meanwhile(buffer: Buffer, work: Callable[[], object], num_waiting: int = 1) -> Callable[[], str]:
    """Begin something, until so many sessions wait for locks of others, or it has ended; what it returns says how it ended."""
    ended: list[str] = []

    def run() -> None:
        try:
            work()
            ended.append("done")
        except (psycopg.Error, RftError) as error:
            ended.append(repr(error))

    waiting = (
        "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: ended or rows(buffer, waiting)[0]["n"] >= num_waiting, "it waits or has ended", pause_s=0.01)

    def end() -> str:
        thread.join(PATIENCE_S)
        return ended[0]

    return end


def test_an_answer_and_labels_of_one_group_do_not_deadlock(buffer: Buffer, asked: Roles) -> None:
    with psycopg.connect(buffer.database.uri) as person:
        person.execute("UPDATE rft.experience SET reward = 0.3 WHERE experience_id = 2")
        end = meanwhile(buffer, lambda: answer(buffer, "drop", "experience_id = 1"))
        person.execute("UPDATE rft.experience SET reward = 0.3 WHERE experience_id = 1")
        person.commit()
    assert end() == "done"
    answers = rows(buffer, "SELECT answer::text AS answer FROM rft.review ORDER BY experience_id")
    assert [row["answer"] for row in answers] == ["drop", "pass", None, None]


def test_the_end_of_waiting_does_not_wait_for_labels(buffer: Buffer, asked: Roles) -> None:
    with later(buffer, GONE_S) as then, psycopg.connect(then.database.uri) as person:
        person.execute(
            "UPDATE rft.experience SET reward = 0.3 WHERE experience_id = 3"
        )  # another transaction has group 2 locked
        end = meanwhile(buffer, lambda: then.database.run("end_waiting", run_id=asked.run_id))
        assert end() == "done"
        person.execute("UPDATE rft.experience SET reward = 0.3 WHERE experience_id = 1")
        person.commit()
        then.database.run("end_waiting", run_id=asked.run_id)
        asked.run = then.find_run(asked.run_id)
        assert run_pipeline(asked, build_chain(ASKS)) == [1, 2]


def test_groups_that_wait_are_found_without_reading_the_queue(buffer: Buffer, asked: Roles) -> None:
    buffer.sql(
        "INSERT INTO rft.worklist (run_id, consumer, item_kind, item_id, sort_key, available)"
        " SELECT %s, 'pipeline', 'group', 1000 + n, n, true FROM generate_series(1, 20000) n",
        [asked.run_id],
    )
    buffer.sql("ANALYZE rft.worklist")
    with buffer.database.connection() as connection:
        plan = connection.execute("EXPLAIN " + queries()["end_waiting"], {"run_id": asked.run_id}).fetchall()
    text = "\n".join(row["QUERY PLAN"] for row in plan)
    assert "worklist_waiting" in text and "Seq Scan" not in text


def test_what_text_cannot_hold_is_replaced_in_reasons_errors_and_questions(buffer: Buffer, roles: Roles) -> None:
    batch = roles.claim_sealed()
    assert batch is not None
    decisions = concatenated([dropped(batch.table.slice(0, 1), "asks", "bad: \x00"), kept(batch.table.slice(1, 1))])
    count = StageRun("asks", 0, 4, 3, 1, 0.1, error="failed at \x00")
    question = Question(3, 2, "asks", Review("check", "\ud800?", 60.0, "pass"))
    done = commit_verdicts(roles.run, roles.worker_id, "p1", batch, Verdicts(decisions, [count], questions=[question]))
    assert done.decided == [1]
    assert rows(buffer, "SELECT reason FROM rft.verdict WHERE NOT kept") == [{"reason": "bad: \ufffd"}]
    assert rows(buffer, "SELECT error FROM rft.operator_run") == [{"error": "failed at \ufffd"}]
    assert rows(buffer, "SELECT question FROM rft.review") == [{"question": "\ufffd?"}]
    assert roles.group(1)["status"] == "ready"


def test_workers_that_make_the_same_tasks_do_not_fail(buffer: Buffer, roles: Roles) -> None:
    batch = roles.claim_sealed()
    assert batch is not None
    tasks = [CreatedTask("made", key, {"prompt": key}, 1) for key in ("b", "a")]
    with psycopg.connect(buffer.database.uri) as other:
        other.execute("INSERT INTO rft.task (taskset, task_key, payload) VALUES ('made', 'a', '{}')")
        made = Verdicts(created=list(tasks))
        end = meanwhile(buffer, lambda: commit_verdicts(roles.run, roles.worker_id, "p1", batch, made))
        other.execute("SET lock_timeout = '5 s'")
        other.execute("INSERT INTO rft.task (taskset, task_key, payload) VALUES ('made', 'b', '{}')")
        other.commit()
    assert end() == "done"
    stored = rows(buffer, "SELECT task_key, payload FROM rft.task WHERE taskset = 'made' ORDER BY 1")
    assert stored == [{"task_key": "a", "payload": {}}, {"task_key": "b", "payload": {}}]


def test_verdicts_are_committed_after_a_deadlock(buffer: Buffer) -> None:
    roles = Roles(buffer, batch_groups=3)
    with roles.attempt():
        roles.plan()
        roles.explore()
    batch = roles.claim_sealed()
    assert batch is not None
    lock = "SELECT FROM rft.rollout_group WHERE group_id = %s FOR UPDATE"
    with psycopg.connect(buffer.database.uri) as other, psycopg.connect(buffer.database.uri) as gate:
        # It locks in another order and looks for a deadlock last, so the database ends the transaction with the verdicts.
        other.execute("SET deadlock_timeout = '10 min'")
        other.execute(lock, [3])
        gate.execute(lock, [2])
        end = meanwhile(buffer, lambda: roles.commit(batch))  # has the first group, and waits for the second
        ended = meanwhile(buffer, lambda: other.execute(lock, [1]), num_waiting=2)
        gate.commit()  # the verdicts wait for the third now
        assert ended() == "done"  # the verdicts had to let go
        other.commit()
    assert end() == "done"
    assert [roles.group(key)["status"] for key in (1, 2, 3)] == ["ready"] * 3


def test_a_purge_takes_the_texts_of_verdicts_and_of_stages_errors(
    buffer: Buffer, roles: Roles, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rftcore.cli import run_command

    assert roles.decide(lambda row: row["experience_id"] not in (1, 3)) == [1, 2]
    errors = [StageRun("tag", 0, 4, 4, 0, 0.1, error="cannot convert 'my secret'")]
    with buffer.database.transaction() as connection:
        insert_stage_runs(connection, "p1", errors, run_id=roles.run_id, worker_id=roles.worker_id)
    columns = buffer.sql(
        "SELECT string_agg(attname, ', ') AS names FROM pg_attribute"
        " WHERE attrelid = 'rft.experience'::regclass AND attnum > 0 AND attgenerated = '' AND NOT attisdropped"
    )["names"][0].as_py()
    buffer.sql(
        f"INSERT INTO rft.experience ({columns}) SELECT {columns} FROM (SELECT (jsonb_populate_record(NULL::rft.experience, to_jsonb(e) ||"
        " jsonb_build_object('experience_id', nextval('rft.experience_experience_id_seq'), 'parent_id', 1, 'segment_row', 77))).*"
        " FROM rft.experience e WHERE experience_id = 4) copied"
    )
    buffer.sql(
        """INSERT INTO rft.task (taskset, task_key, payload, features) VALUES ('harder', 'h1', '{}', '{"parent_experience_id": 5}')"""
    )
    task = rows(buffer, "SELECT task_id FROM rft.task WHERE taskset = 'harder'")[0]["task_id"]
    monkeypatch.setenv("RFT_BUFFER", buffer.config.uri)
    monkeypatch.setenv("RFT_SEGMENTS", str(buffer.config.segments))
    assert run_command(["purge", "--where", "experience_id = 1", "--reason", "asked to", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert f"created from them keep their texts: 5\ntasks created from them keep their texts: {task}\n" in told
    for dry_run in (True, False):
        done = purge(buffer, "experience_id = 1", reason="asked to", author="ada", dry_run=dry_run)
        assert (done.made_experiences, done.made_tasks) == ((5,), (task,))
    reasons = rows(buffer, "SELECT reason FROM rft.verdict WHERE reason IS NOT NULL ORDER BY experience_id")
    assert [row["reason"] for row in reasons] == ["[purged]", "not wanted"]
    assert rows(buffer, "SELECT DISTINCT error FROM rft.operator_run") == [{"error": "[purged]"}]
