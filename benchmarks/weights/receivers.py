"""Receiving processes of `rft bench weights`, which take part in transfers on request.

`PlainReceiver` receives and hashes, and loads nothing. `EngineReceiver` is a vLLM engine that samples meanwhile. Both answer calls one after the
other: a call is (method, arguments), an answer the returned value or an exception.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rftcore.engines.base import Decoding, EngineConfig, Generation
from rftcore.parent_process import end_with_parent
from rftcore.sync.transfer.reception import Reception

if TYPE_CHECKING:
    from rftcore.engines.vllm_engine import VllmEngine
    from rftcore.sync.transfer.plan import TransferPlan

Kind = Literal["plain", "engines"]

WIRE_DTYPE = "bfloat16"
CONTEXT_LENGTH = 256
_NUM_PROBES, _PROBE_TOKENS = 16, 32
_NUM_REQUESTS = 8  # open while weights arrive
_GPU_MEMORY = 0.6


@dataclass(frozen=True)
class Place:
    """GPUs and CPU threads of a process.

    Attributes:
        gpus: numbers among the visible GPUs of the machine; none on a CPU.
        num_threads: CPU threads of each process of an engine.
        num_processes: processes of an engine, which share the model's layers.
    """

    gpus: tuple[int, ...]
    num_threads: int
    num_processes: int = 1

    def take(self) -> None:
        """Bind this process to the place, before torch is imported."""
        if self.gpus:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            names = visible.split(",") if visible else None
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] if names else str(gpu) for gpu in self.gpus)
        os.environ["OMP_NUM_THREADS"] = str(self.num_threads)


@dataclass(frozen=True)
class Received:
    """Result of a transfer in one process.

    Attributes:
        seconds: from the call until everything was received, and loaded by an engine.
        pause_seconds: from the end of the engine's last step before the transfer to the start of its first step after it; None without an engine.
    """

    checksum: str
    seconds: float
    pause_seconds: float | None = None


Probe = list[tuple[int, float]]
"""The most likely next token of each probe and its log-probability, nats."""


class PlainReceiver:
    """Process that receives like one process of an engine, and loads nothing.

    Args:
        worker_rank: of this process in its engine.
    """

    def __init__(self, worker_rank: int, place: Place) -> None:
        import torch

        from rftcore.sync.device_names import device_id
        from rftcore.sync.transfer.receiver import TransferReceiver

        torch.set_num_threads(place.num_threads)
        self._worker_rank = worker_rank
        self._receiver = TransferReceiver()
        self._device = device_id("cuda:0" if place.gpus else "cpu")

    def reception(self) -> Reception:
        return Reception(dtype=WIRE_DTYPE, device=self._device, num_ranks=1)

    def receive(self, plan: TransferPlan, version: int) -> Received:
        started = time.perf_counter()
        checksum = self._receiver.receive(plan, self._worker_rank, lambda tensors: deque(tensors, maxlen=0))
        return Received(checksum, time.perf_counter() - started)

    def close(self) -> None:
        self._receiver.leave()


class EngineReceiver:
    """vLLM engine, started on `model`."""

    def __init__(self, model: Path, place: Place) -> None:
        self._engine: Any = _open_engine(model, place)
        self._load: _Load | None = None

    def reception(self) -> Reception:
        found: Reception = self._engine.reception
        return found

    def receive(self, plan: TransferPlan, version: int) -> Received:
        started = time.perf_counter()
        checksum = self._engine.receive_weights(plan, version)
        seconds = time.perf_counter() - started
        return Received(checksum, seconds, self._engine.last_pause() if self._load else None)

    def sample(self, on: bool) -> None:
        """Keep requests open from now on, or stop."""
        if self._load is not None:
            self._load.stop()
        self._load = _Load(self._engine) if on else None

    def probe(self) -> Probe:
        return _probe(self._engine)

    def load_file(self, path: Path, version: int) -> None:
        self._engine.load_weights(str(path), version)

    def close(self) -> None:
        self.sample(False)
        self._engine.close()


def serve(connection: Connection, parent: int, kind: Kind, place: Place, subject: Any) -> None:
    """Answer calls until `close`. The first answer is the reception.

    Args:
        parent: process id of the case; this process ends with it.
        subject: the model's folder of an engine; the rank in its engine of a plain receiver.
    """
    end_with_parent(parent)
    place.take()
    try:
        receiver: Any = EngineReceiver(subject, place) if kind == "engines" else PlainReceiver(subject, place)
        connection.send(receiver.reception())
        method = ""
        while method != "close":
            method, arguments = connection.recv()
            connection.send(getattr(receiver, method)(*arguments))
    except Exception as error:  # noqa: BLE001 - the case raises the error
        connection.send(RuntimeError(f"{type(error).__name__}: {error}"))


def write_reference(model: Path, place: Place, file: Path) -> None:
    """Write the answers to the probes of an engine that was started on the trainer's weights."""
    place.take()
    engine = _open_engine(model, place)
    file.write_text(json.dumps(_probe(engine)))
    engine.close()
    os._exit(0)  # vLLM's threads may hang at exit


