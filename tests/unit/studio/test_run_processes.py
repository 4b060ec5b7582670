"""Starts are recorded before anything else happens, an earlier boot does not block them, and Stop signals an `rft run` alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rftcore.studio import run_processes
from rftcore.studio.config_files import ConfigFolder
from rftcore.studio.oidc.settings import CLIENT_SECRET
from rftcore.studio.run_processes import Process, RunProcesses
from rftdata.config import BufferConfig
from rftdata.errors import ConflictError
from rftdata.processes import own_process, started_at
from tests.support.waiting import wait_until

SLEEP = "import time; print('', flush=True); time.sleep(60)"


@pytest.fixture
def processes(tmp_path: Path) -> RunProcesses:
    (tmp_path / "a.yaml").write_text("run: {name: x}\n")  # `rft run` refuses it
    return RunProcesses(ConfigFolder(tmp_path), BufferConfig(uri=str(tmp_path / "buffer")), "here")


def start(processes: RunProcesses, key: str) -> run_processes.RunStart:
    return processes.start(key * 32, "a.yaml", None, "o", "o", processes.folder.read("a.yaml").digest)


@pytest.fixture
def sleeping() -> Iterator[list[subprocess.Popen[bytes]]]:
    children: list[subprocess.Popen[bytes]] = []
    yield children
    for child in children:
        child.kill()
        child.communicate()


def child_of(children: list[subprocess.Popen[bytes]], *words: str) -> tuple[subprocess.Popen[bytes], Process]:
    """Start a process with these words in its command line; return it, and what a row of a worker names."""
    child = subprocess.Popen([sys.executable, "-c", SLEEP, *words], stdout=subprocess.PIPE)
    children.append(child)
    assert child.stdout is not None and child.stdout.readline()
    return child, Process(**{**own_process(), "pid": child.pid, "pid_started": started_at(child.pid)})


def test_a_start_of_an_earlier_boot_or_one_that_has_ended_does_not_block_the_next(processes: RunProcesses) -> None:
    first = start(processes, "a")
    wait_until(lambda: processes.starts()[0].exit_code is not None)
    record = processes.folder.path / ".rft-studio" / f"start-{'a' * 32}.json"
    before = replace(first.process, pid_space="0" * 32, pid=os.getpid())
    for unfinished in (replace(first, process=before), replace(first, process=replace(before, host="old"))):
        run_processes._write(record, unfinished)
        assert not processes.starts()[0].is_at_work
    here = replace(first.process, pid=os.getpid(), pid_started=started_at(os.getpid()) or 0)
    run_processes._write(record, replace(first, process=here))
    with pytest.raises(ConflictError, match="is running"):
        start(processes, "b")
    run_processes._write(record, replace(first, process=here, exit_code=0))
    assert start(processes, "b").key == "b" * 32


def test_a_start_that_cannot_be_recorded_is_ended(processes: RunProcesses) -> None:
    record = processes.folder.path / ".rft-studio" / f"start-{'a' * 32}.json"
    with processes.folder.locked():
        record.mkdir()  # where the record should be written
    launched: list[subprocess.Popen[bytes]] = []
    launch = processes._launch

    def kept(*arguments: object) -> subprocess.Popen[bytes]:
        launched.append(launch(*arguments))  # type: ignore[arg-type]
        return launched[-1]

    processes._launch = kept  # type: ignore[method-assign,assignment]
    with pytest.raises(OSError):
        start(processes, "a")
    assert len(launched) == 1 and launched[0].wait(60) != 0
    assert processes.starts() == []


def test_stop_signals_an_rft_run_alone_and_once(
    processes: RunProcesses, sleeping: list[subprocess.Popen[bytes]]
) -> None:
    stranger, named = child_of(sleeping, "run", "rftcore-notes")
    run, of_run = child_of(sleeping, "-m", "rftcore", "run", "a.yaml")
    for wrong in (named, replace(of_run, pid_started=0)):
        with pytest.raises(ConflictError, match="cannot be recognised as an rft run"):
            processes.stop(wrong, "o", "o")
        assert processes.stopped_by(wrong) is None
    for pid in (0, -1, 2**31, 2**40):
        with pytest.raises(ConflictError, match="has ended"):
            processes.stop(replace(of_run, pid=pid), "o", "o")
    for _ in range(2):
        processes.stop(of_run, "o", "o")
    assert run.wait(30) == -signal.SIGINT and stranger.poll() is None
    assert processes.stopped_by(of_run) == "o"
    assert processes.stopped_by(replace(of_run, host="another")) is None


def test_stop_of_another_users_process_says_so(
    processes: RunProcesses, sleeping: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, of_run = child_of(sleeping, "rft", "run")

    def refused(descriptor: int, number: int) -> None:
        raise PermissionError(1, os.strerror(1))

    monkeypatch.setattr(signal, "pidfd_send_signal", refused)  # what the kernel answers to another user
    with pytest.raises(ConflictError, match="belongs to another user"):
        processes.stop(of_run, "o", "o")
    assert processes.stopped_by(of_run) is None


def test_a_run_gets_the_studios_buffer_alone_and_no_secret_on_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.yaml").write_text("run: {name: x}\nbuffer: {uri: elsewhere, segments: elsewhere}\n")
    monkeypatch.setenv(CLIENT_SECRET, "of the provider")
    seen: dict[str, Any] = {}

    def popen(arguments: list[str], env: dict[str, str], **others: Any) -> subprocess.Popen[bytes]:
        seen.update(arguments=arguments, env=env)
        return started([sys.executable, "-c", ""])

    started = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", popen)
    for segments, expected in ((None, "null"), (str(tmp_path), f'"{tmp_path}"')):
        buffer = BufferConfig(
            uri="postgresql://u@127.0.0.1:1/d?pass%77ord=s3cret&application_name=x", segments=segments
        )
        processes = RunProcesses(ConfigFolder(tmp_path), buffer, "here")
        made = start(processes, "ab"[segments is None])
        assert f"--set=buffer.segments={expected}" in seen["arguments"]
        assert "--buffer=postgresql://u@127.0.0.1:1/d?application_name=x" in seen["arguments"]
        assert seen["env"]["PGPASSWORD"] == "s3cret" and CLIENT_SECRET not in seen["env"]
        assert "s3cret" not in Path(made.log).read_text()
        wait_until(lambda processes=processes: processes.starts()[0].exit_code is not None)


def test_a_file_that_changes_between_the_check_and_the_run_is_not_run(processes: RunProcesses) -> None:
    launch = processes._launch

    def late(file: str, *others: Any) -> subprocess.Popen[bytes]:
        (processes.folder.path / file).write_text("run: {name: another}\n")
        return launch(file, *others)

    processes._launch = late  # type: ignore[method-assign]
    made = start(processes, "a")
    wait_until(lambda: processes.starts()[0].exit_code is not None)
    assert processes.starts()[0].exit_code and "has changed since it was checked" in made.last_lines()
