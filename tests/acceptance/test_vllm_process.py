"""The process of vLLM's engine core: it ends with its explorer, and what waits for it fails when it ends."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("vllm")

from rftcore.engines.base import Decoding, EngineConfig
from rftcore.engines.request_work import follow_requests
from rftcore.engines.vllm_engine import VllmEngine
from rftdata.errors import EngineStoppedError
from rftdata.processes import process_lives
from tests.support.models import make_tiny_model
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CONFIG = EngineConfig(
    dtype="float32", context_length=4096, kv_cache_gib=0.25, gpu_memory_utilization=0.2, own_process=True
)
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


# A process that is prepared as those of explorers are.
_PREPARED = """
import asyncio, json, os, sys, threading, time
import psutil
from rftcore.engines import core_fork
from rftcore.engines.base import Decoding, EngineConfig
from rftcore.engines.vllm_engine import VllmEngine
from rftcore.launch.launcher import Preparation
from rftdata.errors import RftError

def prepared(memory=0.2, workers=1):
    share = {"kv_cache_gib": memory, "gpu_memory_utilization": memory, "tensor_parallel_size": workers}
    config = EngineConfig(dtype="float32", context_length=4096, own_process=True, **share)
    os.environ.update(VllmEngine.process_environment(config))
    Preparation(VllmEngine.imported_modules(), (VllmEngine, config)).run()
    return config
"""
_ANSWERED = """
def children():
    return [(child.pid, " ".join(child.cmdline())) for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]

def main():
    config = prepared(float(sys.argv[3]), int(sys.argv[4]))
    found = {"threads": [thread.name for thread in threading.enumerate()], "fork": core_fork._waiting.pid}
    answer, log = os.dup(1), os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(log, number)
    try:
        engine = VllmEngine(sys.argv[1], config)
    except RftError as error:
        found["error"] = str(error)
    else:
        found["cores"] = [pid for pid, command in children() if "resource_tracker" not in command]
        found["output"] = [os.readlink(f"/proc/{found['fork']}/fd/{number}") for number in (1, 2)]
        generation = asyncio.run(engine.generate([5, 6, 7], Decoding(max_tokens=20, temperature=0.0)))
        found |= {"tokens": generation.token_ids, "logprobs": generation.logprobs}
        engine.close()
    found["left"] = [pid for pid, command in children() if "resource_tracker" not in command]
    os.write(answer, json.dumps(found).encode())

if __name__ == "__main__":
    main()
"""


def prepared_engine(folder: Path, model: str, memory: float, workers: int = 1) -> dict[str, Any]:
    (folder / "explorer.py").write_text(_PREPARED + _ANSWERED)
    command = [sys.executable, folder / "explorer.py", model, folder / "log", str(memory), str(workers)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_core_that_begins_in_a_fork_answers_like_one_that_is_spawned(
    tmp_path: Path, engine: VllmEngine, workers: int
) -> None:
    if torch.cuda.is_available() and torch.cuda.device_count() < workers:
        pytest.skip("two workers need two GPUs")
    generation = asyncio.run(engine.generate([5, 6, 7], Decoding(max_tokens=20, temperature=0.0)))
    found = prepared_engine(tmp_path, engine.model_path, 0.2, workers)
    assert found["threads"] == ["MainThread"], "what vLLM imports starts no threads of Python's"
    assert found["cores"] == [found["fork"]] and found["left"] == [], found
    assert found["output"] == [str(tmp_path / "log")] * 2, "the core prints where its explorer does now"
    assert found["tokens"] == generation.token_ids
    assert found["logprobs"] == pytest.approx(generation.logprobs, abs=1e-3)


def test_a_core_that_does_not_start_in_its_fork_is_reported_and_gone(tmp_path: Path) -> None:
    found = prepared_engine(tmp_path, str(make_tiny_model(tmp_path / "model", context_length=4096)), 1e-5)
    assert "vLLM's engine core does not start" in found["error"] and found["left"] == []
    assert "No available memory for the cache blocks" in (tmp_path / "log").read_text()


# Prints the process id of the engine core, while the engine is being created: at once, when it imports vLLM or waits as a fork, or as soon as it computes.
_CREATED = """
def report():
    def is_ready(child):
        session = os.getsid(child.pid) == child.pid
        return session if sys.argv[2] == "later" else "spawn_main" in " ".join(child.cmdline())

    while not (cores := [child for child in psutil.Process().children() if is_ready(child)]):
        time.sleep(0.01)
    print(cores[0].pid, flush=True)

def main():
    config = EngineConfig(dtype="float32", context_length=128, kv_cache_gib=0.25, gpu_memory_utilization=0.2, own_process=True)
    if sys.argv[3] == "forked":
        prepared()
        if sys.argv[2] == "at once":
            print(core_fork._waiting.pid, flush=True)
            time.sleep(1000)
    threading.Thread(target=report, daemon=True).start()
    VllmEngine(sys.argv[1], config)
    time.sleep(1000)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("core", ["forked", "spawned"])
@pytest.mark.parametrize("when", ["at once", "later"])
def test_the_engine_s_process_ends_with_an_explorer_that_is_killed(tmp_path: Path, when: str, core: str) -> None:
    program = tmp_path / "explorer.py"
    program.write_text(_PREPARED + _CREATED)
    command = [sys.executable, program, make_tiny_model(tmp_path / "model"), when, core]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as explorer:
        assert explorer.stdout is not None
        process = int(explorer.stdout.readline())
        assert process_lives(process)
        explorer.kill()
    wait_until(lambda: not process_lives(process), "the end of the engine's process")
