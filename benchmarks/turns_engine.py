"""The engine of `rft bench turns`, in a process of its own: vLLM that sleeps, wakes and takes weights as the benchmark tells it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.weights_receivers import CONTEXT_LENGTH, WIRE_DTYPE, EngineReceiver, Place, Received, timed_engine_class
from rftcore.engines.base import Decoding, EngineConfig, Generation
from rftdata.errors import RftError

if TYPE_CHECKING:
    from rftcore.sync.transfer.plan import TransferPlan

GPU_MEMORY = 0.85
_NUM_REQUESTS = 32


class TurnReceiver(EngineReceiver):
    """A vLLM engine that sleeps, started on `model`."""

    def __init__(self, model: Path, place: Place) -> None:
        config = EngineConfig(
            dtype=WIRE_DTYPE,
            context_length=4 * CONTEXT_LENGTH,
            max_num_seqs=64,
            num_threads=place.num_threads,
            kv_cache_gib=0.25,
            gpu_memory_utilization=GPU_MEMORY,
            sleep=True,
        )
        from rftcore.engines.vllm_engine import VllmEngine

        os.environ.update(VllmEngine.process_environment(config))
        self._engine: Any = _engine_class()(model, config)
        self._load = None
        self._requests: _Requests | None = None

    def sleep(self, level: int) -> float:
        """Sleep at a level of vLLM's; seconds."""
        self._engine.sleep_level = level
        found: float = self._engine.sleep()
        return found

    def wake(self, weights_only: bool) -> tuple[float, bool]:
        """Seconds, and whether the engine has weights."""
        started = time.perf_counter()
        has_weights = self._engine.wake(weights_only)
        return time.perf_counter() - started, has_weights

    def take(self, plan: TransferPlan, version: int) -> Received | str:
        """Receive weights, also asleep; an error is its text."""
        started = time.perf_counter()
        try:
            checksum = self._engine.receive_weights(plan, version)
        except RftError as error:
            return str(error)
        return Received(checksum, time.perf_counter() - started)

    def load(self, path: Path, version: int) -> float | str:
        """Load a file; an error is its text."""
        try:
            found: float = self._engine.load_weights(str(path), version)
        except RftError as error:
            return str(error)
        return found

    def differing(self, path: Path) -> list[str]:
        """The tensors that differ from those of a file."""
        found: list[str] = self._engine.differing_weights(str(path))
        return found

    def begin(self, max_tokens: int) -> None:
        """Begin requests; return when each has some tokens, or after a second."""
        self._requests = _Requests(self._engine, max_tokens)
        self._requests.started.wait(1.0)

    def computes_within(self, seconds: float) -> bool:
        """Whether the engine computes a token in that time."""
        before = self._engine.num_steps
        time.sleep(seconds)
        return bool(self._engine.num_steps > before)

    def end(self) -> list[tuple[int, int, list[int]]]:
        """Wait for the requests: of each its tokens, its spans, and the versions of these."""
        assert self._requests is not None
        found, self._requests = self._requests.results(), None
        return [(len(g.token_ids), len(g.version_spans), [version for _, version in g.version_spans]) for g in found]


class _Requests:
    """Requests that are open together."""

    def __init__(self, engine: Any, max_tokens: int) -> None:
        self.started = threading.Event()
        self._found: list[Generation] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._sample(engine, max_tokens)), name="requests")
        self._thread.start()

    def results(self) -> list[Generation]:
        self._thread.join(120.0)
        return self._found

    async def _sample(self, engine: Any, max_tokens: int) -> None:
        before = engine.num_steps
        prompts = [[8 + number] * 8 for number in range(_NUM_REQUESTS)]
        tasks = [
            asyncio.create_task(engine.generate(prompt, Decoding(max_tokens=max_tokens, seed=number)))
            for number, prompt in enumerate(prompts)
        ]
        while not self.started.is_set():
            await asyncio.sleep(0.005)
            if engine.num_steps > before + 4:
                self.started.set()
        self._found = list(await asyncio.gather(*tasks))


def _engine_class() -> Any:
    base = timed_engine_class()

    class TurnEngine(base):  # type: ignore[misc, valid-type]
        """Sleeps at the level that it is told, and counts its steps."""

        sleep_level = 2
        num_steps = 0

        def _loses_weights_asleep(self) -> bool:
            return bool(self.sleep_level == 2)

        def _step(self) -> list[tuple[str, Generation]]:
            found: list[tuple[str, Generation]] = super()._step()
            self.num_steps += 1
            return found

    return TurnEngine
