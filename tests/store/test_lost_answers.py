"""Answers of transactions that are lost on the line: nothing is done twice, and nothing stays undone or claimed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rftdata import Buffer
from rftdata.planning.claims import claim_groups
from rftdata.training.attempt import Attempt
from rftdata.training.evaluations import claim_evaluation, plan_evaluations
from tests.support.lossy_line import LossyLine
from tests.support.store_roles import LEASE_S, Roles
from tests.support.waiting import PATIENCE_S


def lost(line: LossyLine, text: str, action: Callable[[], Any]) -> Any:
    """What an action returns; the first answer to a transaction with a text is lost."""
    with line.losing_one(text):
        return action()


def count(buffer: Buffer, table: str) -> int:
    return int(buffer.sql(f"SELECT count(*) AS n FROM rft.{table}")["n"][0].as_py())


def test_a_claim_whose_answer_was_lost_leaves_no_group_claimed_for_ever(line: LossyLine, through: Buffer) -> None:
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


def test_a_claim_of_verdicts_or_of_an_evaluation_whose_answer_was_lost_comes_back(
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

        def record() -> None:
            attempt.record_step(1, batch, wait_seconds=0, train_seconds=0, publish_seconds=0, metrics={})

        lost(line, "COMMIT", record)
        lost(line, "COMMIT", lambda: attempt.commit_checkpoint(1, "/c/1"))
        assert (count(through, "train_step"), count(through, "checkpoint")) == (1, 1)
        lost(line, "COMMIT", lambda: attempt.finish("done"))
        assert through.find_run(roles.run_id).status == "finished"


def publish(attempt: Attempt, step: int) -> int:
    return attempt.publish(step, method="memory", uri=f"/w/{step}", num_bytes=1, checksum="0")


def test_a_plan_whose_answer_was_lost_is_not_made_twice(line: LossyLine, through: Buffer) -> None:
    roles = Roles(through)
    with roles.attempt():
        assert lost(line, "COMMIT", roles.plan) == 0  # it was made the first time
        assert roles.planned() == [(0, 2)]
        assert [key for _, key in roles.task_order()] == ["1", "2"]
