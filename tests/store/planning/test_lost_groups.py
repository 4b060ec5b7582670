"""Groups and evaluations on which explorers crash: claimed again, then alone, then sealed with the missing rollouts as failed."""

from __future__ import annotations

import itertools

import pytest

from rftdata import Buffer
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.evaluations import claim_evaluation, plan_evaluations
from rftdata.errors import FencedError
from rftdata.planning.claims import claim_groups, release_groups
from rftdata.workers.leases import release_lost_claims
from tests.store.pipeline.test_pipeline_worker import rows
from tests.support.store_roles import Roles

WHY = "the workflow 'walk' blocks on task set0/1\nFile walk.py, line 3"
PIDS = itertools.count(1)


def explorer(roles: Roles) -> int:
    return int(
        roles.database.fetch(
            "insert_worker",
            run_id=roles.run_id,
            role="explorer",
            host="there",
            pid=next(PIDS),
            pid_space="",
            pid_started=0,
        )[0]["worker_id"]
    )


def claims(roles: Roles, worker: int, count: int = 9) -> list[int]:
    groups = claim_groups(roles.run, worker, policy_step=0, last_step=0, count=count, lease_s=60)
    return [group.group_id for group in groups]


def plan_evaluation(attempt: Attempt) -> None:
    plan_evaluations(
        attempt,
        policy_version_id=1,
        trainer_step=0,
        purpose="validation",
        tasksets=["set0"],
        decodings=["greedy"],
        uri="/weights",
        checksum="0",
    )


def end_worker(roles: Roles, worker: int, *, crashed: bool = True) -> None:
    (row,) = rows(roles.buffer, f"SELECT host, pid, pid_space FROM rft.worker WHERE worker_id = {worker}")
    roles.database.run("end_worker_of_process", run_id=roles.run_id, **row, error=WHY, crashed=crashed)
    release_lost_claims(roles.run)


def die_with(roles: Roles, *, crashed: bool = True) -> list[int]:
    """Claim what there is and end with it; the groups."""
    worker = explorer(roles)
    groups = claims(roles, worker)
    end_worker(roles, worker, crashed=crashed)
    return groups


def test_the_third_explorer_that_a_group_takes_along_is_the_last(buffer: Buffer) -> None:
    roles = Roles(buffer, batch_groups=3, group_size=2)
    with roles.attempt() as attempt:
        roles.plan()
        assert die_with(roles) == [1, 2, 3]
        assert die_with(roles) == [1, 2, 3]  # the first time may have been chance
        worker = explorer(roles)
        assert claims(roles, worker) == [1]  # from now on each alone
        assert claims(roles, worker) == []
        (late,) = claim_groups(roles.run, explorer(roles), policy_step=0, last_step=0, count=1, lease_s=60)
        assert late.group_id == 2  # by another explorer, which holds nothing else
        end_worker(roles, worker)
        assert roles.insert(roles.result(late, [0.0, 1.0])) == [2]  # it survived
        assert roles.explore() == [3]

        group = rows(buffer, "SELECT status::text AS status, trainable FROM rft.rollout_group WHERE group_id = 1")
        assert group == [{"status": "sealed", "trainable": True}]
        failed = rows(
            buffer,
            "SELECT rollout_index AS i, outcome::text AS outcome, error FROM rft.rollout WHERE group_id = 1 ORDER BY 1",
        )
        error = "the explorer did not survive this group 3 times: the workflow 'walk' blocks on task set0/1"
        assert failed == [{"i": index, "outcome": "failed", "error": error} for index in range(2)]
        assert sorted(roles.decide()) == [1, 2, 3]
        assert roles.group(1)["closed_reason"] == "no rollout of the group succeeded"
        assert roles.train(attempt, 1) == [2, 3]  # the run continues with one group less


def test_its_place_is_refilled_and_selectors_learn_that_it_ended(buffer: Buffer) -> None:
    roles = Roles(buffer, batch_groups=1, max_refill=1)
    with roles.attempt() as attempt:
        roles.plan()
        assert [die_with(roles) for _ in range(3)] == [[1]] * 3
        assert die_with(roles) == []
        roles.decide()
        assert roles.plan() == 1
        roles.work()
        assert roles.train(attempt, 1) == [2]
        seen = rows(
            buffer, "SELECT ordinal, successes, trials FROM rft.task_observation ORDER BY observation_id LIMIT 1"
        )
        assert seen == [{"ordinal": 0, "successes": 0.0, "trials": 0.0}]


