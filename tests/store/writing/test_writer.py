"""Writing groups: durable, complete, once, and only by the holder of the claim."""

from __future__ import annotations

import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

import rftdata
from rftdata import Buffer, Group, RftError, Rollout, Run
from rftdata.config import BufferConfig
from rftdata.errors import BufferUnavailableError, DiskFullError, FencedError
from rftdata.maintenance.verification import verify
from rftdata.planning.partial import Part, PartialAnswer, keep
from tests.support.store_roles import Roles, own_group, tokens
from tests.support.waiting import PATIENCE_S, wait_until


@pytest.fixture
def run(buffer: Buffer) -> Run:
    return buffer.create_run(name="import", config={}, seed=1, steps=1, pipeline_version="p1")


@pytest.fixture
def policies(buffer: Buffer, run: Run) -> tuple[int, int]:
    """Two policy versions of the run."""
    with buffer.attempt(run) as attempt:
        first, second = (
            attempt.publish(step, method="memory", uri=f"/weights/{step}", num_bytes=1, checksum="0") for step in (0, 1)
        )
    return first, second


def counts(buffer: Buffer) -> dict[str, int]:
    names = ("rollout_group", "rollout", "experience", "segment", "write_receipt", "task_observation")
    row: dict[str, int] = buffer.sql(
        "SELECT " + ", ".join(f"(SELECT count(*) FROM rft.{n}) AS {n}" for n in names)
    ).to_pylist()[0]
    return row


def test_rows_and_arrays_come_back_as_they_were_written(buffer: Buffer, run: Run, policies: tuple[int, int]) -> None:
    long = tokens(
        0.5,
        token_ids=[1, 2, 3, 4, 5, 6],
        num_prompt_tokens=2,
        behavior_logprobs=[-1.0, -2.0, -3.0, -4.0],
        loss_mask=[True, False, True, True],
        policy_spans=[(2, policies[0]), (4, policies[1])],
        reward_parts={"exact": 0.5},
        metrics={"length": 4.0},
        messages=[{"role": "user", "content": "hi"}],
    )
    group = Group(
        [Rollout(0, "ok", 0.5, [long], seconds=1.5), Rollout(1, "ok", 1.0, [tokens(1.0)])],
        taskset="t",
        task_key="k",
        source="human",
    )
    with buffer.writer(run) as writer:
        (group_id,) = writer.insert(group)
    rows = buffer.sql("SELECT * FROM rft.v_experience ORDER BY rollout_index").to_pylist()
    assert [row["group_id"] for row in rows] == [group_id, group_id]
    first = rows[0]
    assert (first["reward"], first["reward_sampled"], first["policy_version_min"], first["policy_version_max"]) == (
        0.5,
        0.5,
        *policies,
    )
    assert (first["num_prompt_tokens"], first["num_response_tokens"], first["finish_reason"], first["source"]) == (
        2,
        4,
        "stop",
        "human",
    )
    arrays = buffer.read_arrays(
        [row["experience_id"] for row in reversed(rows)],
        ["token_ids", "loss_mask", "behavior_logprobs", "policy_spans"],
    )
    assert arrays["experience_id"].to_pylist() == [rows[1]["experience_id"], rows[0]["experience_id"]]
    assert arrays["token_ids"].to_pylist() == [[5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6]]
    assert arrays["loss_mask"].to_pylist() == [[0, 0, 0, 1, 1], [0, 0, 1, 0, 1, 1]]
    assert arrays["behavior_logprobs"].to_pylist()[1] == [0.0, 0.0, -1.0, -2.0, -3.0, -4.0]
    assert arrays["policy_spans"].to_pylist() == [
        [],
        [{"start": 2, "policy_version_id": policies[0]}, {"start": 4, "policy_version_id": policies[1]}],
    ]
    assert list(verify(buffer)) == []


def test_several_groups_share_one_segment_and_keep_their_order(buffer: Buffer, run: Run) -> None:
    with buffer.writer(run) as writer:
        ids = writer.insert(own_group(task_key="a"), own_group(task_key="b"), own_group(task_key="a"))
        more = writer.insert(own_group(task_key="c"))
    assert ids + more == sorted(set(ids + more))
    assert counts(buffer)["segment"] == 2
    assert buffer.sql("SELECT count(*) AS n FROM rft.segment_file")["n"].to_pylist() == [1]
    assert buffer.sql("SELECT count(*) AS n FROM rft.task")["n"].to_pylist() == [3]