def agrees(found: Probe, expected: Probe) -> bool:
    """Return whether two engines compute with the same weights, up to the order of sums, which may exchange nearly equal logits."""
    same_tokens = sum(ours[0] == theirs[0] for ours, theirs in zip(found, expected, strict=True))
    difference = np.mean([abs(ours[1] - theirs[1]) for ours, theirs in zip(found, expected, strict=True)])
    return bool(same_tokens >= 0.75 * len(expected) and difference < 0.02)


def _open_engine(model: Path, place: Place) -> Any:
    config = EngineConfig(
        dtype=WIRE_DTYPE,
        context_length=CONTEXT_LENGTH,
        max_num_seqs=2 * _NUM_PROBES,
        num_threads=place.num_threads,
        kv_cache_gib=0.25,
        gpu_memory_utilization=_GPU_MEMORY,
        tensor_parallel_size=place.num_processes,
    )
    from rftcore.engines.vllm_engine import VllmEngine

    os.environ.update(VllmEngine.process_environment(config))
    return _timed_engine_class()(model, config)


def _timed_engine_class() -> Any:
    import torch

    from rftcore.engines.vllm_engine import VllmEngine

    class TimedEngine(VllmEngine):
        """Records for how long the engine takes no step around a transfer."""

        _step_ended: float | None = None
        _is_paused = False

        def __init__(self, *arguments: Any) -> None:
            self._pauses: deque[float] = deque()
            self._resumed = threading.Semaphore(0)
            super().__init__(*arguments)

        def _step(self) -> list[tuple[str, Generation]]:
            if self._is_paused and self._step_ended is not None:
                self._pauses.append(time.perf_counter() - self._step_ended)
                self._resumed.release()
            self._is_paused = False
            found = super()._step()
            self._step_ended = time.perf_counter()
            return found

        def _receive_weights(self, plan: TransferPlan) -> str:
            checksum = super()._receive_weights(plan)
            # The last tensors may still be loading. In other processes this delays the first step instead.
            if self.config.tensor_parallel_size == 1 and torch.cuda.is_available():
                torch.cuda.synchronize()
            self._is_paused = True
            return checksum

        def last_pause(self) -> float:
            """Wait for the first step after a transfer; return the pause before it."""
            if not self._resumed.acquire(timeout=60.0):
                raise RuntimeError("the engine took no step after a transfer")
            return self._pauses.popleft()

    return TimedEngine


class _Load:
    """Requests that stay open on an engine."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._sample()), name="load")
        self._thread.start()
        while engine.num_generated_tokens == 0 and self._thread.is_alive():
            time.sleep(0.01)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    async def _sample(self) -> None:
        async def again(number: int) -> None:
            while not self._stopped.is_set():
                # Lengths differ, so that requests do not end together.
                await self._engine.generate([8 + number] * 8, Decoding(max_tokens=8 + 8 * number))

        await asyncio.gather(*(again(number) for number in range(_NUM_REQUESTS)))


def _probe(engine: VllmEngine) -> Probe:
    generator = np.random.default_rng(0)
    prompts = [generator.integers(8, 512, _PROBE_TOKENS).tolist() for _ in range(_NUM_PROBES)]

    async def answers() -> list[Generation]:
        decoding = Decoding(temperature=0.0, max_tokens=1)
        return await asyncio.gather(*(engine.generate(prompt, decoding) for prompt in prompts))

    return [(answer.token_ids[0], answer.logprobs[0]) for answer in asyncio.run(answers())]


class ReceiverProcess:
    """Handle of a receiver, which it starts."""

    def __init__(self, context: Any, kind: Kind, place: Place, subject: Any) -> None:
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, os.getpid(), kind, place, subject))
        self._process.start()
        theirs.close()

    def ask(self, method: str, *arguments: Any) -> None:
        self._connection.send((method, arguments))

    def answer(self) -> Any:
        """Wait for the answer to the oldest open call.

        Raises:
            RuntimeError: the call failed, or the process ended.
        """
        try:
            found = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(5.0)
            raise RuntimeError(f"a receiver ended with exit code {self._process.exitcode}") from error
        if isinstance(found, RuntimeError):
            raise found
        return found


def ask_all(receivers: list[ReceiverProcess], method: str, *arguments: Any) -> list[Any]:
    """Call all receivers; return their answers."""
    for receiver in receivers:
        receiver.ask(method, *arguments)
    return [receiver.answer() for receiver in receivers]


@contextmanager
def sampling(receivers: list[ReceiverProcess]) -> Iterator[None]:
    """Let engines sample within the block."""
    ask_all(receivers, "sample", True)
    yield
    ask_all(receivers, "sample", False)
