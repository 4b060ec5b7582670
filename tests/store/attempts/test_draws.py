"""Draws: whole groups, first in first out, fresh enough, by the attempt that holds the run; undone by going back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

import rftdata
from rftdata import Buffer
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.batch import Batch
from rftdata.attempts.evaluations import plan_evaluations
from rftdata.config import BufferConfig
from rftdata.errors import BufferUnavailableError, FencedError, QueryError, RftError, SegmentCorruptError
from rftdata.postgres import retry
from rftdata.postgres.database import execute
from tests.store.pipeline.test_review_locks import wait_for_waiting
from tests.support.lossy_line import LossyLine, Statements
from tests.support.store_roles import Roles, own_group, selecting
from tests.support.waiting import PATIENCE_S, wait_until


def drawn(batch: Batch | None) -> list[int]:
    assert batch is not None
    return sorted(set(batch.rows["group_id"].to_pylist()))


def expire(roles: Roles) -> None:
    roles.buffer.sql("UPDATE rft.run_attempt SET lease_until = now() - interval '1 s'")


def own_lease(roles: Roles) -> Attempt:
    """An attempt whose lease is not renewed within a test, so that `expire` holds until the next attempt starts."""
    return roles.attempt(lease_s=10 * PATIENCE_S)


def test_a_batch_holds_whole_groups_in_first_in_first_out_order(buffer: Buffer) -> None:
    roles = Roles(buffer, batch_groups=3, group_size=4, offset=1)
    with roles.attempt() as attempt:
        roles.work()
        batch = attempt.draw(1, 2, timeout_s=5)
        assert batch is not None and batch.short_reason is None and batch.num_groups == 2
        assert batch.rows["group_id"].to_pylist() == [1] * 4 + [2] * 4
        assert batch.rows["rollout_index"].to_pylist() == [0, 1, 2, 3] * 2
        assert batch.rows["slot"].to_pylist() == list(range(8))
        assert drawn(attempt.draw(2, 4, timeout_s=5)) == [3, 4, 5, 6]


def test_arrays_are_packed_and_padded_into_the_callers_memory(buffer: Buffer) -> None:
    import numpy as np

    roles = Roles(buffer, batch_groups=1)
    with roles.attempt() as attempt:
        roles.work()
        batch = attempt.draw(1, 1, ["token_ids", "behavior_logprobs"], timeout_s=5)
    assert batch is not None
    out = np.full(10, -1, dtype=np.int64)
    assert batch.packed("token_ids", out) is out and out.tolist() == [5, 6, 7, 8, 9] * 2
    wide = np.full((2, 7), 9.0, dtype=np.float32)
    assert batch.padded("behavior_logprobs", wide, fill=-1)[0].tolist() == [0, 0, 0, -0.5, -0.25, -1, -1]
    assert batch.offsets.tolist() == [0, 5, 10]
    with pytest.raises(QueryError, match="drawn without this column"):
        batch.packed("loss_mask")


def test_memory_with_too_few_rows_is_refused_and_nothing_is_left_out_silently(buffer: Buffer) -> None:
    import numpy as np

    roles = Roles(buffer, batch_groups=2)
    with roles.attempt() as attempt:
        roles.work()
        batch = attempt.draw(1, 2, timeout_s=5)
    assert batch is not None and len(batch) == 4
    with pytest.raises(QueryError, match=r"too few rows.*at least 4"):
        batch.padded("token_ids", np.zeros((3, 9), np.int32))


def test_dropped_rows_of_a_kept_group_are_not_drawn(buffer: Buffer) -> None:
    roles = Roles(buffer, batch_groups=1, group_size=3)
    with roles.attempt() as attempt:
        roles.work(keep=lambda row: row["rollout_index"] != 1)
        batch = attempt.draw(1, 1, timeout_s=5)
    assert batch is not None and batch.rows["rollout_index"].to_pylist() == [0, 2]


def test_a_step_drawn_before_gives_the_same_batch(buffer: Buffer) -> None:
    roles = Roles(buffer)
    with roles.attempt() as attempt:
        roles.work()
        first = attempt.draw(1, 2, timeout_s=5)
        again = attempt.draw(1, 2, timeout_s=5)
        assert first is not None and again is not None
        assert again.rows.equals(first.rows) and again.short_reason is None
    assert buffer.sql("SELECT count(*) AS n FROM rft.draw")["n"].to_pylist() == [4]


def test_the_trainer_waits_for_groups_and_wakes_when_they_are_ready(buffer: Buffer) -> None:
    roles = Roles(buffer)
    with roles.attempt() as attempt:
        assert attempt.draw(1, 2, timeout_s=0.1) is None
        assert attempt.draw(1, 2, stop=lambda: True) is None
        found: list[Batch | None] = []
        thread = threading.Thread(target=lambda: found.append(attempt.draw(1, 2, timeout_s=PATIENCE_S)))
        thread.start()
        roles.work()
        thread.join()
        assert drawn(found[0]) == [1, 2]


def test_a_group_above_max_staleness_ages_out_as_one_and_its_place_is_planned_again(buffer: Buffer) -> None:
    roles = Roles(buffer, offset=3, max_staleness=1, window=3, max_refill=2, steps=4)
    with roles.attempt() as attempt:
        roles.work()
        for step in (1, 2):
            roles.train(attempt, step)
        assert attempt.draw(3, 2, timeout_s=0.1) is None
        aged = [roles.group(group_id) for group_id in range(5, 9)]
        assert {(row["trainable"], row["closed_reason"]) for row in aged} == {
            (False, "aged out: staleness 2 at step 3, max_staleness 1")
        }
        roles.work()
        batch = attempt.draw(3, 2, timeout_s=5)
        assert batch is not None and batch.num_groups == 2
        assert max(batch.rows["staleness"].to_pylist()) == 0
        assert roles.planned("is_refill") == [(2, 2), (3, 2)]


def test_going_back_undoes_ageing_out(buffer: Buffer) -> None:
    roles = Roles(buffer, offset=3, max_staleness=1, window=3, steps=4)
    with roles.attempt() as attempt:
        roles.work()
        for step in (1, 2):
            roles.train(attempt, step)
        attempt.draw(3, 2, timeout_s=0.1)
    with roles.attempt() as again:
        assert drawn(again.draw(1, 2, timeout_s=5)) == [1, 2]
        assert roles.planned("trainable") == [(0, 2), (1, 2), (2, 2), (3, 2)]


def test_an_attempt_that_was_replaced_can_do_nothing_any_more(buffer: Buffer) -> None:
    roles = Roles(buffer)
    old = own_lease(roles)
    roles.work()
    batch = old.draw(1, 2, timeout_s=5)
    assert batch is not None
    expire(roles)
    new = roles.attempt()
    deeds: list[Callable[[], object]] = [
        lambda: old.draw(1, 2, timeout_s=0.1),
        lambda: old.draw(2, 2, timeout_s=0.1),
        lambda: old.release(batch),
        lambda: old.publish(1, method="memory", uri="x", num_bytes=1, checksum="0"),
        lambda: old.record_step(1, batch, wait_seconds=0, train_seconds=0, publish_seconds=0, metrics={}),
        lambda: old.commit_checkpoint(1, "x"),
    ]
    for deed in deeds:
        with pytest.raises(FencedError, match=f"attempt {old.attempt_id} no longer holds the run 'roles'"):
            deed()
    for table in ("checkpoint", "train_step"):
        assert buffer.sql(f"SELECT count(*) AS n FROM rft.{table}")["n"].to_pylist() == [0]
    old.close()
    assert roles.train(new, 1) == drawn(batch)
    new.close()


def test_a_live_trainer_is_not_replaced_and_the_error_names_its_process(buffer: Buffer) -> None:
    import os

    roles = Roles(buffer)
    with roles.attempt(), pytest.raises(FencedError, match=f"being trained by process {os.getpid()} on "):
        buffer.attempt(roles.run)


def test_a_start_that_fails_after_its_commit_leaves_no_lease_behind(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = Roles(buffer)
    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if thread.name == "attempt":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fails)
        with pytest.raises(RuntimeError, match="new thread"):
            roles.attempt()
    with roles.attempt() as attempt:
        assert buffer.find_run(roles.run_id).current_attempt_id == attempt.attempt_id
    assert buffer.sql("SELECT outcome FROM rft.run_attempt ORDER BY attempt_id")["outcome"].to_pylist() == [
        "it could not start",
        "ended",
    ]


@pytest.mark.parametrize("is_away", [False, True])
def test_a_start_whose_answer_stays_lost_leaves_no_lease_behind(
    line: LossyLine, buffer: Buffer, monkeypatch: pytest.MonkeyPatch, is_away: bool
) -> None:
    """The database has the attempt. If it is away afterwards, the process cannot end the attempt, either."""
    roles = Roles(buffer)

    def starts(statements: Statements) -> bool:
        found = any("INSERT INTO rft.run_attempt" in text or "attempt_holder" in text for text in statements)
        line.is_down |= found and is_away
        return found or line.num_lost > 0

    monkeypatch.setattr(retry, "RIDE_OUT_S", 0.5)
    with rftdata.open(BufferConfig(uri=line.uri, segments=buffer.config.segments), patience_s=0.5) as through:
        with line.losing(starts), pytest.raises(BufferUnavailableError):
            roles.attempt(buffer=through)
        line.is_down = False
        assert buffer.find_run(roles.run_id).current_attempt_id is not None
        with roles.attempt(buffer=through) as attempt:
            assert buffer.find_run(roles.run_id).current_attempt_id == attempt.attempt_id


def test_a_start_whose_answer_is_lost_once_continues(line: LossyLine, through: Buffer) -> None:
    roles = Roles(through)
    with line.losing_one("INSERT INTO rft.run_attempt"), roles.attempt() as attempt:
        assert attempt.checkpoint is None
    assert through.sql("SELECT attempt_id FROM rft.run_attempt")["attempt_id"].to_pylist() == [attempt.attempt_id]


def test_of_two_trainers_that_start_at_once_one_gets_the_run(buffer: Buffer) -> None:
    roles = Roles(buffer)
    together = threading.Barrier(2)
    won: list[Attempt] = []
    fenced: list[FencedError] = []

    def start() -> None:
        together.wait()
        try:
            won.append(buffer.attempt(roles.run))
        except FencedError as error:
            fenced.append(error)

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(fenced)) == (1, 1)
    assert buffer.find_run(roles.run_id).current_attempt_id == won[0].attempt_id
    won[0].close()


def test_after_a_resume_draws_past_the_checkpoint_can_be_drawn_again_and_those_before_cannot(buffer: Buffer) -> None:
    roles = Roles(buffer, steps=4)
    attempt = own_lease(roles)
    history = []
    for step in (1, 2, 3):
        roles.work()
        history.append(roles.train(attempt, step))
        if step == 1:
            attempt.commit_checkpoint(1, "/checkpoint/1")
    expire(roles)
    again = roles.attempt()
    assert (again.start_step, again.checkpoint and again.checkpoint.uri) == (1, "/checkpoint/1")
    assert roles.train(again, 2) == history[1]
    assert roles.train(again, 3) == history[2]
    again.commit_checkpoint(3, "/checkpoint/3")
    roles.work()
    roles.train(again, 4)
    consumed = buffer.sql("SELECT attempt_id, trainer_step FROM rft.v_consumption GROUP BY 1, 2 ORDER BY 2").to_pylist()
    assert [(row["attempt_id"], row["trainer_step"]) for row in consumed] == [
        (attempt.attempt_id, 1),
        (again.attempt_id, 2),
        (again.attempt_id, 3),
    ]
    curve = buffer.sql("SELECT trainer_step, attempt_id FROM rft.v_train_step ORDER BY 1").to_pylist()
    assert [row["trainer_step"] for row in curve] == [1, 2, 3, 4]
    attempt.close()
    again.close()


def test_without_a_checkpoint_a_resume_starts_at_the_first_step(buffer: Buffer) -> None:
    roles = Roles(buffer)
    attempt = roles.attempt()
    roles.work()
    first = roles.train(attempt, 1)
    attempt.close()
    with roles.attempt() as again:
        assert (again.start_step, again.checkpoint) == (0, None)
        assert roles.plan() == 0
        assert roles.train(again, 1) == first
    assert buffer.sql("SELECT count(*) AS n FROM rft.v_train_step")["n"].to_pylist() == [1]


def test_a_resume_does_not_bring_dropped_groups_back(buffer: Buffer) -> None:
    roles = Roles(buffer, max_refill=1)
    with roles.attempt():
        roles.plan()
        kept, dropped = roles.explore()
        roles.decide()
        buffer.sql(
            "UPDATE rft.experience SET reward = 5 WHERE group_id = %s", [dropped]
        )  # decided again: dropped this time
        roles.decide(keep=lambda row: False)
        assert roles.group(dropped)["trainable"] is False
    with roles.attempt() as again:
        batch = again.draw(1, 1, timeout_s=5)
        assert drawn(batch) == [kept]
        assert again.draw(2, 1, timeout_s=0.1) is None


def test_a_batch_given_back_was_never_drawn(buffer: Buffer) -> None:
    roles = Roles(buffer)
    with roles.attempt() as attempt:
        roles.work()
        batch = attempt.draw(1, 2, timeout_s=5)
        assert batch is not None
        attempt.release(batch)
        assert buffer.sql("SELECT count(*) AS n FROM rft.draw")["n"].to_pylist() == [0]
        assert drawn(attempt.draw(1, 2, timeout_s=5)) == drawn(batch)


def test_a_batch_that_is_part_of_the_history_is_not_given_back(buffer: Buffer) -> None:
    """Neither once its step is recorded, nor if only a checkpoint contains it."""
    roles = Roles(buffer, batch_groups=1, offset=2)
    with roles.attempt() as attempt:
        roles.work()
        history = [
            roles.train(attempt, 1),
            drawn(attempt.draw(2, 1, timeout_s=5)),
            drawn(attempt.draw(3, 1, timeout_s=5)),
        ]
        with pytest.raises(RftError, match="batch of step 1 cannot be released: the step is recorded as done"):
            attempt.release_step(1)
        attempt.commit_checkpoint(2, "/checkpoint/2")
        with pytest.raises(
            RftError, match="batch of step 2 cannot be released: the step is part of the checkpoint of step 2"
        ):
            attempt.release_step(2)
        attempt.release_step(3)
        assert [drawn(attempt.draw(step, 1, timeout_s=5)) for step in (1, 2, 3)] == history


def test_a_batch_with_damaged_arrays_stays_part_of_the_history(buffer: Buffer) -> None:
    """Another rank reads it late; nothing is drawn in the place of what was trained on."""
    roles = Roles(buffer)
    with roles.attempt() as attempt:
        roles.work()
        groups = roles.train(attempt, 1)
        for file in Path(buffer.config.segments or "").iterdir():
            file.write_bytes(bytes(file.stat().st_size))
        with (
            rftdata.open(buffer.config) as elsewhere,
            elsewhere.join_attempt(roles.run_id, attempt.attempt_id) as late,
            pytest.raises(SegmentCorruptError),
        ):
            late.draw(1, 2, timeout_s=5)
        found = buffer.sql("SELECT DISTINCT item_id FROM rft.draw WHERE trainer_step = 1 ORDER BY 1")
        assert found["item_id"].to_pylist() == groups


@pytest.mark.parametrize("selected", [False, True])
def test_two_ranks_of_a_step_agree_on_an_empty_batch(buffer: Buffer, selected: bool) -> None:
    """Groups that become ready after the first rank has learned that none will come are for a later step."""
    roles = Roles(buffer, batch_groups=1)
    if selected:
        roles.insert(own_group())
    run = selecting(buffer, "SELECT experience_id FROM rft.experience", "selected") if selected else roles.run
    can_be_drawn = "UPDATE rft.worklist SET available = %s WHERE run_id = %s AND consumer = 'selection'"
    with buffer.attempt(run) as attempt:
        if selected:
            buffer.sql(can_be_drawn, [False, run.run_id])
        else:
            roles.publish(attempt, 0)
            roles.work(keep=lambda row: False)
        first = attempt.draw(1, 1, timeout_s=5)
        assert first is not None and len(first) == 0 and first.short_reason
        if selected:
            buffer.sql(can_be_drawn, [True, run.run_id])
        else:
            roles.insert(own_group())
            roles.decide()
        with buffer.join_attempt(run, attempt.attempt_id) as rank:
            second = rank.draw(1, 1, timeout_s=5)
            assert second is not None and (len(second), second.short_reason) == (0, first.short_reason)
        attempt.release_step(1)
        assert len(attempt.draw(1, 1, timeout_s=5) or ()) > 0


def test_a_chain_that_drops_everything_ends_in_skipped_steps_with_the_reason(buffer: Buffer) -> None:
    roles = Roles(buffer, max_refill=3, steps=3)
    with roles.attempt() as attempt:
        for step in (1, 2, 3):
            assert roles.work(keep=lambda row: False) == 5
            batch = attempt.draw(step, 2, timeout_s=5)
            assert batch is not None and len(batch) == 0 and batch.rows["reward"].to_pylist() == []
            assert batch.lengths.tolist() == [] and batch.packed("token_ids").tolist() == []
            roles.publish(attempt, step)
            attempt.record_step(step, batch, wait_seconds=0, train_seconds=0, publish_seconds=0, metrics={})
        assert roles.plan() == 0
    steps = buffer.sql(
        "SELECT outcome::text AS outcome, reason FROM rft.v_train_step ORDER BY trainer_step"
    ).to_pylist()
    assert [row["outcome"] for row in steps] == ["skipped"] * 3
    assert {row["reason"] for row in steps} == {
        "0 of 2 groups survived: 2 planned and 3 refilled, explorer.max_refill is used up"
    }


def test_a_chain_that_drops_nine_of_ten_trains_on_what_survives(buffer: Buffer) -> None:
    roles = Roles(buffer, max_refill=8, steps=4, batch_groups=2)
    trained: list[int] = []
    with roles.attempt() as attempt:
        for step in range(1, 5):
            roles.work(keep=lambda row: row["group_id"] % 10 == 0)
            batch = attempt.draw(step, 2, timeout_s=5)
            assert batch is not None
            trained += sorted(set(batch.rows["group_id"].to_pylist()))
            roles.publish(attempt, step)
            attempt.record_step(
                step, batch, wait_seconds=0, train_seconds=0, publish_seconds=0, metrics={"nan": float("nan")}
            )
    assert trained == [10, 20, 30, 40]
    reasons = buffer.sql(
        "SELECT outcome::text AS outcome, num_groups, reason FROM rft.v_train_step ORDER BY trainer_step"
    ).to_pylist()
    assert [row["num_groups"] for row in reasons] == [1, 1, 1, 1]
    assert all("1 of 2 groups survived" in row["reason"] for row in reasons)


def test_groups_ready_under_another_pipeline_are_decided_again_after_a_resume(buffer: Buffer) -> None:
    """Drawn as they are, they would yield no rows: their verdicts are the old chain's."""
    roles = Roles(buffer)
    with roles.attempt():
        roles.work()
    buffer.sql("UPDATE rft.run SET pipeline_version = 'p2'")
    with roles.attempt() as attempt:
        assert attempt.draw(1, 2, timeout_s=0.1) is None
        with pytest.raises(FencedError, match="another pipeline version"):
            roles.decide(version="p1")
        assert attempt.draw(1, 2, timeout_s=0.1) is None
        buffer.sql("UPDATE rft.worklist SET available = true, claimed_by = NULL WHERE consumer = 'pipeline'")
        roles.decide(version="p2")
        assert roles.plan() == 0
        assert len(drawn(attempt.draw(1, 2, timeout_s=5))) == 2
    assert buffer.sql("SELECT DISTINCT pipeline_version AS v FROM rft.verdict ORDER BY 1")["v"].to_pylist() == [
        "p1",
        "p2",
    ]


