"""An embedded server stops some time after its last use, never during use, whichever process is killed meanwhile."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import psycopg
import pytest

import rftdata
from rftcore.cli import run_command
from rftdata.config import BufferConfig
from rftdata.postgres.embedded import EmbeddedServer
from tests.support.ports import closed_port
from tests.support.waiting import PATIENCE_S, wait_until

IDLE_S = 0.5

HOLD = """
import sys, rftdata
from rftdata.config import BufferConfig
buffer = rftdata.open(BufferConfig(uri=sys.argv[1], idle_stop_s=float(sys.argv[2])))
buffer.database.close()  # open, and without a session, as after ten idle minutes
print("open", flush=True)
sys.stdin.read()  # until it is killed, or its starter ends
"""

FORGET = """
import psutil, sys, rftdata
from rftdata.config import BufferConfig
buffer = rftdata.open(BufferConfig(uri=sys.argv[1], idle_stop_s=float(sys.argv[2])))
lines = {p: p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])}
watchers = [p for p, line in lines.items() if sys.argv[1] in line and any(part.endswith("idle_watch.py") for part in line)]
for watcher in watchers:
    watcher.kill()
    watcher.wait()
print(len(watchers))
"""


@pytest.fixture
def folder(server_folders: Path) -> Iterator[Path]:
    """One buffer for all tests here, stopped after each."""
    folder = server_folders / "idle"
    yield folder
    EmbeddedServer(folder).stop()
    wait_until_stopped(folder)


@pytest.fixture
def hold(folder: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts a process that has the buffer open without a session."""
    started: list[subprocess.Popen[str]] = []

    def start(*before: str) -> subprocess.Popen[str]:
        arguments = [*before, sys.executable, "-c", HOLD, str(folder), str(IDLE_S)]
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def use(folder: Path, idle_stop_s: float | None = IDLE_S) -> str:
    """Open and close the buffer; when its server was started."""
    with opened(folder, idle_stop_s) as buffer:
        return started_at(buffer)


@contextmanager
def opened(folder: Path, idle_stop_s: float | None = IDLE_S) -> Iterator[rftdata.Buffer]:
    """The buffer, open. Its server cannot stop meanwhile, however slow the machine is."""
    with rftdata.open(BufferConfig(uri=str(folder), idle_stop_s=idle_stop_s)) as buffer:
        yield buffer


def started_at(buffer: rftdata.Buffer) -> str:
    return str(buffer.sql("SELECT pg_postmaster_start_time()::text AS t")["t"][0])


def postmaster(folder: Path) -> psutil.Process:
    return psutil.Process(int((folder / "postgres" / "postmaster.pid").read_text().split()[0]))


