"""A program's supervisor ends it and all that it has started, also when the explorer is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rftcore.failures import InfrastructureError
from rftcore.programs.process import Program, run_program
from rftdata.processes import process_lives
from tests.support.waiting import wait_until

EXPLORER = """
import asyncio, os, sys
from pathlib import Path
from rftcore.programs.process import Program, run_program

async def main():
    code = "import os, time; print(os.getpid(), file=open(os.environ['PID_FILE'], 'w'), flush=True); time.sleep(600)"
    async with run_program(Program([sys.executable, "-c", code], Path.cwd(), dict(os.environ))) as running:
        await running.report

asyncio.run(main())
"""


def test_a_program_ends_with_a_killed_explorer(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    explorer = subprocess.Popen([sys.executable, "-c", EXPLORER], env={**os.environ, "PID_FILE": str(file)})
    wait_until(lambda: file.exists() and file.read_text().strip())
    number = int(file.read_text())
    assert process_lives(number)
    explorer.send_signal(signal.SIGKILL)
    explorer.wait()
    wait_until(lambda: not process_lives(number))


def test_a_program_that_cannot_be_started_is_reported() -> None:
    async def report(argv: list[str], cwd: Path) -> str | None:
        async with run_program(Program(argv, cwd, {})) as running:
            return (await running.report).refused

    assert "FileNotFoundError" in (asyncio.run(report(["/no/such/program"], Path.cwd())) or "")
    assert "FileNotFoundError" in (asyncio.run(report([sys.executable], Path("/no/such/folder"))) or "")


def test_a_program_reads_its_input_and_its_last_output_is_kept() -> None:
    code = "import sys; text = sys.stdin.read(); print('x' * 200000); print(len(text)); sys.exit(3)"

    async def run() -> None:
        program = Program([sys.executable, "-c", code], Path.cwd(), dict(os.environ), "é" * 1_000_000)
        async with run_program(program) as running:
            report = await running.report
        assert report.code == 3
        assert report.stdout.endswith("x\n1000000\n")
        assert len(report.stdout) == 65536

    asyncio.run(run())


def test_the_end_of_a_supervisor_is_a_failure_of_the_infrastructure() -> None:
    async def run() -> None:
        program = Program(
            [sys.executable, "-c", "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"], Path.cwd(), {}
        )
        async with run_program(program) as running:
            with pytest.raises(InfrastructureError, match="supervisor"):
                await running.report

    asyncio.run(run())
