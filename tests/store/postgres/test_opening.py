"""Creating a buffer, importing into one that does not exist yet, and schemas of earlier releases."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rftdata
from rftcore.cli import run_command
from rftcore.config.run import load_config
from rftcore.launch.launcher import reachable
from rftdata import Buffer, exchange
from rftdata.config import BufferConfig
from rftdata.connection import removed_if_it_fails
from rftdata.errors import BufferUnavailableError, QueryError, SchemaVersionError
from rftdata.postgres.database import Database
from rftdata.postgres.embedded import EmbeddedServer
from rftdata.postgres.migrations import newest_version, schema_version
from tests.store.conftest import CURRENT
from tests.store.pipeline.test_pipeline_verbs import CONFIG
from tests.support.models import make_tiny_model
from tests.support.store_roles import own_group
from tests.support.waiting import PATIENCE_S, wait_until

Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def rft(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    """Run one command line; its exit code, stdout and stderr."""
    for name in ("RFT_BUFFER", "RFT_SEGMENTS", "RFT_DEBUG"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = run_command(list(arguments))
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def place(server_folders: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Where an embedded buffer can be made; its server is stopped at the end."""
    folder = server_folders / f"made-{abs(hash(request.node.nodeid)):x}" / "new"
    yield folder
    EmbeddedServer(folder).stop()


@pytest.fixture
def exported(buffer: Buffer, tmp_path: Path) -> Path:
    """A file with two experiences."""
    buffer.create_run(name="words", config={}, seed=1, steps=1, pipeline_version="none")
    with buffer.writer("words") as writer:
        writer.insert(own_group())
    exchange.export(buffer, tmp_path / "good.parquet")
    return tmp_path / "good.parquet"


@pytest.fixture
def old(buffer: Buffer, next_version: str) -> Buffer:
    """A buffer of an earlier release than this program."""
    assert schema_version(buffer.database) == CURRENT != next_version
    return buffer


def test_a_file_is_imported_into_a_folder_where_no_buffer_is_yet(exported: Path, place: Path, rft: Said) -> None:
    bad = exported.with_name("bad.jsonl")
    bad.write_text("no json\n")
    code, out, err = rft("import", str(bad), "--buffer", str(place))
    assert (code, out) == (2, "") and "line 1" in err
    assert not place.parent.exists()  # a bad file makes no buffer
    code, out, err = rft("import", str(exported), "--buffer", str(place))
    assert code == 0 and out == "2 experiences in 1 groups imported into words\n"
    assert err == f"rft: created the buffer {place}\n"
    code, _, err = rft("import", str(exported), "--buffer", str(place))
    assert (code, err) == (0, "")


def test_an_import_that_fails_in_the_buffer_it_made_states_what_is_left(exported: Path, place: Path, rft: Said) -> None:
    place.mkdir(parents=True)
    (place / "segments").write_text("a file where the arrays should be")
    code, out, err = rft("import", str(exported), "--buffer", str(place))
    assert code != 0 and out == "" and f"the new buffer {place} stays" in err


def test_create_makes_a_buffer_once(place: Path, rft: Said) -> None:
    assert rft("db", "create", "--buffer", str(place)) == (0, f"created the buffer {place}\n", "")
    code, out, _ = rft("sql", "select count(*) as n from rft.run", "--buffer", str(place), "--json")
    assert code == 0 and '"n": 0' in out
    code, out, err = rft("db", "create", "--buffer", str(place))
    assert (code, out) == (2, "") and "the buffer already exists" in err and "choose another folder" in err


