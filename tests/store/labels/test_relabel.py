"""Relabelling by plain SQL during the run: counted in every batch drawn afterwards, complete in its history."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import psycopg
import pytest

from operators.chain.build import build_chain
from operators.chain.chain import Chain
from rftcore.pipeline.group_decisions import decide_groups
from rftdata import Buffer, Group, Rollout
from rftdata.pipeline.verdicts import commit_verdicts
from rftdata.planning.claims import ClaimedGroup
from tests.store.pipeline.test_review_locks import wait_for_waiting
from tests.support.store_roles import Roles, tokens
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def client(buffer: Buffer) -> Iterator[psycopg.Connection]:
    """Any SQL client."""
    with psycopg.connect(buffer.config.uri, autocommit=True) as connection:
        yield connection


@pytest.fixture
def chain() -> Chain:
    return build_chain([{"drop_zero_variance_groups": {}}], min_group_size=2)


def run_pipeline(roles: Roles, chain: Chain) -> list[int]:
    batch = roles.claim_sealed()
    if batch is None:
        return []
    verdicts = decide_groups(chain, batch)
    return commit_verdicts(roles.run, roles.worker_id, "p1", batch, verdicts).decided


def experiences(roles: Roles, group_id: int) -> list[int]:
    ids: list[int] = roles.buffer.sql(
        "SELECT experience_id FROM rft.experience WHERE group_id = %s ORDER BY 1", [group_id]
    )["experience_id"].to_pylist()
    return ids


def all_zero_in_the_first(group: ClaimedGroup) -> list[float]:
    return [0.0, 0.0] if group.ordinal == 0 else [0.0, 1.0]


def test_a_relabelled_row_of_a_group_dropped_for_zero_variance_is_trained(
    buffer: Buffer, client: psycopg.Connection, chain: Chain
) -> None:
    roles = Roles(buffer, max_refill=1)
    with roles.attempt() as attempt:
        roles.plan()
        dropped, kept = roles.explore(all_zero_in_the_first)
        run_pipeline(roles, chain)
        assert roles.group(dropped)["trainable"] is False
        (verdict,) = buffer.sql(
            "SELECT DISTINCT stage, reason FROM rft.verdict WHERE group_id = %s AND NOT kept", [dropped]
        ).to_pylist()
        assert verdict["stage"] == "drop_zero_variance_groups" and "0" in verdict["reason"]
        assert attempt.draw(1, 2, timeout_s=0.1) is None

        first = experiences(roles, dropped)[0]
        client.execute("UPDATE rft.experience SET reward = 1 WHERE experience_id = %s", [first])
        assert attempt.draw(1, 2, timeout_s=0.1) is None  # its verdicts are stale until the pipeline has decided again
        assert run_pipeline(roles, chain) == [dropped]
        batch = attempt.draw(1, 2, timeout_s=5)
        assert batch is not None
        assert sorted(set(batch.rows["group_id"].to_pylist())) == [dropped, kept]
        used = dict(zip(batch.rows["experience_id"].to_pylist(), batch.rows["reward"].to_pylist(), strict=True))
        assert used[first] == 1.0
    row = buffer.sql(
        "SELECT state, reward, reward_sampled, num_labels FROM rft.v_experience WHERE experience_id = %s", [first]
    ).to_pylist()[0]
    assert row == {"state": "drawn", "reward": 1.0, "reward_sampled": 0.0, "num_labels": 1}


def test_the_history_shows_author_time_reason_and_statement(buffer: Buffer, client: psycopg.Connection) -> None:
    roles = Roles(buffer)
    with roles.attempt():
        roles.work()
    with client.transaction():
        client.execute("SELECT set_config('rft.author', 'ada', true), set_config('rft.reason', 'wrong unit', true)")
        client.execute("UPDATE rft.experience SET reward = 0.5 WHERE experience_id IN (1, 2)")
    client.execute("UPDATE rft.experience SET reward = 0.7, reward_final = true WHERE experience_id = 1")
    client.execute("UPDATE rft.experience SET reward = reward")
    rows = buffer.sql(
        "SELECT experience_id, old_value, new_value, author, reason, source::text AS source,"
        " session_user_name = session_user AS by_us,"
        " label_batch_id, final FROM rft.label ORDER BY label_id"
    ).to_pylist()
    assert [(row["experience_id"], row["old_value"], row["new_value"], row["final"]) for row in rows] == [
        (1, 0.0, 0.5, False),
        (2, 1.0, 0.5, False),
        (1, 0.5, 0.7, True),
    ]
    assert [(row["author"], row["reason"]) for row in rows[:2]] == [("ada", "wrong unit")] * 2
    assert rows[2]["author"] == "rft_owner" and rows[2]["reason"] is None
    assert {(row["source"], row["by_us"]) for row in rows} == {("sql", True)}
    assert rows[0]["label_batch_id"] == rows[1]["label_batch_id"] != rows[2]["label_batch_id"]


def test_facts_are_refused_with_a_hint_that_states_what_to_do(buffer: Buffer, client: psycopg.Connection) -> None:
    roles = Roles(buffer)
    with roles.attempt():
        roles.work()
    client.execute("UPDATE rft.experience SET reward = 1")
    for statement in (
        "UPDATE rft.experience SET response = 'other' WHERE experience_id = 1",
        "UPDATE rft.experience SET prompt_digest = 'other' WHERE experience_id = 1",
        "UPDATE rft.group_prompt SET prompt = 'other'",
        "DELETE FROM rft.group_prompt",
        "UPDATE rft.experience SET reward_sampled = 1",
        "UPDATE rft.experience SET reward = 1, num_response_tokens = 3",
        "DELETE FROM rft.experience",
        "TRUNCATE rft.experience",
        "UPDATE rft.rollout SET reward = 1",
        "UPDATE rft.label SET author = 'another person'",
        "DELETE FROM rft.label",
    ):
        with pytest.raises(psycopg.errors.IntegrityConstraintViolation, match="holds facts") as refused:
            client.execute(statement)
        assert "To correct a reward: UPDATE rft.experience SET reward" in str(refused.value.diag.message_hint)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e39"])
def test_a_reward_is_a_finite_number(buffer: Buffer, client: psycopg.Connection, value: str) -> None:
    roles = Roles(buffer)
    with roles.attempt():
        roles.work()
    with pytest.raises(psycopg.errors.CheckViolation):
        client.execute("UPDATE rft.experience SET reward = %s", [value])


def test_a_label_wins_over_the_verdict_in_flight(buffer: Buffer, client: psycopg.Connection, chain: Chain) -> None:
    roles = Roles(buffer)
    with roles.attempt() as attempt:
        roles.plan()
        first, second = roles.explore(all_zero_in_the_first)
        batch = roles.claim_sealed()
        assert batch is not None
        client.execute("UPDATE rft.experience SET reward = 1 WHERE experience_id = %s", [experiences(roles, first)[0]])
        assert roles.commit(batch, keep=lambda row: row["group_id"] == second) == [second]
        assert roles.group(first)["status"] == "sealed"
        assert run_pipeline(roles, chain) == [first]
        assert attempt.draw(1, 2, timeout_s=5) is not None
    kept = buffer.sql("SELECT group_id, kept FROM rft.verdict ORDER BY verdict_id").to_pylist()
    assert [(row["group_id"], row["kept"]) for row in kept] == [(second, True)] * 2 + [(first, True)] * 2


def test_a_label_that_commits_after_the_verdict_still_reopens_the_group(
    buffer: Buffer, client: psycopg.Connection
) -> None:
    """The label waits for the verdict's lock, and must then see the group as ready, not as it stood when the statement began."""
    roles = Roles(buffer)
    with roles.attempt() as attempt:
        roles.plan()
        roles.explore()
        batch = roles.claim_sealed()
        assert batch is not None
        with psycopg.connect(buffer.config.uri) as blocker:
            blocker.execute("SELECT FROM rft.rollout_group WHERE group_id = 1 FOR UPDATE")
            committing = threading.Thread(target=roles.commit, args=[batch])
            committing.start()
            wait_for_waiting(buffer, 1)
            labelling = threading.Thread(
                target=client.execute, args=["UPDATE rft.experience SET reward = 9 WHERE experience_id = 1"]
            )
            labelling.start()
            wait_for_waiting(buffer, 2)
        committing.join()
        labelling.join()
        assert roles.group(1)["status"] == "sealed"
        drawn = attempt.draw(1, 1, timeout_s=5)
        assert drawn is not None and set(drawn.rows["group_id"].to_pylist()) == {2}
        assert roles.decide() == [1]