def test_a_run_on_stored_experiences_ends_when_they_are_used_up(buffer: Buffer) -> None:
    roles = Roles(buffer, batch_groups=2)
    buffer.sql("UPDATE rft.run SET mode = 'train'")
    roles.insert(own_group(task_key="a"), own_group(task_key="b"), own_group(task_key="c"))
    roles.decide()
    with roles.attempt() as attempt:
        assert len(drawn(attempt.draw(1, 2, timeout_s=5))) == 2
        last = attempt.draw(2, 2, timeout_s=5)
        assert last is not None and last.num_groups == 1
        assert last.short_reason == "1 of 2 groups survived: the stored experiences are used up"


def test_an_open_attempt_renews_its_lease(buffer: Buffer) -> None:
    roles = Roles(buffer)
    is_held = "SELECT lease_until > now() AS is_held FROM rft.run_attempt"
    with roles.attempt(lease_s=9):  # it is renewed every three seconds
        expire(roles)
        wait_until(lambda: buffer.sql(is_held)["is_held"].to_pylist() == [True], "a renewed lease")
    with roles.attempt():
        pass


def test_a_trainer_that_stands_still_inside_a_transaction_does_not_hold_up_the_next(buffer: Buffer) -> None:
    roles = Roles(buffer)
    started: list[Attempt] = []
    successor = threading.Thread(target=lambda: started.append(roles.attempt()), daemon=True)

    def stand_still(attempt: Attempt) -> None:
        with attempt.transaction():
            successor.start()
            successor.join(PATIENCE_S)
            assert started, "the new attempt waits for the transaction of the old one"

    with own_lease(roles) as attempt:
        expire(roles)
        with pytest.raises(BufferUnavailableError, match="idle-in-transaction"):
            stand_still(attempt)
        with pytest.raises(FencedError):
            attempt.publish(1, method="checkpoint", uri="/w", num_bytes=0, checksum="")
    started[0].close()


