"""The pipeline worker stores, with its verdicts, scores, questions to people, created tasks and groups, and rows on which a stage fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from operators.base import CreatedAnswer, CreatedGroup, CreatedTask, Operator, Review, StageOutcome
from operators.chain.build import build_chain
from operators.chain.chain import Chain
from rftcore.config.run import parse_config
from rftcore.pipeline.group_decisions import decide_groups, decide_groups_without_people
from rftcore.pipeline.policy_endpoint import Policy
from rftcore.pipeline.role import stage_context
from rftcore.resolved import ResolvedRun
from rftdata import Buffer, labels
from rftdata.pipeline.budget import RunUsage
from rftdata.pipeline.queue import SealedQueue, claim_sealed_groups, read_groups, release_sealed_groups
from rftdata.pipeline.records import Verdicts
from rftdata.pipeline.scores import EXPERIENCE_SCORES
from rftdata.pipeline.verdicts import commit_verdicts
from rftdata.planning.planner import Planner
from rftdata.workers.leases import release_lost_claims
from tests.support.store_roles import Roles, own_group, two_sealed_groups

calls: list[list[int]] = []


class Length(Operator):
    """Scores the length of the response, and remembers on which rows it was asked."""

    reads = frozenset({"response"})
    scores = {"length": pa.float64(), "length_error": pa.string()}  # noqa: RUF012
    error_column = "length_error"
    rowwise = True

    def apply(self, table: pa.Table) -> StageOutcome:
        calls.append(table["experience_id"].to_pylist())
        errors = [None if key % 2 else "odd ones only" for key in table["experience_id"].to_pylist()]
        lengths = [
            float(len(text)) if error is None else None for text, error in zip(table["response"].to_pylist(), errors)
        ]
        columns = {"length": pa.array(lengths, pa.float64()), "length_error": pa.array(errors, pa.string())}
        return StageOutcome.keep_all(table.num_rows, columns)


def fails_on_the_second(row: dict[str, Any]) -> bool:
    if row["experience_id"] == 2:
        raise ValueError("bad row")
    return True


class Twins(Operator):
    """Makes one new answer of every experience."""

    reads = frozenset({"response"})

    def apply(self, table: pa.Table) -> StageOutcome:
        made = [
            CreatedGroup(
                CreatedTask("twins", f"twin of {key}", {"prompt": "again", "answer": None, "metadata": {}}, key),
                key,
                [CreatedAnswer([{"role": "user", "content": "again"}], text, 1.0)],
            )
            for key, text in zip(table["experience_id"].to_pylist(), table["response"].to_pylist())
        ]
        return StageOutcome(pa.nulls(table.num_rows, pa.string()), created=made)


def run_pipeline(roles: Roles, chain: Chain, *, tries: int = 5) -> list[int]:
    """One batch through a chain; the groups decided."""
    batch = roles.claim_sealed()
    if batch is None:
        return []
    known = EXPERIENCE_SCORES.read(roles.database, chain.score_keys, batch.table["experience_id"].to_pylist())
    decided = decide_groups(chain, batch, known)
    return commit_verdicts(roles.run, roles.worker_id, "p1", batch, decided, tries=tries).decided


def rows(buffer: Buffer, query: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = buffer.sql(query).to_pylist()
    return found


@pytest.fixture
def roles(buffer: Buffer) -> Roles:
    return two_sealed_groups(buffer)


def test_a_score_is_kept_and_one_that_failed_is_made_again(buffer: Buffer, roles: Roles) -> None:
    calls.clear()
    name = f"{__name__}:Length"
    assert run_pipeline(roles, build_chain([{name: {}}], min_group_size=2)) == [1, 2]
    stored = rows(buffer, "SELECT experience_id, scores->>'length' AS length, error FROM rft.score ORDER BY 1")
    assert [(row["length"], row["error"]) for row in stored] == [("1.0", None), (None, "odd ones only")] * 2

    # A relabel decides again; another stage behind the score does not change its key.
    buffer.sql("UPDATE rft.experience SET reward = 0.25 WHERE experience_id = 1")
    threshold = build_chain(
        [{name: {}}, {"sql": "SELECT * FROM batch WHERE length IS NULL OR length < 2"}], min_group_size=2
    )
    assert run_pipeline(roles, threshold) == [1]
    assert calls == [[1, 2, 3, 4], [2]]


class AsksAlways(Operator):
    """Asks about every row, without looking at answers."""

    reads = frozenset({"response"})
    asks = None

    def apply(self, table: pa.Table) -> StageOutcome:
        asked = Review("check", "Well?", 60.0, "drop")
        return StageOutcome(pa.nulls(table.num_rows, pa.string()), waiting=dict.fromkeys(range(table.num_rows), asked))


def test_a_stage_that_asks_again_after_the_answer_does_not_keep_its_group(buffer: Buffer, roles: Roles) -> None:
    chain = build_chain([{f"{__name__}:AsksAlways": {}}])
    assert run_pipeline(roles, chain) == [] and roles.claim_sealed() is None
    buffer.sql("UPDATE rft.review SET answer = 'pass' WHERE group_id = 1")
    assert run_pipeline(roles, chain) == [1]
    assert rows(buffer, "SELECT experience_id, kept FROM rft.verdict ORDER BY 1") == [
        {"experience_id": 1, "kept": True},
        {"experience_id": 2, "kept": True},
    ]
    again = decide_groups_without_people(chain, read_groups(roles.database, [1, 2], chain.columns), {})
    assert [(d["experience_id"], d["kept"]) for d in again.decisions.to_pylist()] == [
        (1, True),
        (2, True),
        (3, False),
        (4, False),
    ]


def test_an_answer_that_was_corrected_is_scored_again(buffer: Buffer, roles: Roles) -> None:
    chain = build_chain(
        [{"tag": {"columns": {"fits": "answer = response"}}}, {"threshold": {"column": "fits", "min": 1}}]
    )
    buffer.sql('UPDATE rft.task SET payload = \'{"answer": "nothing"}\'')
    run_pipeline(roles, chain)
    assert rows(buffer, "SELECT DISTINCT kept FROM rft.verdict") == [{"kept": False}]
    buffer.sql(
        "UPDATE rft.task SET payload = jsonb_build_object('answer', (SELECT response FROM rft.experience LIMIT 1))"
    )
    buffer.sql("UPDATE rft.experience SET reward = 0.7 WHERE experience_id = 1")  # sends its group back
    run_pipeline(roles, chain)
    found = rows(
        buffer,
        "SELECT s.experience_id, s.scores, e.response = t.payload->>'answer' AS fits FROM rft.score s"
        " JOIN rft.experience e USING (experience_id) JOIN rft.rollout_group g USING (group_id) JOIN rft.task t USING (task_id)"
        " WHERE g.group_id = 1 ORDER BY 1",
    )
    assert [row["scores"] for row in found] == [{"fits": row["fits"]} for row in found]
    assert any(row["fits"] for row in found)


def test_a_row_on_which_a_stage_fails_is_set_aside_and_its_group_continues(buffer: Buffer) -> None:
    roles = Roles(buffer, batch_groups=2, group_size=3)
    with roles.attempt():
        roles.plan()
        roles.explore()
    chain = build_chain([{f"{__name__}:fails_on_the_second": {}}], min_group_size=2)
    assert run_pipeline(roles, chain) == [1, 2]
    verdicts = rows(buffer, "SELECT experience_id, kept, stage, reason FROM rft.verdict ORDER BY 1")
    assert [row["kept"] for row in verdicts] == [True, False, True, True, True, True]
    assert "bad row" in verdicts[1]["reason"] and verdicts[1]["stage"].endswith("fails_on_the_second")
    errors = rows(buffer, "SELECT error FROM rft.operator_run WHERE error IS NOT NULL")
    assert errors and all("bad row" in row["error"] for row in errors)


def test_a_row_that_waits_for_a_person_continues_when_answered(buffer: Buffer, roles: Roles) -> None:
    chain = build_chain(
        [{"human_review": {"where": "reward = 0", "timeout": "1 h", "otherwise": "drop"}}], min_group_size=1
    )
    assert run_pipeline(roles, chain) == []
    assert run_pipeline(roles, chain) == []  # nothing is asked twice, and nothing can be claimed
    queue = labels.review_queue(buffer, roles.run_id, 10)
    assert [(row["experience_id"], row["otherwise"]) for row in queue] == [(1, "drop"), (3, "drop")]
    assert 0 < queue[0]["seconds_left"] <= 3600
    # The deadline is that of the statement, in which a microsecond may pass.
    waits = rows(buffer, "SELECT extract(epoch FROM deadline - asked_at)::float8 AS s FROM rft.review")
    assert [row["s"] for row in waits] == pytest.approx([3600.0] * len(waits), abs=0.01) and waits
    assert labels.num_open_reviews(buffer, roles.run_id) == 2

    assert labels.set_rewards(buffer, {1: 0.0}, author="ada").num_answered == 1  # the reward that stood: it may pass
    assert run_pipeline(roles, chain) == [1]
    buffer.sql("UPDATE rft.review SET answer = 'drop' WHERE experience_id = 3")
    assert run_pipeline(roles, chain) == [2]
    verdicts = rows(buffer, "SELECT experience_id, kept, reason FROM rft.verdict ORDER BY 1")
    assert [row["kept"] for row in verdicts] == [True, True, False, True]
    assert verdicts[2]["reason"] == "review 'review': drop"
    assert labels.review_queue(buffer, None, 10) == []


def test_a_label_in_sql_is_an_answer(buffer: Buffer, roles: Roles) -> None:
    chain = build_chain([{"human_review": {"where": "reward = 0", "otherwise": "drop"}}])
    assert run_pipeline(roles, chain) == []
    buffer.sql("UPDATE rft.experience SET reward = 0.5 WHERE experience_id IN (1, 3)")
    assert rows(buffer, "SELECT answer::text AS answer FROM rft.review") == [{"answer": "pass"}] * 2
    assert run_pipeline(roles, chain) == [1, 2]


def test_a_deadline_passes_by_the_databases_clock_without_a_running_process(buffer: Buffer, roles: Roles) -> None:
    chain = build_chain([{"human_review": {"where": "reward = 0", "timeout": 60, "otherwise": "drop"}}])
    assert run_pipeline(roles, chain) == []
    buffer.database.run("end_waiting", run_id=roles.run_id)
    assert run_pipeline(roles, chain) == []
    name = rows(buffer, "SELECT current_database() AS name")[0]["name"]
    buffer.sql(f"""ALTER DATABASE "{name}" SET rft.clock_shift = '61 s'""")
    with opened_again(buffer) as later:
        assert rows(later, "SELECT state FROM rft.v_review") == [{"state": "drop"}] * 2
        assert rows(later, "SELECT * FROM rft.v_review_queue") == []
        later.database.run("end_waiting", run_id=roles.run_id)
        roles.run = later.find_run(roles.run_id)
        assert run_pipeline(roles, chain) == [1, 2]
    kept = rows(buffer, "SELECT kept FROM rft.verdict ORDER BY experience_id")
    assert [row["kept"] for row in kept] == [False, True, False, True]


def opened_again(buffer: Buffer) -> Buffer:
    """Another client of the same buffer, whose sessions begin now."""
    import rftdata

    return rftdata.open(buffer.config, create=False)


def test_only_the_answer_of_a_review_can_be_changed(buffer: Buffer, roles: Roles) -> None:
    run_pipeline(roles, build_chain([{"human_review": {"otherwise": "pass"}}]))
    with pytest.raises(Exception, match="only the answer of a review can be changed"):
        buffer.sql("UPDATE rft.review SET deadline = now() WHERE review_id = 1")


def test_lineage_shows_the_parents_of_created_rows(
    buffer: Buffer, roles: Roles, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rftcore.cli import run_command

    monkeypatch.setenv("RFT_BUFFER", buffer.config.uri)
    monkeypatch.setenv("RFT_SEGMENTS", str(buffer.config.segments))
    child = own_group([1.0], "child")
    child.rollouts[0].sequences[0].parent_id = 1
    with buffer.writer(roles.run) as writer:
        writer.insert(child)
    buffer.sql(
        """INSERT INTO rft.task (taskset, task_key, payload, features) VALUES ('harder', 'h1', '{}', '{"parent_experience_id": 1}')"""
    )
    assert run_command(["lineage", "1"]) == 0
    assert "experience 5 was created from it\ntask 'h1' of 'harder' was created from it" in capsys.readouterr().out
    assert run_command(["lineage", "5"]) == 0
    assert "was created from experience 1" in capsys.readouterr().out


def test_a_created_group_is_stored_once_however_often_it_is_created(
    buffer: Buffer, roles: Roles, tmp_path: Path
) -> None:
    import uuid

    batch = roles.claim_sealed()
    assert batch is not None
    decided = decide_groups(build_chain([{f"{__name__}:Twins": {}}]), batch)
    assert [made.parent_id for made in decided.created] == [1, 2, 3, 4]
    assert [stage.rows_created for stage in decided.stages] == [4]
    receipt = uuid.uuid5(uuid.NAMESPACE_OID, "twin of 1")
    with buffer.writer(roles.run) as writer:
        first = writer.insert(own_group([1.0], "twin of 1"), receipt=receipt)
        assert len(first) == 1 and writer.insert(own_group([1.0], "twin of 1"), receipt=receipt) == []
        assert writer.insert(own_group([1.0], "twin of 2")) != []
    found = rows(
        buffer, "SELECT count(*) AS n FROM rft.rollout_group g JOIN rft.task t USING (task_id) WHERE taskset = 'mine'"
    )
    assert found == [{"n": 2}]


def test_explorers_wait_for_a_pipeline_that_is_behind(buffer: Buffer) -> None:
    roles = Roles(buffer, batch_groups=2, offset=3)
    limited = Planner(roles.run, replace(roles.plan_config, max_waiting_groups=3))
    with roles.attempt():
        assert limited.plan() == 8  # four steps may run, and nothing waits
        roles.explore(count=2)
        buffer.sql("UPDATE rft.run SET planned_steps = 20")
        roles.publish(roles_attempt := roles.buffer.join_attempt(roles.run, 1), 1)
        assert roles_attempt.attempt_id == 1
        assert limited.plan() == 2  # two groups wait: fewer than the limit
        roles.explore(count=1)
        roles.publish(roles_attempt, 2)
        assert limited.plan() == 0  # three wait
        assert roles.decide() == [1, 2, 3]
        assert limited.plan() == 2


def test_two_workers_share_the_queue(buffer: Buffer) -> None:
    roles = Roles(buffer, batch_groups=8, group_size=2)
    chain = build_chain([{"drop_truncated": {}}])
    with roles.attempt():
        roles.plan()
        roles.explore()
        other = roles.database.fetch(
            "insert_worker", run_id=roles.run_id, role="pipeline", host="there", pid=2, pid_space="", pid_started=0
        )[0]["worker_id"]
        claimed = [claim_sealed_groups(roles.run, worker, count=5, lease_s=60) for worker in (roles.worker_id, other)]
        groups = [batch.group_ids for batch in claimed if batch is not None]
        assert sorted(map(len, groups)) == [3, 5] and len({key for ids in groups for key in ids}) == 8
        for worker, batch in zip((roles.worker_id, other), claimed, strict=True):
            assert batch is not None
            done = commit_verdicts(roles.run, worker, "p1", batch, decide_groups(chain, batch)).decided
            assert sorted(done) == sorted(batch.group_ids)


def test_a_group_on_which_every_worker_ends_is_set_aside(buffer: Buffer) -> None:
    roles = Roles(buffer, batch_groups=3)
    with roles.attempt():
        roles.plan()
        roles.explore()

    def die_with() -> list[int]:
        """Claim what there is, and end with it; the groups."""
        worker = roles.database.fetch(
            "insert_worker", run_id=roles.run_id, role="pipeline", host="there", pid=2, pid_space="", pid_started=0
        )[0]["worker_id"]
        batch = claim_sealed_groups(roles.run, worker, count=9, lease_s=60)
        roles.database.run(
            "end_worker_of_process",
            run_id=roles.run_id,
            host="there",
            pid=2,
            pid_space="",
            error="blocked",
            crashed=True,
        )
        release_lost_claims(roles.run)
        return batch.group_ids if batch else []

    assert sorted(die_with()) == [1, 2, 3]
    assert [die_with() for _ in range(2)] == [[1], [1]]  # from now on each alone, the first first
    assert roles.decide() == [1]  # this one survived it
    assert [die_with() for _ in range(3)] == [[2]] * 3
    batch = roles.claim_sealed()
    assert batch is not None and batch.group_ids == [2] and batch.table.num_rows == 0
    assert roles.commit(batch) == [2]
    reasons = rows(buffer, "SELECT stage, reason FROM rft.verdict WHERE group_id = 2")
    assert reasons == [{"stage": "pipeline", "reason": "4 pipeline workers crashed while they decided on it"}] * 2
    assert roles.decide() == [3]


def test_a_suspect_is_decided_on_while_others_wait_and_a_released_group_is_no_suspect(buffer: Buffer) -> None:
    roles = Roles(buffer, batch_groups=8)
    with roles.attempt():
        roles.plan()
        roles.explore()
    assert release_sealed_groups(roles.run, roles.worker_id) == 0
    batch = claim_sealed_groups(roles.run, roles.worker_id, count=3, lease_s=60)
    assert batch is not None and release_sealed_groups(roles.run, roles.worker_id) == 3
    assert rows(buffer, "SELECT max(num_lost) AS n FROM rft.worklist") == [{"n": 0}]
    buffer.sql("UPDATE rft.worklist SET num_lost = 1 WHERE item_id = 5")
    queue = SealedQueue(roles.run, roles.worker_id, lease_s=60, look_back_s=0.0)
    claimed = [batch.group_ids for _ in range(8) if (batch := queue.claim(1)) is not None]
    assert [5] in claimed[:4] and sorted(claimed) == [[key] for key in range(1, 9)]


def test_only_the_columns_that_stages_read_leave_the_database(buffer: Buffer, roles: Roles) -> None:
    chain = build_chain([{"drop_truncated": {}}])
    batch = claim_sealed_groups(roles.run, roles.worker_id, count=9, lease_s=60, columns=chain.columns)
    assert batch is not None
    assert set(batch.table.column_names) == {"experience_id", "group_id", "rollout_index", "finish_reason", "reward"}


def test_a_purge_takes_the_texts_of_scores_and_closes_questions(buffer: Buffer, roles: Roles) -> None:
    from rftdata.maintenance.purge import purge

    run_pipeline(roles, build_chain([{f"{__name__}:Length": {}}, {"human_review": {}}]))
    assert len(labels.review_queue(buffer, None, 10)) == 4
    purge(buffer, "experience_id <= 2", reason="asked to", author="ada")
    assert [row["experience_id"] for row in labels.review_queue(buffer, None, 10)] == [3, 4]
    scores = rows(buffer, "SELECT experience_id, scores::text AS scores, error FROM rft.score ORDER BY 1")
    assert scores[0]["scores"] == '{"length": 1.0}' and scores[1]["error"] == "[purged]"
    assert scores[3]["error"] == "odd ones only"
    assert run_pipeline(roles, build_chain([{"drop_truncated": {}}])) == []


def test_new_tasks_are_stored_with_the_verdicts_and_once(buffer: Buffer, roles: Roles) -> None:
    batch = roles.claim_sealed()
    assert batch is not None
    task = CreatedTask("harder", "k1", {"prompt": "2 + 2", "answer": "4"}, 1)
    commit_verdicts(roles.run, roles.worker_id, "p1", batch, Verdicts(created=[task, task]))
    assert rows(buffer, "SELECT task_key, payload->>'answer' AS answer FROM rft.task WHERE taskset = 'harder'") == [
        {"task_key": "k1", "answer": "4"}
    ]


def test_stages_receive_the_version_of_the_weights_that_the_policy_answers_with(buffer: Buffer) -> None:
    config = parse_config(
        {
            "run": {"name": "t"},
            "buffer": {"uri": buffer.config.uri, "segments": buffer.config.segments},
            "model": {"path": "none"},
            "tasks": [{"name": "t", "source": "./none.py:none"}],
            "algorithm": {"name": "sft", "group_size": 1},
            "explorer": {},
            "trainer": {},
            "steps": 1,
        },
        Path(),
        "the test",
    )
    roles = Roles(buffer)
    policy = Policy(ResolvedRun(config), roles.run)
    context = stage_context(config, policy, RunUsage(roles.run), buffer)
    assert context.policy_version is not None
    before = context.policy_version()
    with roles.attempt(publish=False) as attempt:
        first = roles.publish(attempt, 0)
        assert context.policy_version() == str(first) != before
        assert str(roles.publish(attempt, 1)) == context.policy_version() != str(first)
    assert Policy(ResolvedRun(config)).version() == before
