"""A trainer that lost its run while it waits for others: it ends from every wait, however long that would have lasted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rftcore.trainer.shared_device import TrainerDevice
from rftdata import Buffer
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.evaluations import plan_evaluations
from rftdata.errors import FencedError
from rftdata.workers.shared_device import SharedDevice
from rftdata.workers.worker import Worker
from tests.support.store_roles import Roles, taken_over
from tests.support.waiting import PATIENCE_S, wait_until

Wait = Callable[[Roles, Attempt, Worker], object]


def draw(roles: Roles, attempt: Attempt, trainer: Worker) -> object:
    return attempt.draw(1, 2, waiting=lambda reason: trainer.set_state("waits", "groups"))


def draw_as_another_rank(roles: Roles, attempt: Attempt, trainer: Worker) -> object:
    with roles.buffer.join_attempt(roles.run, attempt.attempt_id) as joined:
        return draw(roles, joined, trainer)


def device_that_another_has(roles: Roles, attempt: Attempt, trainer: Worker) -> object:
    with Worker(roles.run, "explorer") as explorer:
        engine = SharedDevice(roles.run, explorer.worker_id, "cpu")
        assert engine.take()
        device = SharedDevice(roles.run, trainer.worker_id, "cpu", attempt.check)
        return TrainerDevice(roles.run, trainer, device, offload=False).take(lambda: False)


def evaluations_before_the_device(roles: Roles, attempt: Attempt, trainer: Worker) -> object:
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
    return device_that_another_has(roles, attempt, trainer)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.mark.parametrize("wait", [draw, draw_as_another_rank, device_that_another_has, evaluations_before_the_device])
def test_a_trainer_whose_run_was_taken_over_stops_waiting(buffer: Buffer, pool: ThreadPoolExecutor, wait: Wait) -> None:
    roles = Roles(buffer)
    with roles.attempt() as attempt, Worker(roles.run, "trainer") as trainer:
        life = pool.submit(wait, roles, attempt, trainer)
        wait_until(lambda: buffer.sql("SELECT 1 AS n FROM rft.worker WHERE waiting_for IS NOT NULL").num_rows == 1)
        attempt.check()
        with taken_over(buffer, roles.run), pytest.raises(FencedError):
            life.result(PATIENCE_S)
