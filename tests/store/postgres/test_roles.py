"""Least privilege: what each role may do and may not, logged in by password over TCP."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from urllib.parse import quote

import psycopg
import pytest
from psycopg import sql

import rftdata
from rftcore.cli import run_command
from rftcore.config.run import parse_config
from rftcore.resolved import ResolvedRun
from rftcore.task_pipeline.pipeline import load_tasks
from rftdata import Buffer, exchange, labels
from rftdata.attempts import stored_selection
from rftdata.config import BufferConfig
from rftdata.errors import BufferUnavailableError, QueryError, SchemaVersionError
from rftdata.labels import RewardLabel
from rftdata.maintenance import erasure, purge
from rftdata.maintenance.roles import grant_roles
from rftdata.maintenance.verification import verify
from rftdata.pipeline.records import Question, Review
from rftdata.pipeline.verdicts import ask
from rftdata.postgres.database import Database
from rftdata.postgres.embedded import EmbeddedServer
from rftdata.postgres.migrations import migrate
from rftdata.segments.compaction import Compactor
from tests.support.models import make_tiny_model
from tests.support.ports import closed_port
from tests.support.store_roles import Roles, own_group
from tests.support.waiting import PATIENCE_S

PASSWORD = "p@ss w/ord:%41"
ROLES = ("rft_reader", "rft_labeler", "rft_worker")


@pytest.fixture(scope="module")
def tcp(server_folders: Path) -> Iterator[tuple[EmbeddedServer, int]]:
    """A server that accepts TCP, with an account for every role, and one that owns a database but may not create roles."""
    with closed_port() as port:
        server = EmbeddedServer(server_folders / "roles", listen=f"127.0.0.1:{port}")
        rftdata.open(BufferConfig(uri=str(server.folder), listen=server.listen)).close()
        with psycopg.connect(server.uri, autocommit=True) as connection:
            for role in ROLES:
                statement = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {} IN ROLE {}")
                connection.execute(
                    statement.format(sql.Identifier(f"a_{role}"), sql.Literal(PASSWORD), sql.Identifier(role))
                )
            connection.execute(sql.SQL("CREATE ROLE outsider LOGIN PASSWORD {}").format(sql.Literal(PASSWORD)))
            connection.execute("CREATE DATABASE outside OWNER outsider")
        yield server, port
        server.stop()


def url(tcp: tuple[EmbeddedServer, int], user: str, password: str = PASSWORD, database: str = "rft") -> str:
    return f"postgresql://{user}:{quote(password, safe='')}@127.0.0.1:{tcp[1]}/{database}"


@pytest.fixture
def owner(tcp: tuple[EmbeddedServer, int]) -> Iterator[Buffer]:
    with rftdata.open(BufferConfig(uri=str(tcp[0].folder), listen=tcp[0].listen)) as buffer:
        yield buffer


@pytest.fixture
def stored(owner: Buffer) -> int:
    """A new run with one group; the id of its first experience."""
    run = owner.create_run(name="r", config={}, seed=1, steps=1, pipeline_version="p")
    with owner.writer(run) as writer:
        writer.insert(own_group(task_key=str(run.run_id)))
    return int(owner.sql("SELECT max(experience_id) - 1 AS i FROM rft.experience")["i"][0].as_py())


@pytest.fixture
def as_(tcp: tuple[EmbeddedServer, int], owner: Buffer) -> Iterator[dict[str, Buffer]]:
    """The buffer as each role sees it."""
    segments = str(Path(str(owner.folder)) / "segments")
    buffers = {role: rftdata.open(BufferConfig(uri=url(tcp, f"a_{role}"), segments=segments)) for role in ROLES}
    yield buffers
    for buffer in buffers.values():
        buffer.close()


def denied(buffer: Buffer, statement: str) -> bool:
    try:
        buffer.sql(statement)
    except QueryError as error:
        return "permission denied" in str(error) or "must be owner" in str(error)
    return False


def test_a_wrong_password_and_an_account_without_a_role_are_refused(
    tcp: tuple[EmbeddedServer, int], stored: int
) -> None:
    with pytest.raises(BufferUnavailableError, match="password authentication failed") as refused:
        Database(url(tcp, "a_rft_reader", "guess"))
    assert "guess" not in str(refused.value)
    with psycopg.connect(url(tcp, "outsider")) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute("SELECT * FROM rft.run")


@pytest.mark.parametrize("role", ROLES)
def test_every_role_reads_every_table_and_view_but_known_answers_and_arrays(
    as_: dict[str, Buffer], stored: int, role: str
) -> None:
    tables = as_[role].sql(
        "SELECT relname::text AS t FROM pg_class WHERE relnamespace = 'rft'::regnamespace AND relkind IN ('r', 'v')"
    )
    assert len(tables) > 30
    for table in tables["t"].to_pylist():
        if role != "rft_worker" and table in ("gold", "gold_rate", "question"):
            assert denied(as_[role], f'SELECT count(*) FROM rft."{table}"'), table
        else:
            as_[role].sql(f'SELECT * FROM rft."{table}" LIMIT 1')
    assert as_[role].read_arrays([stored], ["token_ids"])["token_ids"].to_pylist() == [[5, 6, 7, 8, 9]]
    assert list(verify(as_[role])) == []


def test_a_reader_writes_nothing(as_: dict[str, Buffer], owner: Buffer, stored: int) -> None:
    tables = owner.sql(
        "SELECT relname::text AS t FROM pg_class WHERE relnamespace = 'rft'::regnamespace AND relkind = 'r'"
    )
    for role in ("rft_reader", "rft_labeler"):
        for table in tables["t"].to_pylist():
            assert denied(as_[role], f'DELETE FROM rft."{table}"'), (role, table)
            if role == "rft_reader" or table not in ("preference_pair", "annotation", "comment", "saved_query"):
                assert denied(as_[role], f'INSERT INTO rft."{table}" DEFAULT VALUES'), (role, table)
            assert denied(as_[role], f'TRUNCATE rft."{table}"'), (role, table)
    assert denied(as_["rft_reader"], "UPDATE rft.experience SET reward = 1")
    assert denied(as_["rft_reader"], "SELECT rft.lock_groups_and_reviews(ARRAY[1])")
    assert denied(as_["rft_reader"], "SELECT rft.begin_label_batches(1)")
    with pytest.raises(QueryError, match=r"lacks the right.*rft docs roles"):
        labels.set_rewards(as_["rft_reader"], {stored: 1.0}, author="a")


def test_a_labeler_relabels_and_does_nothing_else(as_: dict[str, Buffer], owner: Buffer, stored: int) -> None:
    labeler = as_["rft_labeler"]
    labeler.sql("UPDATE rft.experience SET reward = 0.25 WHERE experience_id = %s", [stored])
    batch = labels.apply(labeler, [RewardLabel(stored, 0.75, True, "seen")], author="ada", source="set")
    labels.undo(labeler, batch.label_batch_id, author="ada")
    history = owner.sql(
        "SELECT new_value, author, session_user_name FROM rft.label WHERE experience_id = %s ORDER BY label_id",
        [stored],
    ).to_pylist()
    assert [(row["new_value"], row["author"], row["session_user_name"]) for row in history] == [
        (0.25, "a_rft_labeler", "a_rft_labeler"),
        (0.75, "ada", "a_rft_labeler"),
        (0.25, "ada", "a_rft_labeler"),
    ]
    other = owner.sql("SELECT max(experience_id) AS i FROM rft.experience")["i"][0].as_py()
    compared = "INSERT INTO rft.preference_pair (chosen_id, rejected_id, margin) VALUES (%s, %s, 1) RETURNING source::text AS s, author"
    assert labeler.sql(compared, [stored, other]).to_pylist() == [{"s": "human", "author": "a_rft_labeler"}]
    for statement in (
        f"INSERT INTO rft.preference_pair (chosen_id, rejected_id, source) VALUES ({other}, {stored}, 'rewards')",
        "UPDATE rft.preference_pair SET margin = 2",
        "SELECT rft.lock_labels()",
        "UPDATE rft.experience SET response = 'x'",
        "UPDATE rft.experience SET reward_sampled = 1",
        "INSERT INTO rft.label (experience_id, author, label_batch_id) VALUES (1, 'x', 1)",
        "UPDATE rft.rollout_group SET status = 'ready'",
        "UPDATE rft.worklist SET available = true",
        "UPDATE rft.run SET stop_requested = true",
        "UPDATE rft.task SET status = 'excluded'",
        "CREATE TABLE rft.mine (a int)",
        "ALTER TABLE rft.experience DISABLE TRIGGER ALL",
        "SELECT rft.purge_texts(ARRAY[1], 1, false)",
        "SELECT rft.create_roles()",
        "SELECT rft.grant_roles()",
        "SET ROLE rft_worker",
    ):
        assert denied(labeler, statement), statement


def test_a_labeler_answers_what_a_worker_asks(as_: dict[str, Buffer], owner: Buffer, stored: int) -> None:
    worker, labeler = as_["rft_worker"], as_["rft_labeler"]
    run_id, group_id = (
        owner.sql(f"SELECT run_id, group_id FROM rft.experience WHERE experience_id = {stored}")[name][0].as_py()
        for name in ("run_id", "group_id")
    )
    with worker.database.transaction() as connection:
        ask(connection, run_id, [Question(stored, group_id, "asks", Review("polite", "Is it polite?", 60.0, "drop"))])
    assert [row["experience_id"] for row in labels.review_queue(labeler, run_id, 5)] == [stored]
    assert denied(labeler, f"UPDATE rft.review SET deadline = now() WHERE experience_id = {stored}")
    assert denied(as_["rft_reader"], f"UPDATE rft.review SET answer = 'pass' WHERE experience_id = {stored}")
    labeler.sql(f"UPDATE rft.review SET answer = 'pass' WHERE experience_id = {stored}")
    (answered,) = owner.sql(f"SELECT state, author FROM rft.v_review WHERE experience_id = {stored}").to_pylist()
    assert answered == {"state": "pass", "author": "a_rft_labeler"}


def test_only_the_owner_may_use_the_exception_for_purges(as_: dict[str, Buffer], stored: int) -> None:
    for role in ("rft_labeler", "rft_worker"):
        statement = "SET rft.purge = '1'; UPDATE rft.experience SET response = 'x'"
        assert denied(as_[role], statement)
        with pytest.raises(QueryError, match="lacks the right"):
            purge.purge(as_[role], f"experience_id = {stored}", reason="x", author="x")


def test_a_worker_does_the_work_of_every_role_of_a_run(as_: dict[str, Buffer], owner: Buffer, tmp_path: Path) -> None:
    worker = as_["rft_worker"]
    # Its run and tasks, too; the helper inserts tasks as the verbs do.
    roles = Roles(worker, steps=2)
    with roles.attempt() as attempt:
        for step in (1, 2):
            roles.work()
            roles.train(attempt, step)
            attempt.commit_checkpoint(step, f"/c/{step}")
        attempt.finish("done")
    with roles.attempt(publish=False):
        pass  # takes over the run: draws and aged groups after the checkpoint return
    ids = worker.sql("SELECT experience_id FROM rft.experience WHERE run_id = %s", [roles.run_id])[
        "experience_id"
    ].to_pylist()
    exchange.export(worker, tmp_path / "a.parquet", runs=[str(roles.run_id)])
    assert exchange.load(worker, tmp_path / "a.parquet", run=f"copy of {roles.run_id}").num_groups == 4
    labels.set_rewards(worker, {ids[0]: 0.5}, author="judge")
    exchange.export(worker, tmp_path / "labelled.parquet", runs=[str(roles.run_id)])
    with pytest.raises(QueryError, match=r"lacks the right to write rft\.label.*nothing was imported"):
        exchange.load(worker, tmp_path / "labelled.parquet", run="labelled")
    with pytest.raises(QueryError, match="no such run"):
        worker.find_run("labelled")
    sql = f"select experience_id from rft.experience where run_id = {roles.run_id}"
    selected = stored_selection.select(worker.database, sql)
    before = worker.sql("SELECT clock_timestamp() AS t")["t"][0].as_py()
    run = worker.create_run(
        name=f"selecting from {roles.run_id}",
        config={},
        seed=1,
        steps=1,
        pipeline_version="none",
        mode="train",
        selected=selected,
    )
    assert worker.sql("SELECT last_analyze > %s AS a FROM pg_stat_user_tables WHERE relname = 'worklist'", [before])[
        "a"
    ][0].as_py()
    with worker.attempt(run) as attempt:
        assert len(attempt.draw(1, 3) or ()) == 3
    assert Compactor(worker.database, worker.segments).run() is not None
    for statement in (
        "UPDATE rft.experience SET response = 'x'",
        "DELETE FROM rft.experience",
        "DELETE FROM rft.run",
        "DELETE FROM rft.checkpoint",
        "UPDATE rft.rollout SET reward = 1",
        "UPDATE rft.label SET author = 'x'",
        "UPDATE rft.verdict SET kept = true",
        "UPDATE rft.group_origin SET origin_run = 'x'",
        "UPDATE rft.group_prompt SET prompt = 'x'",
        "SET rft.purge = '1'; DELETE FROM rft.group_prompt",
        "UPDATE rft.preference_pair SET margin = 2",
        "UPDATE rft.buffer SET buffer_id = gen_random_uuid()",
        "INSERT INTO rft.label (experience_id, author, label_batch_id) VALUES (1, 'x', 1)",
        "UPDATE rft.schema_version SET version_num = '1'",
        "INSERT INTO rft.purge (kind, selection, reason, author, tasks_too) VALUES ('request', '', '', '', false)",
        "CREATE TABLE rft.mine (a int)",
    ):
        assert denied(worker, statement), statement


def test_an_owner_without_the_right_to_make_roles_migrates_nevertheless(
    tcp: tuple[EmbeddedServer, int], tmp_path: Path
) -> None:
    """Roles are the whole server's: here they exist, so they are granted."""
    with rftdata.open(BufferConfig(uri=url(tcp, "outsider", database="outside"), segments=str(tmp_path))) as buffer:
        buffer.create_run(name="r", config={}, seed=1, steps=1, pipeline_version="p")
        assert grant_roles(buffer.database) == ([], sorted(ROLES))
    with rftdata.open(BufferConfig(uri=url(tcp, "a_rft_reader", database="outside"), segments=str(tmp_path))) as buffer:
        assert buffer.find_run().name == "r"
        assert denied(buffer, "UPDATE rft.run SET name = 'x'")