def test_a_failed_rollout_keeps_its_error_and_has_no_experience(buffer: Buffer, run: Run) -> None:
    group = Group(
        [Rollout(0, "ok", 1.0, [tokens()]), Rollout(1, "failed", error="ValueError: \x00 no number")],
        taskset="t",
        task_key="k",
    )
    with buffer.writer(run) as writer:
        writer.insert(group)
    rollouts = buffer.sql("SELECT outcome::text AS outcome, error FROM rft.rollout ORDER BY rollout_index").to_pylist()
    assert [row["outcome"] for row in rollouts] == ["ok", "failed"]
    assert rollouts[1]["error"] == "ValueError: \ufffd no number"
    assert counts(buffer)["experience"] == 1


def test_groups_submitted_together_are_stored_together_and_a_lost_claim_fails_alone(buffer: Buffer) -> None:
    roles = Roles(buffer)
    roles.attempt()
    roles.plan()
    first, second = roles.claim()
    stale = Group(roles.result(second, [0.0, 1.0]).rollouts, second.group_id, second.claim_token - 1)
    # It waits for four groups of two, however long they take to come.
    with buffer.writer(roles.run, linger_ms=1000 * PATIENCE_S, max_rows=8) as writer:
        answers = [writer.submit(own_group(task_key=str(i))) for i in range(3)]
        good = writer.submit(roles.result(first, [0.0, 1.0]))
        assert [len(answer.result()) for answer in answers] == [1, 1, 1] and good.result() == [first.group_id]
        assert counts(buffer)["segment"] == 1
        answers = [
            writer.submit(group)
            for group in (own_group(task_key="a"), stale, own_group(task_key="b"), own_group(task_key="c"))
        ]
        with pytest.raises(FencedError):
            answers[1].result()
        assert [len(answer.result()) for answer in answers if answer is not answers[1]] == [1, 1, 1]
    with pytest.raises(RftError, match="closed"):
        writer.insert(own_group())
    assert list(verify(buffer)) == []


def test_a_fenced_writer_gets_an_error_and_stores_nothing(buffer: Buffer) -> None:
    roles = Roles(buffer)
    roles.attempt()
    roles.plan()
    first, second = roles.claim()
    buffer.sql(
        "UPDATE rft.rollout_group SET lease_until = now() - interval '1 s' WHERE group_id = %s", [second.group_id]
    )
    roles.database.fetch("release_lost_claims", run_id=roles.run_id)
    (again,) = roles.claim()
    assert again.claim_token > second.claim_token
    before = counts(buffer)
    with pytest.raises(FencedError, match=f"group {second.group_id} is no longer held"):
        roles.insert(roles.result(first, [0.0, 1.0]), roles.result(second, [0.0, 1.0]))
    assert counts(buffer) == before
    assert roles.insert(roles.result(first, [0.0, 1.0]), roles.result(again, [0.0, 1.0])) == [
        first.group_id,
        again.group_id,
    ]


def test_a_group_is_sealed_once(buffer: Buffer) -> None:
    roles = Roles(buffer)
    roles.attempt()
    roles.plan()
    group = roles.claim()[0]
    roles.insert(roles.result(group, [0.0, 1.0]))
    with pytest.raises(FencedError):
        roles.insert(roles.result(group, [1.0, 1.0]))
    assert counts(buffer)["rollout"] == 2


def test_a_group_of_ones_own_can_be_decided_and_trained(buffer: Buffer) -> None:
    roles = Roles(buffer, batch_groups=1)
    roles.insert(own_group())
    roles.decide()
    attempt = roles.attempt()
    batch = attempt.draw(1, 1, timeout_s=5)
    assert batch is not None and batch.rows["reward"].to_pylist() == [0.0, 1.0]


def test_demonstrations_that_no_policy_sampled_never_age(buffer: Buffer) -> None:
    roles = Roles(buffer, batch_groups=1, max_staleness=0)
    roles.insert(own_group())
    roles.decide()
    batch = roles.attempt().draw(40, 1, timeout_s=5)
    assert batch is not None and batch.rows["staleness"].to_pylist() == [0, 0]


def test_imports_and_planners_do_not_fight_over_ordinals(buffer: Buffer) -> None:
    roles = Roles(buffer, batch_groups=20, steps=50, offset=40)
    roles.attempt()
    errors: list[Exception] = []

    def import_groups() -> None:
        try:
            with buffer.writer(roles.run) as writer:
                for i in range(10):
                    writer.insert(own_group(task_key=str(i)))
        except (RftError, psycopg.Error) as error:
            errors.append(error)

    thread = threading.Thread(target=import_groups)
    thread.start()
    while thread.is_alive():
        roles.plan()
    thread.join()
    assert errors == []
    assert buffer.sql("SELECT count(*) - count(DISTINCT ordinal) AS n FROM rft.rollout_group")["n"].to_pylist() == [0]


