"""The process of vLLM's engine core: it ends with its explorer, and what waits for it fails when it ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("vllm")

from rftcore.engines.base import Decoding, EngineConfig
from rftcore.engines.request_work import follow_requests
from rftcore.engines.vllm_engine import VllmEngine
from rftdata.errors import EngineStoppedError
from rftdata.processes import process_lives
from tests.support.models import make_tiny_model
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CONFIG = EngineConfig(dtype="float32", context_length=4096, kv_cache_gib=0.25, own_process=True)
# Of a model with so many tokens that the most probable one is never that of the end.
LONG = Decoding(max_tokens=4000, temperature=0.0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[VllmEngine]:
    os.environ.update(VllmEngine.process_environment(CONFIG))
    words = tuple(f"<{number}>" for number in range(2000))
    engine = VllmEngine(make_tiny_model(tmp_path / "model", context_length=4096, words=words), CONFIG)
    yield engine
    engine.close()


def process_of_core() -> psutil.Process:
    [core] = [child for child in psutil.Process().children() if "EngineCore" in " ".join(child.cmdline())]
    return core


def test_requests_fail_when_the_process_is_killed_in_a_step(engine: VllmEngine) -> None:
    """No command reaches the engine that could report the end. Until then requests are worked on, however long the step takes and whatever arrives."""
    core, numbers = process_of_core(), [0, 0]

    def follow(waiting: int, worked_on: int) -> None:
        numbers[0] += waiting
        numbers[1] += worked_on

    async def killed() -> list[object]:
        follow_requests(follow)
        tasks = [asyncio.create_task(engine.generate([5, 6, 7], LONG)) for _ in range(4)]
        while numbers != [0, 4]:
            await asyncio.sleep(0.01)
        core.suspend()
        for _ in range(10):
            tasks.append(asyncio.create_task(engine.generate([5, 6, 7], LONG)))
            await asyncio.sleep(0.05)
        assert numbers == [10, 4]
        core.kill()
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = asyncio.run(asyncio.wait_for(killed(), PATIENCE_S))
    assert {type(answer) for answer in answers} == {EngineStoppedError}


def test_requests_fail_when_the_process_was_killed_before_them(engine: VllmEngine) -> None:
    process_of_core().kill()
    client = engine._llm.llm_engine.engine_core
    wait_until(lambda: client.resources.engine_dead, "vLLM's notice of it")

    async def refused() -> None:
        for _ in range(2):
            with pytest.raises(EngineStoppedError):
                await engine.generate([5, 6, 7], LONG)

    asyncio.run(asyncio.wait_for(refused(), PATIENCE_S))


# Prints the process id of the engine core, while the engine is being created: at once, when it imports vLLM, or as soon as it has a session of its own.
_CREATED = """
import os, sys, threading, time
import psutil

def report():
    def is_ready(child):
        return os.getsid(child.pid) == child.pid if sys.argv[2] == "later" else "spawn_main" in " ".join(child.cmdline())

    while not (cores := [child for child in psutil.Process().children() if is_ready(child)]):
        time.sleep(0.01)
    print(cores[0].pid, flush=True)

def main():
    from rftcore.engines.base import EngineConfig
    from rftcore.engines.vllm_engine import VllmEngine
    threading.Thread(target=report, daemon=True).start()
    VllmEngine(sys.argv[1], EngineConfig(dtype="float32", context_length=128, kv_cache_gib=0.25, own_process=True))
    time.sleep(1000)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("when", ["at once", "later"])
def test_the_engine_s_process_ends_with_an_explorer_that_is_killed(tmp_path: Path, when: str) -> None:
    program = tmp_path / "explorer.py"
    program.write_text(_CREATED)
    model = make_tiny_model(tmp_path / "model")
    with subprocess.Popen([sys.executable, program, model, when], stdout=subprocess.PIPE, text=True) as explorer:
        assert explorer.stdout is not None
        core = int(explorer.stdout.readline())
        assert process_lives(core)
        explorer.kill()
    wait_until(lambda: not process_lives(core), "the end of the engine's process")
