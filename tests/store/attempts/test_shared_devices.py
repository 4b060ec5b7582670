"""A shared device: one holder at a time, whatever is killed, with real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

import rftdata
from rftcore.trainer.shared_device import TrainerDevice
from rftdata import processes
from rftdata.run import Run
from rftdata.workers.shared_device import SharedDevice
from rftdata.workers.worker import Worker
from tests.support.command_line import CHECKOUT
from tests.support.waiting import PATIENCE_S, wait_until

HOLDER = """
import sys
import rftdata
from rftdata.config import BufferConfig
from rftdata.workers.shared_device import SharedDevice
from rftdata.workers.worker import Worker

with rftdata.open(BufferConfig(uri=sys.argv[1], segments=sys.argv[2])) as buffer:
    run = buffer.find_run("shared")
    with Worker(run, "trainer") as worker:
        device = SharedDevice(run, worker.worker_id, "GPU-1")
        while not device.take():
            device.wait(0.1)
        print(worker.worker_id, flush=True)
        sys.stdin.read()  # until it is killed, or the test has ended
"""


def started(buffer: rftdata.Buffer) -> subprocess.Popen[str]:
    """A process that takes GPU-1, and prints its worker's id then."""
    command = [sys.executable, "-c", HOLDER, buffer.config.uri, str(buffer.config.segments)]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.fixture
def run(buffer: rftdata.Buffer) -> Run:
    return buffer.create_run(name="shared", config={}, seed=1, steps=9, pipeline_version="p1")


def test_a_device_is_given_to_the_worker_that_asked_for_it(run: Run) -> None:
    with Worker(run, "explorer") as one, Worker(run, "trainer") as other:
        engine, trainer = SharedDevice(run, one.worker_id, "GPU-1"), SharedDevice(run, other.worker_id, "GPU-1")
        assert engine.take() and engine.take() and not engine.is_wanted()
        assert not trainer.take()
        assert engine.is_wanted() and not trainer.is_wanted()
        trainer.give()  # it has none
        assert not trainer.take()
        engine.give()
        assert not engine.take(), "the device is the trainer's before it has looked"
        assert trainer.take() and trainer.is_wanted()
        trainer.give()
        assert engine.take() and not engine.is_wanted()
        trainer.take()
        trainer.waive()
        assert not engine.is_wanted()
        elsewhere = SharedDevice(run, other.worker_id, "GPU-2")
        assert elsewhere.take(), "another device has holders of its own"
        for device in (engine, trainer, elsewhere):
            device.leave()


def test_the_request_of_the_trainer_comes_before_that_of_another_explorer(run: Run) -> None:
    with Worker(run, "explorer") as one, Worker(run, "explorer") as other, Worker(run, "trainer") as third:
        first, second, trainer = (SharedDevice(run, worker.worker_id, "GPU-1") for worker in (one, other, third))
        assert first.take() and not second.take() and not trainer.take() and not second.take()
        first.give()
        assert not second.take() and trainer.take(), "two explorers could keep the device between them"
        for device in (first, second, trainer):
            device.leave()


def test_a_request_wakes_the_holder_and_a_given_device_wakes_the_waiting_worker(run: Run) -> None:
    with Worker(run, "explorer") as one, Worker(run, "trainer") as other:
        engine, trainer = SharedDevice(run, one.worker_id, "cpu"), SharedDevice(run, other.worker_id, "cpu")
        assert engine.take()
        for device in (engine, trainer):
            device.wait(0.01)  # listens from here on
        waits = threading.Event()

        def hold() -> None:
            while not engine.is_wanted():
                waits.set()
                engine.wait(10 * PATIENCE_S)  # longer than the test lasts: only a wake-up ends it
            engine.give()

        def ask() -> None:
            while not trainer.take():
                trainer.wait(10 * PATIENCE_S)

        threads = [threading.Thread(target=work, daemon=True) for work in (hold, ask)]
        threads[0].start()
        assert waits.wait(PATIENCE_S)
        threads[1].start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "it was not woken"
        for device in (engine, trainer):
            device.leave()