def test_threads_may_share_a_writer(buffer: Buffer, run: Run) -> None:
    with buffer.writer(run) as writer:
        threads = [threading.Thread(target=writer.insert, args=[own_group(task_key=str(i))]) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counts(buffer)["experience"] == 12
    assert list(verify(buffer)) == []


def test_what_models_sample_and_sql_cannot_hold_is_replaced(buffer: Buffer, run: Run) -> None:
    import numpy as np

    odd = tokens(
        prompt="a\x00b",
        response="half \ud83d",
        messages=[{"role": "user", "content": "\x00"}],
        metrics={"nan": float("nan"), "inf": float("inf"), "float32": np.float32(0.5)},
    )
    with buffer.writer(run) as writer:
        writer.insert(
            Group(
                [Rollout(0, "ok", 1.0, [odd])],
                taskset="t",
                task_key="k",
                payload={"answer": "\x00", "x": float("nan")},
            )
        )
    row = buffer.sql(
        "SELECT prompt, response, metrics::text AS metrics, messages::text AS messages, answer FROM rft.v_experience"
    ).to_pylist()[0]
    assert (row["prompt"], row["response"], row["answer"]) == ("a\ufffdb", "half \ufffd", "\ufffd")
    assert '"nan": null' in row["metrics"] and '"float32": 0.5' in row["metrics"]


BAD_GROUPS = {
    "one value per response token": Group(
        [Rollout(0, sequences=[tokens(behavior_logprobs=[-1.0])])], taskset="t", task_key="k"
    ),
    "loss_mask must have": Group([Rollout(0, sequences=[tokens(loss_mask=[True])])], taskset="t", task_key="k"),
    "a wrong number of prompt tokens": Group(
        [Rollout(0, sequences=[tokens(num_prompt_tokens=6)])], taskset="t", task_key="k"
    ),
    "not a finite number": Group([Rollout(0, sequences=[tokens(float("nan"))])], taskset="t", task_key="k"),
    "got inf": Group([Rollout(0, reward=float("inf"), sequences=[tokens()])], taskset="t", task_key="k"),
    "ascending tokens": Group(
        [Rollout(0, sequences=[tokens(policy_spans=[(4, 1), (3, 2)])])], taskset="t", task_key="k"
    ),
    "unknown outcome": Group([Rollout(0, "exploded")], taskset="t", task_key="k"),
    "unknown source": Group([Rollout(0)], taskset="t", task_key="k", source="thin air"),
    "numbered from 0": Group([Rollout(1)], taskset="t", task_key="k"),
    "name its task": Group([Rollout(0)]),
    "the name of a taskset cannot be stored": Group([Rollout(0)], taskset="t\x00", task_key="k"),
    "the key of a task cannot be stored": Group([Rollout(0)], taskset="t", task_key="\ud800"),
    "the key of a task is too long: 1,601 characters": Group([Rollout(0)], taskset="t", task_key="k" * 1601),
    "the parent_id of a sequence is not valid": Group(
        [Rollout(0, sequences=[tokens(parent_id=2**63)])], taskset="t", task_key="k"
    ),
    "the policy_version_id of a span": Group(
        [Rollout(0, sequences=[tokens(policy_spans=[(3, 2**63)])])], taskset="t", task_key="k"
    ),
    "the duration of a rollout": Group([Rollout(0, seconds=float("nan"))], taskset="t", task_key="k"),
}


@pytest.mark.parametrize("message", BAD_GROUPS)
def test_a_bad_group_is_refused_with_the_reason_and_nothing_is_stored(buffer: Buffer, run: Run, message: str) -> None:
    with buffer.writer(run) as writer, pytest.raises(RftError, match=message):
        writer.insert(own_group(), BAD_GROUPS[message])
    assert set(counts(buffer).values()) == {0}


def test_a_claimed_group_needs_every_planned_rollout(buffer: Buffer) -> None:
    roles = Roles(buffer, group_size=3)
    roles.attempt()
    roles.plan()
    with pytest.raises(RftError, match="another number of rollouts than planned"):
        roles.insert(roles.result(roles.claim()[0], [0.0, 1.0]))
    assert counts(buffer)["rollout"] == 0


def test_a_disk_that_would_get_too_full_is_refused_with_nothing_half_written(database_uri: str, tmp_path: Path) -> None:
    config = BufferConfig(uri=database_uri, segments=str(tmp_path / "segments"), min_free_bytes=2**62)
    with rftdata.open(config) as buffer:
        run = buffer.create_run(name="full", config={}, seed=1, steps=1, pipeline_version="p1")
        group = own_group()
        with buffer.writer(run) as writer, pytest.raises(DiskFullError, match=r"buffer\.min_free_bytes"):
            writer.insert(group)
        assert group.group_id is None
        assert set(counts(buffer).values()) == {0}
    assert list((tmp_path / "segments").iterdir()) == []


def test_segments_that_cannot_be_written_are_a_clear_error(database_uri: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BufferUnavailableError, match=r"correct buffer\.segments"):
        rftdata.open(BufferConfig(uri=database_uri, segments=str(tmp_path / "file" / "segments")))


def test_a_query_keeps_columns_of_one_name_apart(buffer: Buffer) -> None:
    table = buffer.sql("SELECT 1 AS a, 2 AS a")
    assert isinstance(table, pa.Table)
    assert [column.to_pylist() for column in table.columns] == [[1], [2]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parent_id": 99}, r"parent_id of a sequence names an experience that does not exist.*got 99.*write the parent first"),
        ({"policy_spans": [(3, 99)]}, r"policy_spans of a sequence name a policy version that does not exist.*got 99.*Attempt.publish"),
    ],
)  # fmt: skip
def test_parents_and_policies_must_exist(
    buffer: Buffer, run: Run, policies: tuple[int, int], changes: dict[str, Any], message: str
) -> None:
    wrong = own_group([1.0])
    wrong.rollouts[0].sequences = [tokens(1.0, **changes)]
    with buffer.writer(run) as writer:
        with pytest.raises(RftError, match=message):
            writer.insert(wrong)
        assert counts(buffer)["experience"] == counts(buffer)["write_receipt"] == 0
        writer.insert(own_group([1.0]))
        parent = buffer.sql("SELECT experience_id FROM rft.experience")["experience_id"][0].as_py()
        right = own_group([1.0], "right")
        right.rollouts[0].sequences = [tokens(1.0, parent_id=parent, policy_spans=[(3, policies[1])])]
        assert len(writer.insert(right)) == 1


