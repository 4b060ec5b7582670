"""The embedded server: starts on demand, is shared by processes, private to its user, and comes back after a kill."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

import rftdata
from rftdata.config import BufferConfig
from rftdata.errors import BufferUnavailableError
from rftdata.postgres.embedded import EmbeddedServer, check_folder
from rftdata.processes import machine
from tests.support.ports import closed_port
from tests.support.waiting import PATIENCE_S, wait_until


@pytest.fixture(scope="module")
def folder(server_folders: Path) -> Iterator[Path]:
    """One buffer for all tests here; each leaves its server as it likes."""
    folder = server_folders / "own"
    yield folder
    EmbeddedServer(folder).stop()


def postmaster(folder: Path) -> psutil.Process:
    return psutil.Process(int((folder / "postgres" / "postmaster.pid").read_text().split()[0]))


def one(folder: Path) -> list[int]:
    with rftdata.open(str(folder)) as buffer:
        found: list[int] = buffer.sql("SELECT 1 AS one")["one"].to_pylist()
        return found


def test_it_starts_stops_and_starts_again_with_its_data(folder: Path) -> None:
    with rftdata.open(str(folder)) as buffer:
        buffer.create_run(name="kept", config={}, seed=1, steps=1, pipeline_version="p")
    server = EmbeddedServer(folder)
    assert server.is_running()
    server.stop()
    assert not server.is_running()
    server.stop()
    with rftdata.open(str(folder)) as buffer:
        assert buffer.find_run("kept").name == "kept"


def test_closing_the_buffer_leaves_the_server_running_and_another_process_uses_it(folder: Path) -> None:
    assert one(folder) == [1]
    first = postmaster(folder)
    script = "import sys, rftdata; print(rftdata.open(sys.argv[1]).sql('SELECT 41 + 1 AS n')['n'].to_pylist())"
    output = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    ).stdout
    assert output.strip() == "[42]"
    assert postmaster(folder) == first and first.is_running()


def test_password_and_socket_are_private(folder: Path) -> None:
    one(folder)
    server = EmbeddedServer(folder)
    assert stat.S_IMODE((folder / "password").stat().st_mode) == 0o600
    assert stat.S_IMODE(server.socket_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "postgres").stat().st_mode) == 0o700
    without = server.uri.replace((folder / "password").read_text().strip(), "guess")
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(without)


def test_passwords_of_people_are_hashed_many_times(folder: Path) -> None:
    one(folder)
    with psycopg.connect(EmbeddedServer(folder).uri) as connection:
        connection.execute("CREATE ROLE ada PASSWORD 'easy to guess'")
        rows = connection.execute(
            "SELECT rolname, split_part(rolpassword, ':', 1) FROM pg_authid WHERE rolpassword IS NOT NULL"
        )
        found = dict(rows.fetchall())
    assert found == {"rft_owner": "SCRAM-SHA-256$1", "ada": "SCRAM-SHA-256$4096"}


# Three seconds on every machine.
BUSY = b"DO $$ BEGIN WHILE clock_timestamp() < statement_timestamp() + interval '3 s' LOOP NULL; END LOOP; END $$"


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "with an active session"])
def test_after_kill_9_of_the_server_the_next_open_works(folder: Path, busy: bool) -> None:
    one(folder)
    session = psycopg.connect(EmbeddedServer(folder).uri, autocommit=True)
    if busy:
        # An active session does not notice at once that the server has ended, and keeps its shared memory.
        session.pgconn.send_query(BUSY)
        active = "SELECT FROM pg_stat_activity WHERE pid = %s AND state = 'active' AND query LIKE '%%LOOP%%'"
        with psycopg.connect(EmbeddedServer(folder).uri, autocommit=True) as other:
            wait_until(
                lambda: other.execute(active, [session.info.backend_pid]).rowcount,
                "the session is active",
                pause_s=0.01,
            )
    postmaster(folder).send_signal(signal.SIGKILL)
    assert one(folder) == [1]
    session.close()
    assert EmbeddedServer(folder).is_running()


OPENING = """
import sys, rftdata, rftdata.postgres.embedded
rftdata.postgres.embedded._START_S = float(sys.argv[2])
try:
    with rftdata.open(sys.argv[1]) as buffer:
        print(buffer.sql("SELECT pg_postmaster_start_time()::text AS t")["t"][0])
except rftdata.errors.BufferUnavailableError as error:
    print(error)
