"""A hanging engine is noticed with the place where it hangs; one that computes slowly, or has nothing to do, is left alone."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rftcore.engines import driver
from rftcore.engines.base import Decoding, EngineConfig, Generation
from rftcore.engines.transformers_engine import TransformersEngine
from rftcore.explorer import engine_watch
from rftcore.explorer.engine_watch import watch_engine
from tests.support.models import make_tiny_model
from tests.support.waiting import wait_until

LIMIT_S = 0.2


def read_from_disk(path: Path) -> None:
    """Read a file that is not in the system's cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.read()


class Clock:
    """The engine's clock. It stands still where nothing moves it, so a busy machine makes no step longer."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    perf_counter = monotonic


class Slow(TransformersEngine):
    """Takes `step_s` for each step, in which the watch looks at it."""

    clock: Clock
    step_s = 0.0
    num_looks = 0
    slow_disk: Path | None = None
    go: threading.Event

    def stuck_s(self) -> float:
        found = super().stuck_s()
        self.num_looks += 1
        return found

    def let_pass(self, seconds: float) -> None:
        """Move the clock, and wait until the watch has judged that, or has ended.

        The first look may be one from before, and the third comes only after what the second saw has been judged.
        """
        looks = self.num_looks
        self.clock.now_s += seconds
        wait_until(lambda: self.num_looks >= looks + 3 or self.go.is_set(), "three looks of the watch", pause_s=0.01)

    def _replace_weights(self, path: Path) -> None:
        for _ in range(4):
            if self.slow_disk is not None:
                read_from_disk(self.slow_disk)
            self.let_pass(0.9 * LIMIT_S)

    def _step(self) -> list[tuple[str, Generation]]:
        self.let_pass(self.step_s)
        return super()._step()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    Slow.go, Slow.clock = threading.Event(), Clock()
    monkeypatch.setattr(driver, "time", Slow.clock)
    engine = Slow(make_tiny_model(tmp_path / "model"), EngineConfig(dtype="float32", context_length=64))
    yield engine
    engine.go.set()
    engine.close()


@pytest.mark.parametrize(
    ("step_s", "hangs"), [(1.1 * LIMIT_S, True), (0.9 * LIMIT_S, False)], ids=["it hangs", "it is slow"]
)
def test_an_engine_hangs_if_one_step_takes_too_long(engine: Slow, step_s: float, hangs: bool) -> None:
    found: list[tuple[str, str]] = []

    def end(sentence: str, stack: str) -> None:
        found.append((sentence, stack))
        engine.go.set()  # in place of the end of the process

    async def generate() -> None:
        # Different requests, each with a step of its own.
        lengths = (5, 6, 7, 8)
        await asyncio.gather(*(engine.generate([1, 2, 3], Decoding(temperature=0.0, max_tokens=n)) for n in lengths))

    engine.step_s = step_s
    watch = watch_engine(engine, LIMIT_S, end)
    engine.let_pass(2 * LIMIT_S)
    assert found == [], "it has nothing to do"
    asyncio.run(generate())
    watch.close()
    assert len(found) == hangs
    assert engine.clock.now_s > 5 * LIMIT_S
    if hangs:
        ((sentence, stack),) = found
        assert "its engine hangs" in sentence and "explorer.hang_s" in sentence
        assert "self.let_pass(self.step_s)" in stack


@pytest.mark.parametrize("arrives", [True, False], ids=["the disk is slow", "nothing arrives"])
def test_an_engine_that_reads_weights_hangs_only_if_no_data_arrives(
    engine: Slow, arrives: bool, tmp_path: Path
) -> None:
    found: list[str] = []

    def end(sentence: str, stack: str) -> None:
        found.append(sentence)
        engine.go.set()

    if arrives:
        engine.slow_disk = tmp_path / "disk"
        with engine.slow_disk.open("wb") as file:
            file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())
        arrivals = engine_watch._Arrivals()
        arrivals.have_come()
        read_from_disk(engine.slow_disk)
        if not arrivals.have_come():
            pytest.skip("the temporary folder is in memory, and nothing arrives from it")
    watch = watch_engine(engine, LIMIT_S, end)
    engine.load_weights(str(tmp_path / "model" / "model.safetensors"), 1)
    watch.close()
    assert len(found) == (not arrives)