def test_create_that_fails_leaves_nothing(place: Path, rft: Said, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, _, err = rft("db", "create", "--buffer", str(place), "--listen", address)
        assert (
            code == 1 and f"cannot listen on the address buffer.listen: Address already in use (got '{address}')" in err
        )
        assert not place.parent.exists()
        with pytest.raises(BufferUnavailableError, match=r"cannot listen .* choose another port"):
            rftdata.open(BufferConfig(uri=str(place), listen=address))
        assert not place.parent.exists()
        make_tiny_model(tmp_path / "tiny")
        (tmp_path / "c.yaml").write_text(CONFIG % {"uri": place, "segments": "s", "stages": "[]"})
        changes = [
            f"buffer.listen={address}",
            f"model.path={tmp_path}/tiny",
            "explorer.engine=transformers",
            "explorer.reward=exact_match",
        ]
        code, _, err = rft(
            "check", "--deep", str(tmp_path / "c.yaml"), *(word for change in changes for word in ("--set", change))
        )
        assert code and "cannot listen on the address buffer.listen" in err  # beside its tasks, which are not there
        place.mkdir(parents=True)
        assert rft("db", "create", "--buffer", str(place), "--listen", address)[0] == 1
    assert list(place.iterdir()) == []
    place.rmdir()
    (place.parent / "new").write_text("a file")
    code, _, err = rft("db", "create", "--buffer", str(place))
    assert code == 1 and "cannot be created" in err and place.read_text() == "a file"
    place.unlink()


def test_create_that_fails_leaves_a_buffer_that_another_process_is_creating(place: Path) -> None:
    ours, others = EmbeddedServer(place), EmbeddedServer(place)

    def interrupted() -> None:
        with removed_if_it_fails(ours):
            others.start()
            ours.start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert others.is_running()
    others.release()


def test_create_that_fails_leaves_a_buffer_whose_creation_begins_at_this_moment(place: Path) -> None:
    """The other process has the lock of the folder and is about to mark it as used when this one begins to remove it."""
    ours, others = EmbeddedServer(place), EmbeddedServer(place)
    begun, goes_on = threading.Event(), threading.Event()
    hold = others.idle.hold

    def hold_later() -> None:
        begun.set()
        assert goes_on.wait(PATIENCE_S)
        hold()

    others.idle.hold = hold_later  # type: ignore[method-assign]

    def fail() -> None:
        with contextlib.suppress(KeyboardInterrupt), removed_if_it_fails(ours):
            creation.start()
            assert begun.wait(PATIENCE_S)
            raise KeyboardInterrupt

    def waits_for_the_lock() -> bool:
        frame = sys._current_frames().get(failure.ident or 0)
        while frame is not None and "filelock" not in frame.f_code.co_filename:
            frame = frame.f_back
        return frame is not None

    creation, failure = threading.Thread(target=others.start), threading.Thread(target=fail)
    failure.start()
    wait_until(lambda: begun.is_set() and (not failure.is_alive() or waits_for_the_lock()), "the removal")
    goes_on.set()
    creation.join()
    failure.join()
    assert others.is_running()
    others.release()


def test_create_that_fails_removes_only_what_a_buffer_consists_of(place: Path) -> None:
    server = EmbeddedServer(place)
    with contextlib.suppress(KeyboardInterrupt), removed_if_it_fails(server):
        server.start()
        (place / "notes").write_text("a file of another process")
        raise KeyboardInterrupt
    assert [path.name for path in place.iterdir()] == ["notes"] and not server.is_running()


@pytest.mark.parametrize(
    "uri",
    ["host=db user=ada password='se cret'", "mysql://ada:se cret@db/rft", "postgresql+psycopg://ada:se cret@db/rft"],
)
def test_a_connection_string_is_not_taken_for_a_folder(
    uri: str, rft: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (["db", "create"], ["sql", "select 1"], ["doctor"]):
        code, out, err = rft(*arguments, "--buffer", uri)
        assert code != 0 and "write it as postgresql://" in out + err and "cret" not in out + err
    for opens in (rftdata.open, rftdata.create):
        with pytest.raises(BufferUnavailableError, match="cannot be named by this kind of connection string"):
            opens(uri)
    (tmp_path / "c.yaml").write_text(CONFIG % {"uri": uri, "segments": "s", "stages": "[]"})
    code, out, err = rft("check", "c.yaml")
    assert code != 0 and "write it as postgresql://" in err and "cret" not in out + err
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


def test_create_keeps_what_else_is_in_the_folder(place: Path) -> None:
    place.mkdir(parents=True)
    (place / "notes").write_text("mine")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(BufferUnavailableError, match="cannot listen"):
            rftdata.create(BufferConfig(uri=str(place), listen=f"127.0.0.1:{taken.getsockname()[1]}"))
    assert (place / "notes").read_text() == "mine"
    assert rftdata.create(str(place))  # what the first try left is completed
    assert not rftdata.create(str(place), exist_ok=True)
    with pytest.raises(QueryError, match="the buffer already exists"):
        rftdata.create(str(place))


def test_create_fills_an_empty_database_of_a_server(
    exported: Path, empty_uri: str, tmp_path: Path, rft: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = rft("label", "set", "1", "0.5", "--buffer", empty_uri)
    assert code == 1 and "the database contains no buffer" in err and "rft db create" in err
    code, out, _ = rft("db", "create", "--buffer", empty_uri)
    assert code == 0 and out.startswith("created the buffer postgresql://")
    code, _, err = rft("db", "create", "--buffer", empty_uri)
    assert code == 2 and "the buffer already exists" in err
    code, _, err = rft("import", str(exported), "--buffer", empty_uri)
    assert code == 1 and "RFT_SEGMENTS" in err
    monkeypatch.setenv("RFT_SEGMENTS", str(tmp_path / "arrays"))
    code, out, err = rft("import", str(exported), "--buffer", empty_uri)
    assert code == 0 and "2 experiences" in out and err == ""


READING = [
    ["status"],
    ["report"],
    ["sql", "select 1"],
    ["query", "select 1"],
    ["lineage", "1"],
    ["export", "x.parquet"],
    ["tasks", "list"],
    ["tasks", "show", "mine"],
    ["tasks", "stats"],
    ["label", "history", "1"],
    ["label", "queue"],
    ["pairs", "export", "x.jsonl"],
    ["pairs", "build", "--dry-run"],
    ["pipeline", "versions"],
    ["purge", "--where", "true", "--reason", "test", "--dry-run"],
    ["retention", "--max-experiences", "1", "--dry-run"],
]


@pytest.mark.parametrize("arguments", READING, ids=" ".join)
def test_a_command_that_reads_refuses_an_older_schema_and_leaves_it(
    old: Buffer, rft: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RFT_SEGMENTS", str(old.config.segments))
    code, out, err = rft(*arguments, "--buffer", old.config.uri)
    assert (code, out) == (1, "") and "older than this program" in err and "rft db migrate" in err, err
    assert schema_version(old.database) == CURRENT


@pytest.mark.parametrize("arguments", [["pipeline", "preview"], ["check", "--deep"]], ids=" ".join)
def test_looking_at_a_configuration_refuses_an_older_schema_and_leaves_it(
    old: Buffer, rft: Said, tmp_path: Path, arguments: list[str]
) -> None:
    make_tiny_model(tmp_path / "tiny")
    (tmp_path / "tasks.jsonl").write_text('{"question": "1 + 1 =", "answer": "2"}\n')
    places = {"uri": old.config.uri, "segments": old.config.segments, "stages": "[{drop_truncated: {}}]"}
    config = (CONFIG % places).replace("none.jsonl", "tasks.jsonl").replace("path: tiny", "path: ./tiny")
    (tmp_path / "config.yaml").write_text(config.replace("engine: none", "engine: transformers, reward: exact_match"))
    code, _, err = rft(*arguments, str(tmp_path / "config.yaml"))
    assert code == 1 and "older than this program" in err and "rft db migrate" in err, err
    assert schema_version(old.database) == CURRENT


def test_the_doctor_finds_an_older_schema(old: Buffer, rft: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_SEGMENTS", str(old.config.segments))
    code, out, _ = rft("doctor", "--buffer", old.config.uri)
    assert code == 1 and "older than this program" in out
    assert schema_version(old.database) == CURRENT


def test_a_back_up_is_taken_before_an_upgrade(
    old: Buffer, rft: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RFT_SEGMENTS", str(old.config.segments))
    code, _, err = rft("db", "backup", str(tmp_path / "backup"), "--buffer", old.config.uri)
    assert (code, err) == (0, "")
    assert schema_version(old.database) == CURRENT


def test_commands_that_write_and_migrate_report_that_they_migrate(
    first_release: str, tmp_path: Path, rft: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_SEGMENTS", str(tmp_path / "arrays"))
    code, _, err = rft("db", "compact", "--buffer", first_release)
    assert code == 0
    assert err.startswith("rft: migrating the schema of the buffer ") and err.endswith(
        f" from version 0001 to {newest_version()}\n"
    )
    assert rft("db", "compact", "--buffer", first_release)[2] == ""


def test_migrate_states_from_which_version_to_which(first_release: str, rft: Said) -> None:
    code, out, _ = rft("db", "migrate", "--buffer", first_release)
    assert code == 0 and out.endswith(f"was migrated from version 0001 to {newest_version()}\n")
    code, out, _ = rft("db", "migrate", "--buffer", first_release)
    assert code == 0 and out.endswith(f"is already at version {newest_version()}\n")


def test_a_schema_of_a_later_release_is_refused_by_all(old: Buffer, rft: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    old.sql("UPDATE rft.schema_version SET version_num = '9999'")
    monkeypatch.setenv("RFT_SEGMENTS", str(old.config.segments))
    for arguments in (["tasks", "list"], ["db", "compact"], ["db", "migrate"]):
        code, _, err = rft(*arguments, "--buffer", old.config.uri)
        assert code == 1 and "newer than this program" in err, arguments
    for schema in ("migrate", "check"):
        with pytest.raises(SchemaVersionError, match="newer than this program"):
            rftdata.open(old.config, schema=schema)  # type: ignore[arg-type]


@pytest.fixture
def first_release(empty_uri: str, next_version: str) -> str:
    """A database with the schema of an earlier release than this program."""
    from tests.store.postgres.test_upgrade import FIRST, upgrade_to

    database = Database(empty_uri)
    upgrade_to(database, FIRST)
    database.close()
    return empty_uri


def test_the_arrays_folder_of_a_server_is_that_of_the_environment_where_nothing_else_names_it(
    buffer: Buffer, rft: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert buffer.config.segments is not None
    make_tiny_model(tmp_path / "tiny")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "c.yaml").write_text(
        "run: {name: sums}\nmodel: {path: ./tiny}\ntasks: [{name: sums, source: tasks.jsonl, prompt: prompt}]\nalgorithm: {name: grpo, group_size: 2}\n"
        "explorer: {engine: transformers, reward: exact_match}\ntrainer: {batch_groups: 1}\nsteps: 1\n"
    )
    arguments = ("check", "--deep", str(tmp_path / "c.yaml"), "--buffer", buffer.config.uri)
    code, _, err = rft(*arguments)
    assert code == 1 and "export RFT_SEGMENTS=FOLDER" in err
    monkeypatch.setenv("RFT_SEGMENTS", buffer.config.segments)
    assert "RFT_SEGMENTS" not in rft(*arguments)[2]
    with rftdata.open(buffer.config.uri) as found:
        assert found.config.segments == buffer.config.segments
    config = load_config(tmp_path / "c.yaml", [f"buffer.uri={buffer.config.uri}"])
    assert reachable(config).buffer.segments == buffer.config.segments