def test_a_label_on_a_drawn_group_changes_no_history_but_lineage_reports_it(
    buffer: Buffer, client: psycopg.Connection
) -> None:
    roles = Roles(buffer)
    with roles.attempt() as attempt:
        roles.work()
        roles.train(attempt, 1)
        attempt.commit_checkpoint(1, "/checkpoint/1")
        before = buffer.sql("SELECT * FROM rft.draw ORDER BY draw_id")
        client.execute("UPDATE rft.experience SET reward = 0.25 WHERE experience_id = 1")
        assert buffer.sql("SELECT * FROM rft.draw ORDER BY draw_id").equals(before)
        assert roles.claim_sealed() is None
        lineage = buffer.sql("SELECT * FROM rft.v_lineage ORDER BY experience_id").to_pylist()
        assert [row["corrected_since"] for row in lineage] == [True, False, False, False]
        assert (lineage[0]["reward_used"], lineage[0]["reward_now"], lineage[0]["checkpoint_uri"]) == (
            0.0,
            0.25,
            "/checkpoint/1",
        )


def test_a_labelled_group_that_a_resume_returns_is_decided_on_first(buffer: Buffer, client: psycopg.Connection) -> None:
    roles = Roles(buffer)
    with roles.attempt() as attempt:
        roles.work()
        roles.train(attempt, 1)
        client.execute("UPDATE rft.experience SET reward = 0.25 WHERE experience_id = 1")
    with roles.attempt() as again:
        assert again.draw(1, 2, timeout_s=0.1) is None
        assert roles.decide() == [1]
        batch = again.draw(1, 2, timeout_s=5)
        assert batch is not None and batch.rows["reward"].to_pylist() == [0.25, 1.0, 0.0, 1.0]