def test_a_receipt_counts_within_its_run(buffer: Buffer, run: Run) -> None:
    other = buffer.create_run(name="other", config={}, seed=1, steps=1, pipeline_version="p1")
    receipt = uuid.uuid4()
    for target in (run, other):
        with buffer.writer(target) as writer:
            assert len(writer.insert(own_group(), receipt=receipt)) == 1
            assert writer.insert(own_group(), receipt=receipt) == []
    rows = buffer.sql("SELECT run_id, count(*) AS n FROM rft.rollout_group GROUP BY 1 ORDER BY 1").to_pylist()
    assert rows == [{"run_id": run.run_id, "n": 1}, {"run_id": other.run_id, "n": 1}]


def test_a_writer_stores_no_group_that_another_run_claimed(buffer: Buffer, run: Run) -> None:
    roles = Roles(buffer)
    with roles.attempt():
        roles.plan()
        claimed = roles.claim()[0]
        result = roles.result(claimed, [0.0, 1.0])
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
        keep(run, [part])
        with (
            buffer.writer(run) as writer,
            pytest.raises(
                RftError,
                match=rf"group {claimed.group_id} belongs to the run 'roles'.*writes into another one.*buffer.writer",
            ),
        ):
            writer.insert(result)
        assert (counts(buffer)["experience"], counts(buffer)["write_receipt"]) == (0, 0)
        assert buffer.sql("SELECT FROM rft.partial_tokens").num_rows == 0
        assert roles.insert(result) == [claimed.group_id]


def test_a_request_with_a_receipt_is_stored_before_the_writer_closes(buffer: Buffer, run: Run) -> None:
    for _ in range(5):  # while the first is stored the other two and the end queue up behind it
        writer = buffer.writer(run)
        first = writer.submit(*[own_group([1.0] * 8, f"w{i}") for i in range(100)])
        time.sleep(0.005)
        answers = [
            first,
            writer.submit(own_group([1.0], "a")),
            writer.submit(own_group([1.0], "r"), receipt=uuid.uuid4()),
        ]
        writer.close()
        assert [len(answer.result(timeout=0)) for answer in answers] == [100, 1, 1]


def test_of_two_threads_that_close_a_writer_both_return_after_everything_is_stored(
    buffer: Buffer, run: Run, database_uri: str
) -> None:
    """The first waits for what is being stored; the second ends, or waits too, before that can be."""
    writer = buffer.writer(run)
    closers: list[threading.Thread] = []
    stored: list[bool] = []

    def close() -> None:
        writer.close()
        stored.append(answer.done())

    with psycopg.connect(database_uri) as other:
        other.execute("LOCK TABLE rft.rollout IN EXCLUSIVE MODE")
        answer = writer.submit(own_group([1.0], "x"))
        for _ in range(2):
            thread = threading.Thread(target=close)
            thread.start()
            closers.append(thread)
            wait_until(
                lambda: not closers[-1].is_alive() or waits_for_a_thread(closers[-1]), "one that waits or has ended"
            )
    for thread in closers:
        thread.join(PATIENCE_S)
    assert stored == [True, True] and len(answer.result(timeout=0)) == 1
    writer.close()
    with pytest.raises(RftError, match="the writer is closed"):
        writer.submit(own_group([1.0], "y"))


def waits_for_a_thread(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code is threading.Thread.join.__code__:
            return True
        frame = frame.f_back
    return False