@pytest.mark.parametrize("wants", [False, True])
def test_a_holder_that_is_killed_has_no_device(run: Run, buffer: rftdata.Buffer, wants: bool) -> None:
    with Worker(run, "explorer") as worker:
        device = SharedDevice(run, worker.worker_id, "GPU-1")
        holder = started(buffer)
        assert holder.stdout is not None
        assert int(holder.stdout.readline()) > worker.worker_id
        assert not wants or not device.take()
        # Suspended, it sends no heartbeats and still has its memory on the device.
        holder.send_signal(signal.SIGSTOP)
        assert not device.take()
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
        assert device.take(), "at once: its process is of this machine"
        device.leave()


def test_a_killed_worker_that_asked_for_the_device_is_not_waited_for(run: Run, buffer: rftdata.Buffer) -> None:
    with Worker(run, "explorer") as worker:
        device = SharedDevice(run, worker.worker_id, "GPU-1")
        assert device.take()
        asker = started(buffer)
        wait_until(device.is_wanted, "it has asked", process=asker)
        asker.kill()
        asker.communicate()
        device.give()  # to a process whose end is not recorded yet
        assert device.take()
        device.leave()


def test_a_shared_device_is_a_gpu_of_a_machine_whatever_its_containers_are_named(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the device cpu is that of a container."""
    with Worker(run, "explorer") as one, Worker(run, "trainer") as other:
        devices = [SharedDevice(run, one.worker_id, name) for name in ("GPU-1", "cpu")]
        assert [device.take() for device in devices] == [True, True]
        monkeypatch.setattr(socket, "gethostname", lambda: "container")
        assert not SharedDevice(run, other.worker_id, "GPU-1").take()
        space = processes.pid_space()
        monkeypatch.setattr(processes, "pid_space", lambda: f"{space}0")
        assert SharedDevice(run, other.worker_id, "cpu").take()
        monkeypatch.setattr(processes, "machine", lambda: "another")
        assert SharedDevice(run, other.worker_id, "GPU-1").take()


def test_a_worker_recorded_as_gone_by_mistake_has_lost_its_device(run: Run) -> None:
    with Worker(run, "explorer") as one, Worker(run, "trainer") as other:
        engine, trainer = SharedDevice(run, one.worker_id, "GPU-1"), SharedDevice(run, other.worker_id, "GPU-1")
        assert not engine.lasts() and engine.take() and engine.lasts()
        run.database.run("stop_worker", worker_id=one.worker_id, error="the process is gone")
        assert trainer.take() and trainer.lasts()
        one.set_state("works")  # a heartbeat, which corrects the record that it is gone
        assert not engine.lasts() and not engine.is_wanted()
        assert not engine.take() and trainer.is_wanted() and not trainer.lasts(), "it has asked"
        trainer.give()
        assert engine.lasts() and engine.take()
        for device in (engine, trainer):
            device.leave()


def test_a_trainer_recorded_as_gone_by_mistake_asks_again_before_it_uses_the_device(run: Run) -> None:
    with Worker(run, "explorer") as one, Worker(run, "trainer") as other:
        engine, trainer = SharedDevice(run, one.worker_id, "GPU-1"), SharedDevice(run, other.worker_id, "GPU-1")
        devices = TrainerDevice(run, other, trainer, offload=False)
        assert devices.take(lambda: True) and devices.take(lambda: True)
        run.database.run("stop_worker", worker_id=other.worker_id, error="the process is gone")
        assert engine.take()
        other.set_state("works")
        asked: list[bool] = []

        def stop() -> bool:
            asked.append(engine.is_wanted())
            return len(asked) > 1

        assert not devices.take(stop) and asked == [True, True]
        devices.give()  # it has none
        assert engine.lasts()
        devices.leave()
        engine.leave()


def test_the_holder_is_the_only_one(run: Run) -> None:
    """Threads that take the device and give it as fast as they can: two never have it together."""
    inside, most, count = 0, 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal inside, most, count
        with Worker(run, "explorer") as worker:
            device = SharedDevice(run, worker.worker_id, "GPU-1")
            for _ in range(8):
                while not device.take():
                    device.wait(0.05)
                with lock:
                    inside, count = inside + 1, count + 1
                    most = max(most, inside)
                time.sleep(0.002)
                with lock:
                    inside -= 1
                device.give()
            device.leave()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert (most, count) == (1, 24)
