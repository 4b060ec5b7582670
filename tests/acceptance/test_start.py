"""While `rft run` checks its configuration, its explorer imports vLLM already; nothing of that outlasts a start that fails."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_line import rft_command, rft_environment
from tests.support.models import make_tiny_model
from tests.support.waiting import PATIENCE_S, wait_until

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = """
run: {{name: starting}}
model: {{path: {model}}}
tasks: [{{name: t, source: "./tasks.py:questions"}}]
algorithm: {{name: grpo, group_size: 2}}
explorer: {{engine: vllm, engine_args: {{own_process: true}}, reward: exact_match}}
trainer: {{batch_groups: 1}}
steps: 1
"""
# Its source is read by the checks, in the process of `rft run`. Only vLLM imports xgrammar.
TASKS = """
import os, sys, time
from pathlib import Path


def questions():
    assert not {"torch", "transformers", "vllm", "ray"} & sys.modules.keys(), "the process of rft run imports what only roles need"
    mark = f"RFT_TEST_START={os.environ['RFT_TEST_START']}".encode()
    processes = int(os.environ.get("RFT_TEST_PROCESSES", "1"))
    while sum("/xgrammar/" in maps(process, mark) for process in Path("/proc").glob("[0-9]*")) < processes:
        time.sleep(0.1)
    print("vLLM is being imported", flush=True)
    while "RFT_TEST_WAITS" in os.environ:
        time.sleep(0.1)
    raise ValueError("the tasks have a mistake")
    yield {}


def maps(process, mark):
    try:
        return (process / "maps").read_text() if mark in (process / "environ").read_bytes() else ""
    except OSError:
        return ""
"""


def marked(mark: str) -> list[int]:
    """Return the processes with a variable of this value in the environment with which they or their parents were started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_marked = f"RFT_TEST_START={mark}".encode() in (process / "environ").read_bytes()
        except OSError:
            continue
        if is_marked:
            found.append(int(process.name))
    return found


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    make_tiny_model(tmp_path / "model", num_layers=1)
    (tmp_path / "config.yaml").write_text(CONFIG.format(model=tmp_path / "model"))
    (tmp_path / "tasks.py").write_text(TASKS)

    def start_run(**variables: str) -> subprocess.Popen[str]:
        command = rft_command("run", tmp_path / "config.yaml", "--plain", "--buffer", tmp_path / "buffer")
        environment = {**rft_environment(), "RFT_TEST_START": str(tmp_path), **variables}
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
        )

    return start_run


@pytest.mark.parametrize("processes", [1, 2], ids=["vLLM is imported", "the engine's process is forked"])
def test_a_mistake_that_the_checks_find_ends_what_was_begun_beside_them(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]], processes: int
) -> None:
    with start(RFT_TEST_PROCESSES=str(processes)) as process:
        said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2, said
    assert "vLLM is being imported" in said and "the tasks have a mistake" in said
    assert not (tmp_path / "buffer").exists()
    wait_until(lambda: not marked(str(tmp_path)), "the end of all processes")


def test_ctrl_c_during_the_checks_ends_what_was_begun_beside_them(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    with start(RFT_TEST_WAITS="1") as process:
        assert process.stdout is not None
        assert next(line for line in process.stdout if "vLLM is being imported" in line)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert process.wait(PATIENCE_S) == 130
        assert time.monotonic() - began < 5
    assert not (tmp_path / "buffer").exists()
    wait_until(lambda: not marked(str(tmp_path)), "the end of all processes")