def test_work_of_a_killed_explorer_is_planned_again_by_the_next_attempt(buffer: Buffer) -> None:
    roles = Roles(buffer)
    with roles.attempt():
        roles.plan()
        lost = roles.claim()
    roles.database.run("stop_worker", worker_id=roles.worker_id, error="killed")
    with roles.attempt():
        buffer.sql("UPDATE rft.worker SET stopped_at = NULL")
        again = roles.claim()
    assert [group.group_id for group in again] == [group.group_id for group in lost]
    assert all(a.claim_token > b.claim_token for a, b in zip(again, lost, strict=True))


def test_a_fenced_trainer_can_neither_end_the_run_nor_forget_a_checkpoint_nor_ask_for_evaluations(
    buffer: Buffer,
) -> None:
    roles = Roles(buffer)
    old = own_lease(roles)
    checkpoint = old.commit_checkpoint(0, "/checkpoints/0")
    expire(roles)
    with roles.attempt():
        for act in (
            lambda: old.finish("done"),
            lambda: old.forget_checkpoint(checkpoint),
            lambda: plan_evaluations(
                old,
                policy_version_id=1,
                trainer_step=0,
                purpose="validation",
                tasksets=["set0"],
                decodings=["greedy"],
                uri="/weights",
                checksum="0",
            ),
        ):
            with pytest.raises(FencedError):
                act()
        state = buffer.sql("SELECT status::text AS status FROM rft.run").to_pylist()
        assert state == [{"status": "running"}]
        assert buffer.sql("SELECT count(*) AS n FROM rft.checkpoint WHERE deleted_at IS NULL")["n"].to_pylist() == [1]


