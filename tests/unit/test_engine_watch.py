"""A hanging engine is noticed with the place where it hangs; one that computes slowly, or has nothing to do, is left alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rftcore.engines.base import Decoding, EngineConfig, Generation
from rftcore.engines.transformers_engine import TransformersEngine
from rftcore.explorer.engine_watch import EngineWatch
from tests.support.models import make_tiny_model

LIMIT_S = 0.6


class Waiting(TransformersEngine):
    """Takes `pause_s` for each step, or until `go` is set."""

    pause_s = 0.0
    go: threading.Event

    def _step(self) -> list[tuple[str, Generation]]:
        self.go.wait(self.pause_s)
        return super()._step()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Waiting]:
    Waiting.go = threading.Event()
    engine = Waiting(make_tiny_model(tmp_path / "model"), EngineConfig(dtype="float32", context_length=64))
    yield engine
    engine.go.set()
    engine.close()


@pytest.mark.parametrize(("pause_s", "hangs"), [(60.0, True), (LIMIT_S / 4, False)])
def test_an_engine_hangs_if_one_step_takes_too_long(engine: Waiting, pause_s: float, hangs: bool) -> None:
    found: list[tuple[str, str]] = []
    noticed = threading.Event()

    def end(sentence: str, stack: str) -> None:
        found.append((sentence, stack))
        noticed.set()
        engine.go.set()  # in place of the end of the process

    engine.pause_s = pause_s
    watch = EngineWatch(engine, LIMIT_S, end)
    assert not noticed.wait(2 * LIMIT_S), "it has nothing to do"
    asyncio.run(engine.generate([1, 2, 3], Decoding(temperature=0.0, max_tokens=8)))
    watch.close()
    assert noticed.is_set() == hangs
    if hangs:
        ((sentence, stack),) = found
        assert "its engine hangs" in sentence and "explorer.hang_s" in sentence
        assert "self.go.wait(self.pause_s)" in stack