def test_an_explorer_that_was_taken_for_dead_cannot_write_into_a_sealed_group(buffer: Buffer) -> None:
    roles = Roles(buffer, batch_groups=1)
    with roles.attempt():
        roles.plan()
        die_with(roles), die_with(roles)
        (slow,) = roles.claim()
        end_worker(roles, roles.worker_id)
        with pytest.raises(FencedError):
            roles.insert(roles.result(slow, [0.0, 1.0]))
        errors = rows(buffer, "SELECT DISTINCT error FROM rft.rollout")
        assert errors == [
            {"error": "the explorer did not survive this group 3 times: the workflow 'walk' blocks on task set0/1"}
        ]


def test_explorers_that_are_killed_or_stop_responding_do_not_count_against_their_groups(buffer: Buffer) -> None:
    roles = Roles(buffer, batch_groups=2)
    with roles.attempt() as attempt:
        plan_evaluation(attempt)
        roles.plan()
        for _ in range(4):
            assert die_with(roles, crashed=False) == [1, 2]
            assert claims(roles, explorer(roles)) == [1, 2]
            worker = explorer(roles)
            assert claim_evaluation(roles.run, worker, lease_s=60) is not None
            for table in ("rollout_group", "evaluation"):
                buffer.sql(f"UPDATE rft.{table} SET lease_until = now() - interval '1 s'")
            assert release_lost_claims(roles.run) == 3
        assert sorted(roles.explore()) == [1, 2]
        assert rows(buffer, "SELECT max(num_lost) AS n FROM rft.rollout_group") == [{"n": 0}]
        assert rows(buffer, "SELECT num_lost AS n, status::text FROM rft.evaluation") == [{"n": 0, "status": "planned"}]


def test_a_resumed_run_knows_which_groups_took_explorers_along(buffer: Buffer) -> None:
    roles = Roles(buffer, batch_groups=2)
    with roles.attempt():
        roles.plan()
        assert [die_with(roles), die_with(roles)] == [[1, 2]] * 2
    with roles.attempt():
        assert [die_with(roles), die_with(roles)] == [[1], [2]], "each alone"
        assert rows(buffer, "SELECT DISTINCT status::text FROM rft.rollout_group WHERE group_id < 3") == [
            {"status": "sealed"}
        ]


def test_a_suspect_gets_its_turn_by_an_explorer_that_is_never_idle(buffer: Buffer) -> None:
    roles = Roles(buffer, num_tasks=50, steps=9, batch_groups=3, interval=3)
    with roles.attempt():
        roles.plan()
        assert roles.planned() == [(0, 3), (1, 3), (2, 3)]
        buffer.sql("UPDATE rft.rollout_group SET num_lost = 2 WHERE explore_step = 1 AND group_id IN (4, 5)")
        worker = explorer(roles)

        def claim(count: int) -> list[int]:
            return [
                group.group_id
                for group in claim_groups(roles.run, worker, policy_step=0, last_step=2, count=count, lease_s=60)
            ]

        def finish(*groups: int) -> None:
            buffer.sql(
                f"UPDATE rft.rollout_group SET status = 'sealed' WHERE group_id IN ({', '.join(map(str, groups))})"
            )

        assert claim(2) == [1, 2]
        finish(1)
        assert claim(9) == [3]  # of an earlier step
        assert claim(9) == []  # and of no other, until its hands are empty
        finish(2, 3)
        assert claim(9) == [4]
        assert claim(9) == []
        finish(4)
        assert claim(9) == [5]
        finish(5)
        assert claim(9) == [6, 7, 8, 9]


def test_what_is_given_back_is_not_lost(buffer: Buffer) -> None:
    roles = Roles(buffer, batch_groups=2)
    with roles.attempt():
        roles.plan()
        for _ in range(4):
            worker = explorer(roles)
            assert claims(roles, worker) == [1, 2]
            assert release_groups(roles.run, worker) == 2
            end_worker(roles, worker)
        assert rows(buffer, "SELECT max(num_lost) AS n FROM rft.rollout_group") == [{"n": 0}]


def test_an_evaluation_that_three_explorers_do_not_survive_has_failed(buffer: Buffer) -> None:
    roles = Roles(buffer)
    with roles.attempt() as attempt:
        plan_evaluation(attempt)
        for _ in range(3):
            worker = explorer(roles)
            assert claim_evaluation(roles.run, worker, lease_s=60) is not None
            end_worker(roles, worker)
        assert claim_evaluation(roles.run, explorer(roles), lease_s=60) is None
        error = "the explorer did not survive this evaluation 3 times: the workflow 'walk' blocks on task set0/1"
        found = rows(buffer, "SELECT status::text AS status, error FROM rft.evaluation")
        assert found == [{"status": "failed", "error": error}]