def test_a_label_in_flight_while_a_batch_is_given_back_is_not_lost(buffer: Buffer) -> None:
    """The label commits after the release has looked for labels; it must then find the group released, and reopen it."""
    roles = Roles(buffer, batch_groups=1)
    with roles.attempt() as attempt:
        roles.work()
        batch = attempt.draw(1, 1, timeout_s=5)
        (group_id,) = drawn(batch)
        with psycopg.connect(buffer.config.uri, autocommit=True) as other:
            relabel = threading.Thread(
                target=other.execute, args=["UPDATE rft.experience SET reward = 0.9 WHERE group_id = %s", [group_id]]
            )
            with attempt.transaction() as connection:
                connection.execute("SET LOCAL idle_in_transaction_session_timeout = 0")  # the test may be slow
                execute(connection, "release_draws", run_id=roles.run_id, attempt_id=attempt.attempt_id, step=1)
                relabel.start()
                wait_for_waiting(buffer, 1, behind=connection.info.backend_pid)  # for the group
                execute(connection, "reopen_stale_groups", run_id=roles.run_id)
            relabel.join()
        assert roles.group(group_id)["status"] == "sealed"
        assert roles.decide() == [group_id]
        again = attempt.draw(1, 1, timeout_s=5)
        assert again is not None and set(again.rows["reward"].to_pylist()) == {0.9}


def test_groups_sampled_by_a_policy_that_this_history_never_had_age_from_its_checkpoint(buffer: Buffer) -> None:
    roles = Roles(buffer, batch_groups=1, offset=5, steps=12, max_staleness=2)
    with roles.attempt() as attempt:
        attempt.commit_checkpoint(0, "/checkpoints/0")
        roles.publish(attempt, 5)
        roles.plan()
        roles.explore(count=2)
        roles.decide()
        late = roles.claim(1)
    with roles.attempt(publish=False) as attempt:
        roles.insert(*[roles.result(group, [0.0, 1.0]) for group in late])
        roles.decide()
        steps = buffer.sql("SELECT DISTINCT policy_step FROM rft.worklist WHERE consumer = 'trainer'", [])
        assert steps["policy_step"].to_pylist() == [0]
