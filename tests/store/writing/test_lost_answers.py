"""Answers of transactions that are lost on the line: nothing is done twice, and nothing stays undone or claimed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rftdata import Buffer
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.batch import Batch
from rftdata.attempts.evaluations import claim_evaluation, plan_evaluations
from rftdata.errors import FencedError
from rftdata.pipeline.queue import claim_sealed_groups
from rftdata.planning.claims import claim_groups
from rftdata.workers.leases import release_lost_claims
from rftdata.workers.worker import Worker
from tests.support.lossy_line import LossyLine
from tests.support.store_roles import LEASE_S, Roles
from tests.support.waiting import PATIENCE_S


def lost(line: LossyLine, text: str, action: Callable[[], Any]) -> Any:
    """What an action returns; the first answer to a transaction with a text is lost."""
    with line.losing_one(text):
        return action()


def count(buffer: Buffer, table: str) -> int:
    return int(buffer.sql(f"SELECT count(*) AS n FROM rft.{table}")["n"][0].as_py())


def test_a_claim_whose_answer_was_lost_leaves_no_group_claimed_forever(line: LossyLine, through: Buffer) -> None:
    roles = Roles(through, batch_groups=4)
    with roles.attempt():
        roles.plan()

        def claim(held: list[int], number: int) -> list[int]:
            return [
                group.group_id
                for group in claim_groups(
                    roles.run, roles.worker_id, policy_step=0, last_step=0, count=number, lease_s=LEASE_S, held=held
                )
            ]

        first = claim([], 1)
        second = lost(line, "SET status = 'claimed'", lambda: claim(first, 1))
        assert len(second) == 1 and second != first
        rest = claim([*first, *second], 9)
        assert len({*first, *second, *rest}) == 4


def test_a_claim_of_verdicts_or_of_an_evaluation_whose_answer_was_lost_is_released(
    line: LossyLine, through: Buffer
) -> None:
    roles = Roles(through)
    with roles.attempt() as attempt:
        roles.plan()
        ids = roles.explore()
        batch = lost(line, "SET available = false, claimed_by", roles.claim_sealed)
        assert batch is not None and sorted(batch.group_ids) == sorted(ids)
        assert lost(line, "COMMIT", lambda: roles.commit(batch)) == []  # it was done the first time
        assert count(through, "verdict") == 4
        assert [row["status"] for row in map(roles.group, ids)] == ["ready", "ready"]
        assert roles.version is not None
        asked = {"policy_version_id": roles.version, "trainer_step": 0, "purpose": "validation", "tasksets": ["set0"]}
        lost(line, "COMMIT", lambda: plan_evaluations(attempt, **asked, decodings=["greedy"], uri="/w", checksum="0"))
        assert count(through, "evaluation") == 1

        def claim() -> Any:
            return claim_evaluation(roles.run, roles.worker_id, lease_s=LEASE_S)

        assert lost(line, "UPDATE rft.evaluation e", claim).taskset == "set0"


def test_a_trainer_writes_nothing_twice_when_answers_are_lost(line: LossyLine, through: Buffer) -> None:
    roles = Roles(through)
    with roles.attempt() as attempt:
        roles.work()
        batch = lost(line, "rft.draw_groups", lambda: attempt.draw(1, 2, timeout_s=PATIENCE_S))
        assert len(batch) == 4 and count(through, "draw") == 4
        before = count(through, "policy_version")
        version = lost(line, "COMMIT", lambda: publish(attempt, 1))
        assert count(through, "policy_version") == before + 1
        newest = through.sql("SELECT max(policy_version_id) AS v FROM rft.policy_version")["v"].to_pylist()
        assert newest == [version]
        assert publish(attempt, 1) == version + 1  # asked for again, it is published again

        lost(line, "COMMIT", lambda: record(attempt, batch))
        lost(line, "COMMIT", lambda: attempt.commit_checkpoint(1, "/c/1"))
        assert (count(through, "train_step"), count(through, "checkpoint")) == (1, 1)
        lost(line, "COMMIT", lambda: attempt.finish("done"))
        assert through.find_run(roles.run_id).status == "finished"


def publish(attempt: Attempt, step: int) -> int:
    return attempt.publish(step, method="memory", uri=f"/w/{step}", num_bytes=1, checksum="0")


def record(attempt: Attempt, batch: Batch) -> None:
    attempt.record_step(1, batch, wait_seconds=0, train_seconds=0, publish_seconds=0, metrics={})


def test_a_plan_whose_answer_was_lost_is_not_made_twice(line: LossyLine, through: Buffer) -> None:
    roles = Roles(through)
    with roles.attempt():
        assert lost(line, "COMMIT", roles.plan) == 0  # it was made the first time
        assert roles.planned() == [(0, 2)]
        assert [key for _, key in roles.task_order()] == ["1", "2"]


VERBS_OF_ATTEMPTS: dict[str, tuple[str, Callable[[Attempt, Batch], object]]] = {
    "publish": ("COMMIT", lambda attempt, _: publish(attempt, 1)),
    "checkpoint": ("COMMIT", lambda attempt, _: attempt.commit_checkpoint(1, "/c/1")),
    "record": ("COMMIT", lambda attempt, batch: record(attempt, batch)),
    "draw": ("rft.draw_groups", lambda attempt, _: attempt.draw(2, 2, timeout_s=PATIENCE_S)),
}


@pytest.mark.parametrize("verb", VERBS_OF_ATTEMPTS)
def test_what_a_trainer_commits_after_another_has_taken_its_place_was_never_done(
    line: LossyLine, buffer: Buffer, through: Buffer, verb: str
) -> None:
    text, act = VERBS_OF_ATTEMPTS[verb]
    roles = Roles(buffer, offset=1)
    old = roles.attempt(buffer=through)
    roles.work()
    batch = old.draw(1, 2, timeout_s=PATIENCE_S)
    assert batch is not None
    errors: list[BaseException] = []

    def late() -> None:
        try:
            act(old, batch)
        except FencedError as error:
            errors.append(error)

    thread = threading.Thread(target=late)
    with line.holding(text) as held:
        thread.start()
        assert held.wait(PATIENCE_S)
        buffer.sql("UPDATE rft.run_attempt SET lease_until = now() - interval '1 s'")
        new = roles.attempt(publish=False)
    thread.join()
    assert len(errors) == 1
    for table in ("policy_version", "checkpoint", "train_step", "draw"):
        rows = buffer.sql(f"SELECT trainer_step FROM rft.{table} WHERE attempt_id = %s", [old.attempt_id]).to_pylist()
        assert {row["trainer_step"] for row in rows} <= {"policy_version": {0}, "draw": {1}}.get(table, set()), table
    new.close()


@pytest.mark.parametrize(
    "text", ["SET status = 'claimed', claimed_by", "SET available = false, claimed_by", "UPDATE rft.evaluation e"]
)
def test_a_claim_that_arrives_after_its_worker_was_recorded_as_gone_has_no_effect(
    line: LossyLine, buffer: Buffer, through: Buffer, text: str
) -> None:
    roles = Roles(through, batch_groups=2)
    with (
        roles.attempt(buffer=buffer) as attempt,
        ThreadPoolExecutor(1) as other,
        Worker(roles.run, "explorer") as worker,
    ):
        assert roles.version is not None
        asked = {"policy_version_id": roles.version, "trainer_step": 0, "purpose": "validation", "tasksets": ["set0"]}
        plan_evaluations(attempt, **asked, decodings=["greedy"], uri="/w", checksum="0")
        roles.plan()
        roles.explore(count=1)
        claims: dict[str, Callable[[], object]] = {
            "SET status": lambda: claim_groups(
                roles.run, worker.worker_id, policy_step=0, last_step=0, count=1, lease_s=LEASE_S, held=[]
            ),
            "SET available": lambda: claim_sealed_groups(roles.run, worker.worker_id, count=1, lease_s=LEASE_S),
            "UPDATE rft.evaluation": lambda: claim_evaluation(roles.run, worker.worker_id, lease_s=LEASE_S),
        }
        claim = next(claim for start, claim in claims.items() if text.startswith(start))
        with line.holding(text) as held:
            late = other.submit(claim)
            assert held.wait(PATIENCE_S)
            buffer.database.run("stop_worker", worker_id=worker.worker_id, error="the process is gone")
            release_lost_claims(buffer.find_run(roles.run_id))
        assert not late.result()
        held_by = (
            "SELECT (SELECT count(*) FROM rft.rollout_group WHERE claimed_by = %(w)s AND status = 'claimed')"
            " + (SELECT count(*) FROM rft.worklist WHERE claimed_by = %(w)s) + (SELECT count(*) FROM rft.evaluation WHERE claimed_by = %(w)s) AS n"
        )
        assert buffer.sql(held_by, {"w": worker.worker_id})["n"].to_pylist() == [0]
        worker.set_state("lives")  # its heartbeat shows that it was recorded as gone by mistake
        assert claim()