"""


def opened_in_another_container(folder: Path, start_s: float = PATIENCE_S) -> str:
    """Open the folder where neither processes nor shared memory of this test are visible; `start_s` ends the wait for its server."""
    apart = ["unshare", "--pid", "--ipc", "--fork", "--mount-proc"]
    try:
        subprocess.run([*apart, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not make process namespaces")
    return subprocess.run(
        [*apart, sys.executable, "-c", OPENING, str(folder), str(start_s)],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    ).stdout.strip()


def test_a_server_whose_process_cannot_be_seen_is_used_and_never_started_twice(folder: Path) -> None:
    one(folder)
    server = postmaster(folder)
    with psycopg.connect(EmbeddedServer(folder).uri) as session:
        started = session.execute("SELECT pg_postmaster_start_time()::text").fetchone()
        assert started is not None
        assert opened_in_another_container(folder) == started[0]
        assert postmaster(folder) == server
        assert session.execute("SELECT 1").fetchone() == (1,)


def test_a_server_that_neither_answers_nor_is_visible_is_not_assumed_dead(folder: Path) -> None:
    one(folder)
    server = postmaster(folder)
    server.suspend()
    try:
        said = opened_in_another_container(folder, start_s=3.0)
    finally:
        server.resume()
    assert "are running, but it does not answer here" in said and "another container" in said
    assert postmaster(folder) == server
    assert one(folder) == [1]


@pytest.mark.parametrize("name", ["my 'odd' buffer", 'a "quoted", $HOME `id` \\ %s one'])
def test_a_folder_may_have_any_name(server_folders: Path, name: str) -> None:
    folder = server_folders / name
    try:
        assert one(folder) == [1]
        EmbeddedServer(folder).stop()
        assert one(folder) == [1]
    finally:
        EmbeddedServer(folder).stop()


def test_the_record_of_the_machine_is_written_once_and_an_empty_one_refuses_no_machine(folder: Path) -> None:
    one(folder)
    note = folder / "host"
    before = note.stat()
    one(folder)
    assert (note.stat().st_ino, note.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    note.write_text("")
    assert one(folder) == [1]
    assert note.read_text() == f"{socket.gethostname()} {machine()}"


def test_a_new_database_is_not_lost_with_the_name_of_its_folder(
    server_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = server_folders / "synced"
    real, synced = os.fsync, []

    def fsync(descriptor: int) -> None:
        real(descriptor)
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), (folder / "postgres").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    try:
        one(folder)
    finally:
        EmbeddedServer(folder).stop()
    assert (str(folder), True) in synced
    assert (str(folder), False) in synced  # and before it the password and the place of the socket


def test_a_stale_lock_whose_process_id_passed_to_another_program_is_no_server(folder: Path) -> None:
    one(folder)
    server = EmbeddedServer(folder)
    server.stop()
    (folder / "postgres" / "postmaster.pid").write_text(f"{os.getpid()}\n{folder}/postgres\n1\n5432\n\n\n")
    assert not server.is_running()
    assert one(folder) == [1]


@pytest.fixture
def port() -> Iterator[int]:
    with closed_port() as port:
        yield port


def test_the_address_in_listen_takes_connections_and_the_socket_still_works(folder: Path, port: int) -> None:
    one(folder)
    config = BufferConfig(uri=str(folder), listen=f"127.0.0.1:{port}")
    with pytest.raises(
        BufferUnavailableError, match=r"is already running without the address buffer\.listen.*rft db stop"
    ):
        rftdata.open(config)
    EmbeddedServer(folder).stop()
    with rftdata.open(config) as buffer:
        assert buffer.sql("SELECT 1 AS one")["one"].to_pylist() == [1]
        password = (folder / "password").read_text().strip()
        with psycopg.connect(f"postgresql://rft_owner:{password}@127.0.0.1:{port}/rft") as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
    assert one(folder) == [1]  # without `listen` the running server is found all the same
    rftdata.open(config).close()
    EmbeddedServer(folder).stop()


def test_a_start_waits_for_the_initdb_of_a_killed_one(server_folders: Path) -> None:
    folder = server_folders / "killed-early"
    start = [sys.executable, "-c", f"import rftdata; rftdata.open({str(folder)!r}).close()"]

    def initdbs() -> list[psutil.Process]:
        found = (process for process in psutil.process_iter(["name", "cmdline"]) if process.info["name"] == "initdb")
        return [process for process in found if str(folder / "postgres.unfinished") in process.info["cmdline"]]

    killed = subprocess.Popen(start)
    wait_until(initdbs, "initdb works")
    (orphan,) = initdbs()
    orphan.suspend()
    killed.kill()
    killed.wait(PATIENCE_S)
    try:
        later = subprocess.Popen(start)
        with pytest.raises(subprocess.TimeoutExpired):
            later.wait(3.0)
        assert initdbs() == [orphan], "one at a time"
        orphan.resume()
        assert later.wait(PATIENCE_S) == 0 and one(folder) == [1]
        assert not (folder / "initdb.lock").exists()
    finally:
        EmbeddedServer(folder).stop()


def test_a_first_start_that_was_cut_short_is_done_again(server_folders: Path) -> None:
    folder = server_folders / "cut-short"
    (folder / "postgres.unfinished").mkdir(parents=True)
    (folder / "postgres.unfinished" / "PG_VERSION").write_text("18\n")
    (folder / "password.unfinished").write_text("")
    try:
        assert one(folder) == [1]
        assert not (folder / "postgres.unfinished").exists()
    finally:
        EmbeddedServer(folder).stop()


def test_a_deep_folder_gets_a_short_socket(server_folders: Path) -> None:
    folder = server_folders / ("deep" * 20) / ("er" * 20) / "buffer"
    try:
        assert one(folder) == [1]
        assert len(os.fsencode(EmbeddedServer(folder).socket_dir)) < 90
    finally:
        EmbeddedServer(folder).stop()


def test_a_folder_that_cannot_be_made_or_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "buffer", Path("/proc/rft-buffer")):
        with pytest.raises(BufferUnavailableError, match=r"cannot be created or written.*correct buffer\.uri"):
            rftdata.open(str(place))


def test_a_folder_is_probed_by_creating_it_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent" / "folder")
    before = sorted(tmp_path.rglob("*"))
    check_folder(tmp_path)
    check_folder(tmp_path / "a" / "deep" / "buffer")
    for place in ("file", "file/buffer", "nowhere/buffer"):
        with pytest.raises(
            BufferUnavailableError, match=rf"cannot be created or written: .*{place}.*correct buffer\.uri"
        ):
            check_folder(tmp_path / place)
    # Root passes every permission bit, and still no folder can be made here.
    for place in ("/proc/rft-buffer", "/proc/rft/deep/buffer", "/proc/self"):
        with pytest.raises(BufferUnavailableError, match=rf"cannot be created or written: .*{place}"):
            check_folder(Path(place))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_buffer_is_not_made_when_it_should_exist(tmp_path: Path) -> None:
    with pytest.raises(BufferUnavailableError, match="there is no buffer here"):
        rftdata.open(str(tmp_path / "nothing"), create=False)
    assert not (tmp_path / "nothing").exists()


def test_a_buffer_in_use_on_another_machine_is_refused(folder: Path) -> None:
    one(folder)
    (folder / "host").write_text("elsewhere")
    try:
        with pytest.raises(BufferUnavailableError, match=r"started on the machine 'elsewhere'.*one machine at a time"):
            rftdata.open(str(folder))
    finally:
        (folder / "host").write_text(socket.gethostname())


def test_another_machine_of_this_name_is_another_machine_and_another_name_of_this_one_is_not(folder: Path) -> None:
    one(folder)
    try:
        (folder / "host").write_text(f"{socket.gethostname()} another-kernel")
        with pytest.raises(BufferUnavailableError, match=r"another one of this name, and may still run there"):
            rftdata.open(str(folder))
        # The server was started before this machine: that can have been an earlier start of it.
        lock = folder / "postgres" / "postmaster.pid"
        lines = lock.read_text().split("\n")
        lock.write_text("\n".join([*lines[:2], "1000", *lines[3:]]))
        assert one(folder) == [1]
        (folder / "host").write_text(f"container {machine()}")
        assert one(folder) == [1]
    finally:
        (folder / "host").write_text(f"{socket.gethostname()} {machine()}")


def test_a_port_that_is_taken_is_a_clear_error(folder: Path) -> None:
    EmbeddedServer(folder).stop()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(
            BufferUnavailableError, match=r"cannot listen on the address buffer\.listen: Address already in use"
        ):
            rftdata.open(BufferConfig(uri=str(folder), listen=f"127.0.0.1:{taken.getsockname()[1]}"))
    assert one(folder) == [1]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts the server under another account")
def test_a_folder_that_was_closed_above_a_running_server_does_not_make_it_unseen(server_folders: Path) -> None:
    above = server_folders / "above"
    above.mkdir(mode=0o755)
    server = EmbeddedServer(above / "buffer")
    uri = server.start()
    try:
        above.chmod(0o700)
        assert server.is_running()
        assert EmbeddedServer(above / "buffer").start() == uri
    finally:
        above.chmod(0o755)
        server.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root needs an account for the server")
def test_processes_that_need_the_servers_account_at_the_same_time_create_it_once() -> None:
    """As the first commands on a fresh machine do: each `useradd` but one fails."""
    name = f"rft-test-{secrets.token_hex(4)}"
    code = (
        f"from rftdata.postgres import programs; programs._ACCOUNT = {name!r}; print(programs.server_account().pw_uid)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    try:
        found = [process.communicate(timeout=PATIENCE_S) for process in processes]
        assert len({out for out, _ in found}) == 1 and found[0][0].strip().isdecimal(), found
    finally:
        subprocess.run(["userdel", name], check=False, capture_output=True)