def test_a_label_on_a_batch_that_is_given_back_is_decided_on_first(buffer: Buffer, client: psycopg.Connection) -> None:
    roles = Roles(buffer)
    with roles.attempt() as attempt:
        roles.work()
        batch = attempt.draw(1, 2, timeout_s=5)
        assert batch is not None
        client.execute("UPDATE rft.experience SET reward = 0.25 WHERE experience_id = 1")
        attempt.release(batch)
        assert attempt.draw(1, 2, timeout_s=0.1) is None
        assert roles.decide() == [1]
        assert attempt.draw(1, 2, timeout_s=5) is not None


def test_a_final_label_bypasses_shaping(buffer: Buffer, client: psycopg.Connection) -> None:
    roles = Roles(buffer, batch_groups=1)
    with roles.attempt() as attempt:
        roles.work()
        client.execute("UPDATE rft.experience SET reward = 0.9, reward_final = true WHERE experience_id = 1")
        batch = roles.claim_sealed()
        assert batch is not None
        halved = build_chain([{"sql": "SELECT * REPLACE (reward - 0.5 AS reward) FROM batch"}])
        commit_verdicts(roles.run, roles.worker_id, "p1", batch, decide_groups(halved, batch))
        drawn = attempt.draw(1, 1, timeout_s=5)
        assert drawn is not None and drawn.rows["reward"].to_pylist() == [0.9, 0.5]


def test_a_person_can_save_a_failed_rollout_with_a_reward(buffer: Buffer, client: psycopg.Connection) -> None:
    roles = Roles(buffer, batch_groups=1)
    with roles.attempt() as attempt:
        roles.plan()
        (group,) = roles.claim()
        failed = Rollout(1, "failed", None, [tokens(None, roles.version)], error="ValueError: no number")
        roles.insert(
            Group([Rollout(0, "ok", 1.0, [tokens(1.0, roles.version)]), failed], group.group_id, group.claim_token)
        )
        roles.decide()
        reasons = buffer.sql("SELECT stage, reason FROM rft.verdict WHERE NOT kept").to_pylist()
        assert reasons == [{"stage": "outcome", "reason": "the rollout failed: ValueError: no number"}]
        client.execute("UPDATE rft.experience SET reward = 0.5 WHERE reward IS NULL")
        roles.decide()
        batch = attempt.draw(1, 1, timeout_s=5)
        assert batch is not None and batch.rows["reward"].to_pylist() == [1.0, 0.5]