def watchers(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if str(folder) in line and any(part.endswith("idle_watch.py") for part in line):
            found.append(process)
    return found


def last_use(folder: Path) -> float:
    """When a process had the buffer open last; a wall-clock time."""
    return (folder / "in_use").stat().st_mtime


def wait_until_stopped(folder: Path) -> None:
    """Wait until the server and its watcher have ended."""
    server = EmbeddedServer(folder)
    wait_until(
        lambda: not server.is_running() and not watchers(folder), f"the end of the server of {folder}", pause_s=0.1
    )


def stays(folder: Path) -> bool:
    """Whether the server still runs when another one, last used later and left alone, has stopped by itself."""
    other = EmbeddedServer(folder.with_name("beside"), idle_stop_s=IDLE_S)
    other.start()
    other.release()
    wait_until_stopped(other.folder)
    return EmbeddedServer(folder).is_running()


def test_the_server_stops_after_its_last_use_and_the_next_open_starts_it(folder: Path) -> None:
    with opened(folder):
        assert postmaster(folder).is_running() and len(watchers(folder)) == 1
    first = use(folder)
    wait_until_stopped(folder)
    ended = (folder / "postgres").stat().st_mtime  # its end removed its lock file from there
    assert ended - last_use(folder) >= IDLE_S
    assert use(folder) > first


def test_the_server_stays_during_pauses_shorter_than_the_limit(folder: Path) -> None:
    """A busy machine may take longer than the limit to open the buffer again: only after such a pause may the server be another one."""
    before = use(folder)
    for _ in range(10):
        closed_at = last_use(folder)
        time.sleep(0.3 * IDLE_S)
        with opened(folder) as buffer:
            pause_s = time.time() - closed_at
            now = started_at(buffer)
        assert now == before or pause_s >= IDLE_S
        before = now
    wait_until_stopped(folder)


def test_the_server_stays_while_one_of_two_processes_has_the_buffer_open_and_stops_after_the_last_is_killed(
    folder: Path, hold: Callable[..., subprocess.Popen[str]]
) -> None:
    first, second = hold(), hold()
    assert stays(folder)
    first.kill()
    assert stays(folder)
    second.kill()
    wait_until_stopped(folder)


def test_the_server_stays_while_a_process_of_another_container_has_the_buffer_open(
    folder: Path, hold: Callable[..., subprocess.Popen[str]]
) -> None:
    use(folder)
    apart = ["unshare", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*apart, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("this user may not make process namespaces")
    there = hold(*apart)
    assert stays(folder)
    there.kill()
    wait_until_stopped(folder)


def test_the_server_stays_during_a_session_of_another_program(folder: Path) -> None:
    with opened(folder):
        session = psycopg.connect(EmbeddedServer(folder).uri)
    with session:
        assert stays(folder)
        assert session.execute("SELECT 1").fetchone() == (1,)
    wait_until_stopped(folder)


def test_after_kill_9_of_the_watcher_the_next_open_starts_another(folder: Path) -> None:
    use(folder, 600.0)
    (watcher,) = watchers(folder)
    watcher.kill()
    watcher.wait(timeout=PATIENCE_S)
    with opened(folder):
        assert len(watchers(folder)) == 1
    wait_until_stopped(folder)


def test_a_program_that_closes_nothing_starts_a_killed_watcher_again(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORGET, str(folder), str(IDLE_S)],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout == "1\n"
    wait_until_stopped(folder)


def test_after_kill_9_of_the_server_the_watcher_ends_and_the_next_server_has_one(
    folder: Path, hold: Callable[..., subprocess.Popen[str]]
) -> None:
    process = hold()
    postmaster(folder).send_signal(signal.SIGKILL)
    wait_until_stopped(folder)
    with opened(folder):
        assert len(watchers(folder)) == 1
    assert stays(folder)
    process.kill()
    wait_until_stopped(folder)


def test_the_watcher_ends_with_a_server_that_a_command_stops(folder: Path) -> None:
    use(folder, 600.0)
    (watcher,) = watchers(folder)
    assert run_command(["db", "stop", "--buffer", str(folder)]) == 0
    watcher.wait(timeout=PATIENCE_S)


@pytest.mark.parametrize("idle_stop_s", [0, None])
def test_without_a_limit_it_is_neither_watched_nor_stopped(folder: Path, idle_stop_s: float | None) -> None:
    use(folder, idle_stop_s)
    assert not watchers(folder) and stays(folder)
    use(folder)  # the newest configuration counts
    wait_until_stopped(folder)


def test_a_command_that_does_not_know_the_configuration_leaves_the_limit_as_it_is(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(folder, 600.0)
    assert run_command(["sql", "select 1", "--buffer", str(folder)]) == 0
    assert run_command(["db", "status", "--buffer", str(folder)]) == 0
    assert "it stops 600 s after its last use" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["start", "uri"])
def test_a_server_that_a_command_starts_or_names_to_other_clients_runs_until_it_is_stopped(
    folder: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    use(folder)
    assert run_command(["db", verb, "--buffer", str(folder)]) == 0
    use(folder)  # a configuration does not change that
    assert stays(folder)
    assert run_command(["db", "status", "--buffer", str(folder)]) == 0
    assert "it runs until `rft db stop`" in capsys.readouterr().out
    assert run_command(["db", "stop", "--buffer", str(folder)]) == 0
    use(folder)
    wait_until_stopped(folder)


def test_a_server_that_listens_for_other_machines_is_not_stopped(folder: Path) -> None:
    with closed_port() as port:
        rftdata.open(BufferConfig(uri=str(folder), idle_stop_s=IDLE_S, listen=f"127.0.0.1:{port}")).close()
        assert not watchers(folder) and stays(folder)


def test_commands_that_come_while_the_server_stops_wait_and_start_it_again(folder: Path) -> None:
    """Two at a time open the buffer shortly before, while and after the server stops."""
    draw = random.Random(7)
    starts = set[str]()
    with ThreadPoolExecutor(2) as pool:
        for turn in range(20):
            starts.update(pool.map(lambda _: use(folder, 0.5), range(2)))
            if turn == 10:
                wait_until_stopped(folder)
            else:
                time.sleep(0.5 + draw.uniform(-0.05, 0.3))
    assert len(starts) > 1
    wait_until_stopped(folder)


def test_a_buffer_made_in_the_place_of_another_is_not_stopped_by_that_ones_watcher(server_folders: Path) -> None:
    place, elsewhere = server_folders / "replaced", server_folders / "moved away"
    with opened(place) as old:
        (watcher,) = watchers(place)
        place.rename(elsewhere)  # its server runs on, and is watched, when another buffer is made in its place
        new = rftdata.open(BufferConfig(uri=str(place), idle_stop_s=IDLE_S))
        new.database.close()  # open, and without a session
        old.database.close()
    watcher.wait(timeout=PATIENCE_S)
    assert EmbeddedServer(place).is_running() and postmaster(elsewhere).is_running()
    new.close()
    EmbeddedServer(elsewhere).stop()
    wait_until_stopped(place)


def test_a_server_that_was_to_run_until_it_is_stopped_does_so_after_a_kill(folder: Path) -> None:
    assert run_command(["db", "start", "--buffer", str(folder)]) == 0
    killed = postmaster(folder)
    killed.kill()
    killed.wait()
    use(folder)
    assert stays(folder)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_servers_of_a_root_without_the_right_to_inspect_processes_are_stopped_too(folder: Path) -> None:
    program = (
        "import sys, rftdata; from rftdata.config import BufferConfig; "
        "rftdata.open(BufferConfig(uri=sys.argv[1], idle_stop_s=1.0)).close()"
    )
    command = ["setpriv", "--bounding-set", "-sys_ptrace", sys.executable, "-c", program, str(folder)]
    subprocess.run(command, check=True)
    wait_until_stopped(folder)
