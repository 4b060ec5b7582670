"""Backups: taken while the buffer is in use, restored elsewhere completely, by the commands and by pg_dump with a copy."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import rftdata
from rftcore.cli import run_command
from rftdata import Buffer, exchange, labels
from rftdata.annotations import Annotation, LabelKind, annotate, define_kinds
from rftdata.config import BufferConfig
from rftdata.errors import BufferUnavailableError, ConflictError, QueryError, RftError, SegmentCorruptError
from rftdata.files.durable import draft_folder
from rftdata.maintenance import backup, purge
from rftdata.maintenance.verification import verify
from rftdata.postgres.embedded import EmbeddedServer
from rftdata.postgres.programs import binary_dir
from tests.support.store_roles import Roles, own_group
from tests.support.waiting import PATIENCE_S, wait_until

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "back-up.md"


@pytest.fixture
def trained(buffer: Buffer) -> Buffer:
    """A run with a checkpoint, a label and a purged experience."""
    roles = Roles(buffer, steps=2)
    with roles.attempt() as attempt:
        roles.work()
        roles.train(attempt, 1)
        attempt.commit_checkpoint(1, "/c/1")
    ids = experience_ids(buffer)
    labels.set_rewards(buffer, {ids[0]: 0.5}, author="ada")
    define_kinds(buffer, [LabelKind("good", "bool", blind=True)], author="ada")
    annotate(buffer, [Annotation("good", ids[0], True)], author="ada")
    purge.purge(buffer, f"experience_id = {ids[-1]}", reason="x", author="ada")
    return buffer


def experience_ids(buffer: Buffer) -> list[int]:
    found: list[int] = buffer.sql("SELECT experience_id FROM rft.experience ORDER BY 1")["experience_id"].to_pylist()
    return found


@pytest.fixture
def restored_folder(server_folders: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    folder = server_folders / f"restored-{abs(hash(request.node.nodeid)):x}"
    yield folder
    EmbeddedServer(folder).stop()


def contents(buffer: Buffer) -> dict[str, list[str]]:
    """Every row of every table, as text."""
    tables = buffer.sql(
        "SELECT relname::text AS t FROM pg_class WHERE relnamespace = 'rft'::regnamespace AND relkind = 'r'"
    )
    return {
        table: sorted(row["x"] for row in buffer.sql(f'SELECT x::text AS x FROM rft."{table}" x').to_pylist())
        for table in tables["t"].to_pylist()
    }


def test_a_restored_buffer_is_the_same_and_continues(trained: Buffer, tmp_path: Path, restored_folder: Path) -> None:
    manifest = backup.back_up(trained, tmp_path / "backup")
    assert manifest.num_experiences == 4 and manifest.segment_bytes > 0
    with backup.restore(tmp_path / "backup", BufferConfig(uri=str(restored_folder))) as restored:
        assert contents(restored) == contents(trained)
        ids = experience_ids(trained)[:-1]
        assert restored.read_arrays(ids, ["token_ids"]) == trained.read_arrays(ids, ["token_ids"])
        assert list(verify(restored)) == []
        # It is usable: the run continues from its checkpoint, and ids continue where they were.
        with restored.attempt("roles") as attempt:
            assert attempt.start_step == 1
        with restored.writer("roles") as writer:
            writer.insert(own_group())
        assert experience_ids(restored)[-1] == experience_ids(trained)[-1] + 2
        may = restored.sql("SELECT has_table_privilege('rft_reader', 'rft.run', 'SELECT') AS may")
        assert may["may"].to_pylist() == [True]


def test_a_back_up_under_writers_is_of_one_moment(trained: Buffer, tmp_path: Path, restored_folder: Path) -> None:
    ended = threading.Event()

    def write() -> None:
        with trained.writer("roles") as writer:
            while not ended.is_set():
                writer.insert(own_group(task_key="x"), own_group(task_key="y"))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        wait_until(lambda: len(experience_ids(trained)) > 4, "the first groups of the writer")
        manifest = backup.back_up(trained, tmp_path / "backup")
        wait_until(lambda: len(experience_ids(trained)) > manifest.num_experiences, "further groups")
    finally:
        ended.set()
        thread.join()
    with backup.restore(tmp_path / "backup", BufferConfig(uri=str(restored_folder))) as restored:
        assert len(experience_ids(restored)) == manifest.num_experiences
        assert list(verify(restored)) == []


def test_purged_arrays_are_not_in_a_later_back_up(buffer: Buffer, tmp_path: Path) -> None:
    run = buffer.create_run(name="r", config={}, seed=1, steps=1, pipeline_version="none")
    group = own_group()
    group.rollouts[0].sequences[0].token_ids = [777001, 777002, 777003, 777004, 777005]
    with buffer.writer(run) as writer:
        writer.insert(group)
    tokens = b"".join(token.to_bytes(4, "little") for token in range(777001, 777006))
    purge.purge(buffer, "rollout_index = 0", reason="x", author="ada")
    backup.back_up(buffer, tmp_path / "backup")
    assert any(
        tokens in file.read_bytes() for file in Path(str(buffer.config.segments)).iterdir()
    )  # still within the grace
    assert not any(tokens in file.read_bytes() for file in (tmp_path / "backup" / "segments").iterdir())


def test_damage_is_found_when_it_is_copied_and_when_it_is_restored(
    trained: Buffer, tmp_path: Path, restored_folder: Path
) -> None:
    backup.back_up(trained, tmp_path / "backup")

    def damage(folder: Path) -> None:
        file = max(folder.iterdir(), key=lambda path: path.stat().st_size)
        row = trained.sql(
            "SELECT offset_bytes FROM rft.segment JOIN rft.segment_file USING (file_id) WHERE uri = %s", [file.name]
        ).to_pylist()[0]
        with open(file, "r+b") as opened:
            opened.seek(row["offset_bytes"] + 300)
            byte = opened.read(1)
            opened.seek(-1, os.SEEK_CUR)
            opened.write(bytes([byte[0] ^ 1]))

    damage(tmp_path / "backup" / "segments")
    with pytest.raises(RftError, match="the backup is damaged: segment"):
        backup.restore(tmp_path / "backup", BufferConfig(uri=str(restored_folder)))
    damage(Path(str(trained.config.segments)))
    with pytest.raises(SegmentCorruptError, match="do not match their checksum"):
        backup.back_up(trained, tmp_path / "second")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backup", "segments"]


def test_two_that_write_to_one_path_do_not_mix(trained: Buffer, tmp_path: Path) -> None:
    """The second is refused, and the first is whole. What a killed process has left is removed."""
    for name, write in (
        ("backup", lambda: backup.back_up(trained, tmp_path / "backup")),
        ("a.jsonl", lambda: exchange.export(trained, tmp_path / "a.jsonl")),
    ):
        killed = (
            "import os, sys; from pathlib import Path; from rftdata.files.durable import draft_folder\n"
            "with draft_folder(Path(sys.argv[1])) as draft: (draft / 'left').write_text('half'); os.kill(os.getpid(), 9)"
        )
        subprocess.run([sys.executable, "-c", killed, str(tmp_path / name)], check=False)
        assert [file.read_text() for file in tmp_path.glob(f"{name}.unfinished/*/left")] == ["half"]
        with draft_folder(tmp_path / name) as draft:
            assert list(draft.iterdir()) == []
            (draft / "mine").write_text("whole")
            with pytest.raises(ConflictError, match=f"another process is writing .*{name}"):
                write()
            assert (draft / "mine").read_text() == "whole"
        write()
    assert not (tmp_path / "backup" / "mine").exists() and not list(tmp_path.glob("*.unfinished"))


def test_a_folder_that_is_no_draft_stays_as_it_is(trained: Buffer, tmp_path: Path) -> None:
    for name, write in (
        ("backup", lambda: backup.back_up(trained, tmp_path / "backup")),
        ("a.jsonl", lambda: exchange.export(trained, tmp_path / "a.jsonl")),
    ):
        mine = tmp_path / f"{name}.unfinished" / "notes"
        mine.parent.mkdir()
        mine.write_text("mine")
        with pytest.raises(ConflictError, match=rf"the folder .*{name}.unfinished is there.*rename or remove"):
            write()
        assert mine.read_text() == "mine" and not (tmp_path / name).exists()


def test_the_verbs(
    trained: Buffer,
    tmp_path: Path,
    restored_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RFT_SEGMENTS", str(trained.config.segments))
    folder = str(tmp_path / "backup")
    assert run_command(["db", "backup", folder, "--json", "--buffer", trained.config.uri]) == 0
    assert json.loads(capsys.readouterr().out)["num_experiences"] == 4
    monkeypatch.delenv("RFT_SEGMENTS")
    assert run_command(["db", "restore", folder, "--buffer", str(restored_folder)]) == 0
    assert capsys.readouterr().out == f"{restored_folder}: 4 experiences, every segment matches its checksum\n"
    assert run_command(["doctor", "--buffer", str(restored_folder)]) == 0
    capsys.readouterr()
    for arguments, what in (
        (["db", "backup", folder, "--buffer", str(restored_folder)], "already exists"),
        (["db", "restore", folder, "--buffer", str(restored_folder)], "already contains a buffer"),
        (["db", "restore", folder], "no target of the restore is given"),
        (["db", "restore", str(tmp_path), "--buffer", str(tmp_path / "new")], "there is no backup here"),
        (["db", "restore", folder, "--buffer", trained.config.uri], "--segments"),
        (
            ["db", "restore", folder, "--buffer", trained.config.uri, "--segments", str(tmp_path / "s")],
            "already contains a buffer",
        ),
    ):
        code = run_command(arguments)
        captured = capsys.readouterr()
        assert code == 2 and what in captured.err, captured.err
        assert "rft_owner:" not in captured.err or ":…@" in captured.err
    assert not (tmp_path / "s").exists() and not (tmp_path / "new").exists()


def test_a_failure_of_pg_dump_is_reported_without_the_password_and_leaves_nothing(
    trained: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGOPTIONS", "-c default_transaction_isolation=nonsense")
    with pytest.raises(BufferUnavailableError, match="pg_dump failed") as failed:
        backup.back_up(trained, tmp_path / "backup")
    password = re.search(r":([^:@]*)@", trained.config.uri)
    assert password is not None and password[1] not in str(failed.value)
    assert [path.name for path in tmp_path.iterdir()] == ["segments"]


def test_a_back_up_is_restored_into_a_database_on_a_server(
    trained: Buffer, server: EmbeddedServer, tmp_path: Path
) -> None:
    backup.back_up(trained, tmp_path / "backup")
    with psycopg.connect(server.uri, autocommit=True) as connection:
        connection.execute("DROP DATABASE IF EXISTS of_a_backup")
        connection.execute("CREATE DATABASE of_a_backup")
    target = BufferConfig(uri=server.uri.replace("/rft?", "/of_a_backup?"), segments=str(tmp_path / "arrays"))
    with backup.restore(tmp_path / "backup", target) as restored:
        assert contents(restored) == contents(trained)
        assert exchange.export(restored, tmp_path / "a.parquet").num_purged == 1
    with pytest.raises(QueryError, match="not empty"):
        backup.restore(tmp_path / "backup", target)
    with psycopg.connect(server.uri, autocommit=True) as connection:
        connection.execute("DROP DATABASE of_a_backup WITH (FORCE)")


def test_the_commands_of_the_page_work_as_they_stand(trained: Buffer, tmp_path: Path, server: EmbeddedServer) -> None:
    """The part for a server of one's own: pg_dump, a copy of the folder, pg_restore."""
    block = re.search(r"<!-- by hand -->\n```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    with psycopg.connect(server.uri, autocommit=True) as connection:
        connection.execute("DROP DATABASE IF EXISTS restored_by_hand")
        connection.execute("CREATE DATABASE restored_by_hand")
    target = server.uri.replace("/rft?", "/restored_by_hand?")
    script = tmp_path / "page.sh"
    script.write_text("set -eu\n" + block[1])
    programs = os.environ.get("RFT_TEST_POSTGRES", binary_dir())  # those of the server's version
    environment = {
        **os.environ,
        "OLD_URL": trained.config.uri,
        "NEW_URL": target,
        "OLD_SEGMENTS": str(trained.config.segments),
        "PYTHONPATH": str(PAGE.parents[2]),
        "NEW_SEGMENTS": str(tmp_path / "new" / "segments"),
        "PATH": f"{programs}:{_folder_of_rft()}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["sh", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is well" in done.stdout
    with rftdata.open(BufferConfig(uri=target, segments=str(tmp_path / "new" / "segments"))) as restored:
        assert contents(restored) == contents(trained)


def _folder_of_rft() -> str:
    found = shutil.which("rft", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert found is not None
    return str(Path(found).parent)