def test_nothing_is_missed_when_the_first_id_commits_last(buffer: Buffer, client: psycopg.Connection) -> None:
    """The trap of a high-water mark: the label with the lower id appears after one with a higher id was acted on."""
    roles = Roles(buffer)
    with roles.attempt() as attempt:
        roles.work()
        with psycopg.connect(buffer.config.uri) as slow:
            slow.execute("UPDATE rft.experience SET reward = 7 WHERE experience_id = 1")
            client.execute("UPDATE rft.experience SET reward = 8 WHERE experience_id = 3")
            assert roles.decide() == [2]
        assert buffer.sql("SELECT experience_id FROM rft.label ORDER BY label_id")["experience_id"].to_pylist() == [
            1,
            3,
        ]
        assert roles.decide() == [1]
        batch = attempt.draw(1, 2, timeout_s=5)
        assert batch is not None and batch.rows["reward"].to_pylist() == [7.0, 1.0, 8.0, 1.0]


def test_a_group_whose_id_is_lower_but_commits_later_is_neither_missed_by_pipeline_nor_by_trainer(
    buffer: Buffer,
) -> None:
    roles = Roles(buffer, offset=1)
    with roles.attempt() as attempt:
        roles.plan()
        claimed = roles.claim()
        roles.insert(*[roles.result(group, [0.0, 1.0]) for group in claimed[1:]])
        assert roles.decide() == [2, 3, 4]
        late = attempt.draw(1, 1, timeout_s=5)
        assert late is not None and set(late.rows["group_id"].to_pylist()) == {2}
        roles.insert(roles.result(claimed[0], [0.0, 1.0]))
        assert roles.decide() == [1]
        batch = attempt.draw(2, 2, timeout_s=5)
        assert batch is not None and sorted(set(batch.rows["group_id"].to_pylist())) == [1, 3]


def test_labels_verdicts_and_draws_at_the_same_time_neither_deadlock_nor_lose_a_label(buffer: Buffer) -> None:
    """Labellers change rewards in random order while groups are decided and drawn: a batch uses the labels its verdicts saw."""
    roles = Roles(buffer, batch_groups=6, steps=6, offset=6, max_staleness=6)
    stop, busy = threading.Event(), threading.Barrier(4)
    errors: list[Exception] = []

    def label(seed: int) -> None:
        rng = random.Random(seed)
        try:
            with psycopg.connect(buffer.config.uri, autocommit=True) as connection:
                for number in range(
                    300
                ):  # so that it ends on a machine on which they are faster than the pipeline and the trainer
                    if number == 3:
                        busy.wait(PATIENCE_S)
                    if stop.wait(0.02):
                        return
                    first = rng.randrange(1, 68)
                    # Several rows in the order of their keys; any other order could end in a deadlock with another labeller.
                    connection.execute(
                        "UPDATE rft.experience SET reward = %s WHERE experience_id BETWEEN %s AND %s + 5",
                        [rng.random(), first, first],
                    )
        except (psycopg.Error, threading.BrokenBarrierError) as error:
            errors.append(error)

    with roles.attempt() as attempt:
        roles.work()
        threads = [threading.Thread(target=label, args=[seed]) for seed in range(3)]
        for thread in threads:
            thread.start()
        try:
            busy.wait(PATIENCE_S)
            for step in range(1, 7):
                batch = None
                while batch is None:
                    roles.decide()
                    batch = attempt.draw(step, 6, timeout_s=0.05)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert errors == []
    wrong = buffer.sql("""
        SELECT d.experience_id, d.reward_used FROM rft.draw d JOIN rft.experience e USING (experience_id)
        JOIN LATERAL (
            SELECT label_cut FROM rft.verdict WHERE experience_id = d.experience_id ORDER BY verdict_id DESC LIMIT 1) v ON true
        WHERE d.reward_used IS DISTINCT FROM coalesce((
            SELECT l.new_value FROM rft.label l WHERE l.experience_id = d.experience_id AND l.label_id <= v.label_cut
            ORDER BY l.label_id DESC LIMIT 1), e.reward_sampled)""")
    assert wrong.num_rows == 0
    assert buffer.sql("SELECT count(*) AS n FROM rft.label")["n"].to_pylist()[0] > 20
    assert buffer.sql("SELECT count(*) AS n FROM rft.draw")["n"].to_pylist() == [72]
