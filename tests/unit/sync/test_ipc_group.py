"""Weights through memory that trainer and engines share (`backend` ipc), between processes: the protocol is that of a GPU, the memory is the host's."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from rftcore.sync.addresses import LOOPBACK
from rftcore.sync.transfer import ipc_group
from rftcore.sync.transfer.group import GroupError, open_store
from rftcore.sync.transfer.plan import TransferPlan
from rftcore.sync.transfer.receiver import TransferReceiver
from rftcore.sync.transfer.sender import TransferSender
from rftcore.sync.transfer.staging import Staging, import_staging
from tests.support.sending import Tensors, held, wire
from tests.support.waiting import PATIENCE_S

# Of one element, of less than a buffer, of several buffers and a rest.
TENSORS: Tensors = [
    (f"weight.{number}", torch.randn(shape, generator=torch.Generator().manual_seed(number)))
    for number, shape in enumerate([(1,), (40, 7), (300, 33), (64, 512), (5,), (1000, 9)])
]
BUFFER_BYTES = 4096


def receive(connection: Connection, buffer_bytes: int) -> None:
    """Run an engine's process: receive every transfer, and answer with the checksum and the sum of what arrived, or with the error."""
    ipc_group.BUFFER_BYTES = buffer_bytes
    receiver = TransferReceiver()
    connection.send("ready")
    while (plan := connection.recv()) is not None:
        taken: list[Any] = []

        def load(tensors: Iterator[Any], taken: list[Any] = taken) -> None:
            for name, tensor in tensors:
                taken.append((name, tensor.clone()))
                if plan.transfer_id == 99:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            connection.send((receiver.receive(plan, 0, load), taken))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            connection.send(error)
    receiver.leave()


class Engines:
    """Processes that receive, and the sender."""

    def __init__(self, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.store, self.sender = open_store(LOOPBACK, PATIENCE_S), TransferSender()
        self.connections, self.processes = [], []
        for _ in range(number):
            ours, theirs = context.Pipe()
            process = context.Process(target=receive, args=(theirs, BUFFER_BYTES), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the connection
            self.connections.append(ours)
            self.processes.append(process)
        for connection in self.connections:
            assert connection.recv() == "ready"

    def plan(self, transfer_id: int, group_id: int = 1) -> TransferPlan:
        return TransferPlan(
            transfer_id=transfer_id,
            group_id=group_id,
            backend="ipc",
            host=LOOPBACK,
            port=self.store.port,
            num_ranks=1 + len(self.connections),
            first_rank=0,
            tensors=wire(TENSORS),
            dtype="float32",
            bucket_bytes=20_000,
            timeout_s=PATIENCE_S,
        )

    def transfer(self, plan: TransferPlan) -> str:
        for rank, connection in enumerate(self.connections, start=1):
            connection.send(replace(plan, first_rank=rank))
        return self.sender.send(plan, held(TENSORS), self.store).checksum

    def close(self) -> None:
        self.sender.leave()
        for connection, process in zip(self.connections, self.processes, strict=True):
            with contextlib.suppress(OSError):  # it was killed
                connection.send(None)
            process.join(PATIENCE_S)


@pytest.fixture
def engines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    monkeypatch.setattr(ipc_group, "BUFFER_BYTES", BUFFER_BYTES)
    found = Engines(request.param)
    yield found
    found.close()


@pytest.mark.parametrize("engines", [2], indirect=True)
def test_every_engine_has_what_was_sent_and_the_group_stays(engines: Engines) -> None:
    assert sum(4 * tensor.numel() for _, tensor in TENSORS) > 20 * BUFFER_BYTES
    for transfer_id in (1, 2, 3):
        checksum = engines.transfer(engines.plan(transfer_id))
        for connection in engines.connections:
            found, taken = connection.recv()
            assert found == checksum
            for (name, ours), (expected_name, theirs) in zip(taken, TENSORS, strict=True):
                assert name == expected_name and torch.equal(ours, theirs), name


@pytest.mark.parametrize("engines", [1], indirect=True)
def test_an_engine_that_is_killed_ends_the_transfer_and_its_successor_gets_the_weights(engines: Engines) -> None:
    with pytest.raises(GroupError, match="broke off"):
        engines.transfer(engines.plan(99))
    assert engines.sender.group is None
    again = Engines(1)
    try:
        checksum = again.transfer(again.plan(2, group_id=2))
        assert again.connections[0].recv()[0] == checksum
    finally:
        again.close()


def test_parts_that_come_in_another_order_are_an_error() -> None:
    number = ipc_group._ExpectedNumber(_Done(), torch.tensor([4]), 3)
    with pytest.raises(RuntimeError, match="part 4 came in place of 3"):
        number.wait(None)  # type: ignore[arg-type]


class _Done:
    def wait(self, timeout: object) -> None:
        """Return at once."""


def test_shared_memory_is_freed_when_its_processes_end() -> None:
    staging = Staging(1000, torch.device("cpu"))
    other = import_staging(staging.export(), torch.device("cpu"))
    staging.tensor.fill_(7)
    assert other.tolist() == [7] * 1000
    staging.close()
    assert other.tolist() == [7] * 1000, "a process that still reads keeps what it has"