def test_an_old_schema_is_a_clear_error_for_whom_may_not_migrate(
    tcp: tuple[EmbeddedServer, int], tmp_path: Path
) -> None:
    with psycopg.connect(tcp[0].uri, autocommit=True) as connection:
        connection.execute("CREATE DATABASE empty")
    with pytest.raises(SchemaVersionError, match=r"this account has no rights.*let the schema's owner"):
        rftdata.open(BufferConfig(uri=url(tcp, "a_rft_worker", database="empty"), segments=str(tmp_path)))


def test_the_verb_makes_what_is_missing_and_states_what_it_may_not(
    tcp: tuple[EmbeddedServer, int], owner: Buffer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_command(["db", "roles", "--buffer", str(owner.folder)]) == 0
    assert capsys.readouterr().out == "created: none; granted: rft_labeler, rft_reader, rft_worker\n"
    monkeypatch.setenv("RFT_SEGMENTS", str(owner.segments.folder))  # type: ignore[attr-defined]
    assert run_command(["db", "roles", "--buffer", url(tcp, "a_rft_reader")]) == 2
    captured = capsys.readouterr()
    assert (
        "lacks the right" in captured.err
        and PASSWORD not in captured.err
        and quote(PASSWORD, safe="") not in captured.err
    )


def test_rights_are_granted_again_instead_of_added_up(owner: Buffer, as_: dict[str, Buffer]) -> None:
    owner.sql("GRANT DELETE ON rft.run TO rft_reader")
    assert not denied(as_["rft_reader"], "DELETE FROM rft.run WHERE false")
    grant_roles(owner.database)
    assert denied(as_["rft_reader"], "DELETE FROM rft.run WHERE false")


def test_the_migration_makes_the_roles_on_a_new_server_from_two_databases_at_once(
    server_folders: Path, tmp_path: Path
) -> None:
    server = EmbeddedServer(server_folders / "fresh")
    uri = server.start()
    try:
        with psycopg.connect(uri, autocommit=True) as connection:
            connection.execute("CREATE DATABASE second")
        uris = [uri, uri.replace("/rft?", "/second?")]
        script = (
            "import sys; from rftdata.postgres.database import Database; from rftdata.postgres.migrations import migrate; "
            "migrate(Database(sys.argv[1]))"
        )
        processes = [
            subprocess.Popen([sys.executable, "-c", script, uri], stderr=subprocess.PIPE, text=True) for uri in uris
        ]
        for process in processes:
            _, error = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, error
        for uri in uris:
            with psycopg.connect(uri) as connection:
                row = connection.execute("SELECT has_table_privilege('rft_reader', 'rft.run', 'SELECT')").fetchone()
            assert row == (True,)
    finally:
        server.stop()


def test_threads_of_one_process_may_migrate_different_databases(tcp: tuple[EmbeddedServer, int]) -> None:
    names = ("thread1", "thread2", "thread3")
    with psycopg.connect(tcp[0].uri, autocommit=True) as connection:
        for name in names:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    databases = [Database(tcp[0].uri.replace("/rft?", f"/{name}?")) for name in names]
    versions: list[str] = []
    threads = [Thread(target=lambda d=database: versions.append(migrate(d))) for database in databases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(versions) == 3
    for database in databases:
        database.close()


def test_an_owner_that_sees_little_of_other_sessions_still_waits_for_them(
    tcp: tuple[EmbeddedServer, int], tmp_path: Path
) -> None:
    with psycopg.connect(tcp[0].uri, autocommit=True) as connection:
        connection.execute("CREATE DATABASE guarded OWNER outsider")
    config = BufferConfig(uri=url(tcp, "outsider", database="guarded"), segments=str(tmp_path))
    with rftdata.open(config) as buffer:
        with (
            psycopg.connect(url(tcp, "a_rft_reader", database="guarded")),
            pytest.raises(BufferUnavailableError, match="other sessions use the buffer"),
        ):
            erasure.erase(buffer, now=True)
        assert erasure.erase(buffer, now=True).num_ranges == 0


def test_a_worker_loads_tasks_and_decides_on_them(as_: dict[str, Buffer], tmp_path: Path) -> None:
    tiny = make_tiny_model(tmp_path / "model")
    (tmp_path / "t.jsonl").write_text("".join(f'{{"question": "How much is {i} and {i}?"}}\n' for i in range(4)))
    stages = [
        "quality_score",
        {"sql": "SELECT * FROM batch WHERE prompt NOT LIKE '%3%'"},
        "diversity_score",
        "task_priority",
    ]
    raw = {
        "run": {"name": "r"},
        "model": {"path": str(tiny)},
        "algorithm": {"name": "grpo"},
        "explorer": {},
        "steps": 1,
        "trainer": {"batch_groups": 2, "learning_rate": 0.001},
        "tasks": [{"name": "by worker", "source": "t.jsonl"}],
        "pipelines": {"task": stages},
    }
    (done,) = load_tasks(ResolvedRun(parse_config(raw, tmp_path, "test")), as_["rft_worker"])
    assert (done.num_active, done.num_excluded) == (3, 1)
    # An account that may not change tables keeps vectors as arrays.
    kind = "SELECT format_type(atttypid, atttypmod) AS t FROM pg_attribute WHERE attrelid = 'rft.task_embedding'::regclass AND attname = 'embedding'"
    assert as_["rft_reader"].sql(kind)["t"].to_pylist() == ["real[]"]
    assert as_["rft_reader"].sql(
        "SELECT count(*) AS n FROM rft.similar_tasks((SELECT max(task_id) FROM rft.task_embedding))"
    )["n"].to_pylist() == [2]
    assert denied(as_["rft_worker"], "UPDATE rft.task_verdict SET kept = true")
