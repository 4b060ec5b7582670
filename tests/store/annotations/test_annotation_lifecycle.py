"""What happens to annotations when experiences are purged, archived, forked, exported, kept, migrated and selected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from rftcore.cli import run_command
from rftdata import Buffer, Group, exchange, labels
from rftdata.annotations import Annotation, annotate, define_kinds, history, standing
from rftdata.attempts.label_cut import at_label_cut
from rftdata.config import RetentionConfig
from rftdata.errors import ArchivedError, PurgedError, QueryError
from rftdata.maintenance.archive import archive
from rftdata.maintenance.purge import purge
from rftdata.maintenance.restore_run import restore_run
from rftdata.maintenance.retention import apply
from rftdata.maintenance.verification import verify
from rftdata.postgres.database import Database
from rftdata.postgres.embedded import EmbeddedServer
from rftdata.postgres.migrations import migrate
from tests.store.annotations.test_annotations import KINDS, VALUES
from tests.store.postgres.test_upgrade import upgrade_to
from tests.store.writing.test_turns import TASK, single, walk
from tests.support.store_roles import publish_versions


@pytest.fixture
def labelled(buffer: Buffer) -> Buffer:
    """Two groups in the run `walks`; every kind of label about the first, with reasons."""
    publish_versions(buffer, 8)
    run = buffer.create_run(name="walks", config={}, seed=1, steps=3, pipeline_version="none")
    with buffer.writer(run) as writer:
        for key in ("one", "two"):
            writer.insert(Group([walk(), single()], **{**TASK, "task_key": key}))
    define_kinds(buffer, KINDS, author="owner")
    given = [Annotation(kind, 1, value, reason="secret", shown={"of": "secret"}) for kind, value in VALUES.items()]
    annotate(buffer, given, author="ada")
    annotate(buffer, [Annotation("score", 2, 0.5, reason="kept")], author="ada")
    return buffer


def stands(buffer: Buffer, **which: Any) -> dict[str, Any]:
    return {row["kind"]: row["value"] for row in standing(buffer, **which)}


def test_a_purge_removes_texts_and_keeps_numbers(labelled: Buffer) -> None:
    purge(labelled, "experience_id = 1", reason="asked", author="ada", tasks_too=True)
    found = {row["kind"]: row for row in standing(labelled) if row["target_id"] == 1}
    unchanged = {kind: VALUES[kind] for kind in ("good", "score", "verdict", "flags", "grades", "order", "steps")}
    assert {kind: row["value"] for kind, row in found.items()} == {
        **unchanged,
        "critique": "[purged]",
        "better": {"response": "[purged]"},
        "marks": [{"start": 0, "end": 1, "unit": "token", "label": "wrong"}],
    }
    assert {(row["reason"], row["shown"]) for row in found.values()} == {("[purged]", None)}
    assert [row["reason"] for row in standing(labelled, target_id=2)] == ["kept"]
    for kind in ("score", "verdict", "order", "critique"):
        with pytest.raises(PurgedError, match="was purged"):
            annotate(labelled, [Annotation(kind, 1, VALUES[kind], reason="again")], author="bob")
    batch = history(labelled, kind="score", target_id=1)[0]["label_batch_id"]
    assert labels.undo(labelled, batch, author="ada").num_annotations == 10  # an undo stores no text
    assert list(verify(labelled)) == []


def test_a_purge_waits_for_an_annotation_and_an_annotation_for_a_purge(labelled: Buffer) -> None:
    insert = "INSERT INTO rft.annotation (kind, target_id, value, reason) VALUES ('score', 1, '0.1', 'secret')"
    with psycopg.connect(labelled.config.uri) as person, psycopg.connect(labelled.config.uri) as owner:
        person.execute(insert)
        owner.execute("SET lock_timeout = '200ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            owner.execute("SELECT rft.lock_purged('{1}')")
        owner.rollback()
        person.rollback()
        owner.execute("SELECT rft.lock_purged('{1}')")
        person.execute("SET lock_timeout = '200ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            person.execute(insert)


def test_an_archived_run_keeps_its_annotations_and_accepts_none(labelled: Buffer) -> None:
    before = history(labelled)
    labelled.find_run("walks").end("finished", "done")
    archive(labelled, "walks", author="ada")
    assert history(labelled) == before
    for annotation in (
        Annotation("score", 3, 0.5),
        Annotation("verdict", 1, "keep"),
        Annotation("order", 1, VALUES["order"]),
    ):
        with pytest.raises(ArchivedError, match='run "walks" is archived'):
            annotate(labelled, [annotation], author="ada")
    annotate(labelled, [Annotation("critique", 1, "Of a task, which is of no run.")], author="ada")
    with pytest.raises(ArchivedError):
        labels.undo(labelled, before[0]["label_batch_id"], author="ada")
    restore_run(labelled, "walks")
    annotate(labelled, [Annotation("score", 3, 0.5)], author="ada")
    assert list(verify(labelled)) == []


def test_a_fork_copies_what_stands_and_goes_its_own_way(labelled: Buffer) -> None:
    annotate(labelled, [Annotation("score", 1, 0.9)], author="ada")
    with labelled.attempt("walks") as attempt:
        attempt.commit_checkpoint(1, "/c/1")
    labelled.fork("walks", name="other", step=0, keep_rollouts=True)
    copies = [row for row in standing(labelled) if row["run"] == "other"]
    first = min(row["target_id"] for row in copies if row["target"] == "experience")
    expected = VALUES | {"score": 0.9, "order": {"order": [[first + 2], [first, first + 1]]}}
    del expected["critique"]  # a task has no copies
    assert {row["kind"]: row["value"] for row in copies if row["target_id"] != first + 1} == expected
    assert {(row["author"], row["reason"]) for row in copies} == {("ada", "secret"), ("ada", None), ("ada", "kept")}
    annotate(labelled, [Annotation("score", first, 0.1), Annotation("score", 1, 0.2)], author="ada")
    assert (stands(labelled, kind="score", target_id=first), stands(labelled, kind="score", target_id=1)) == (
        {"score": 0.1},
        {"score": 0.2},
    )
    assert list(verify(labelled)) == []


@pytest.mark.parametrize("name", ["all.jsonl", "all.parquet"])
def test_exported_runs_carry_what_stands(labelled: Buffer, other: Buffer, tmp_path: Path, name: str) -> None:
    annotate(labelled, [Annotation("score", 1, 0.9)], author="bob")
    exchange.export(labelled, tmp_path / name)
    other.sql(
        "INSERT INTO rft.label_kind (kind, type, target) VALUES ('score', 'number', 'experience')"
    )  # another definition
    exchange.load(other, tmp_path / name)
    found = standing(other)
    shift = min(row["target_id"] for row in found if row["kind"] == "better") - 1
    ranking = {"order": [[3 + shift], [1 + shift, 2 + shift]]}
    kept = {kind: value for kind, value in VALUES.items() if kind != "critique"}
    ada = {row["kind"]: row["value"] for row in found if row["author"] == "ada" and row["reason"] == "secret"}
    assert ada == kept | {"order": ranking}
    assert [(row["kind"], row["kind_version"], row["value"]) for row in found if row["author"] == "bob"] == [
        ("score", 2, 0.9)
    ]
    assert other.sql("SELECT version FROM rft.v_label_kind WHERE kind = 'score'")["version"].to_pylist() == [1]
    whole = other.sql("SELECT min(made_at) AS m FROM rft.annotation")["m"][0].as_py()
    assert (
        whole == labelled.sql("SELECT min(made_at) AS m FROM rft.annotation WHERE kind <> 'critique'")["m"][0].as_py()
    )
    assert list(verify(other)) == []
    batch = next(row["label_batch_id"] for row in found if row["author"] == "bob")
    assert labels.undo(other, batch, author="me").num_annotations == 1
    assert exchange.load(other, tmp_path / name).num_groups == 0


def test_a_file_with_a_wrong_annotation_is_refused_whole(labelled: Buffer, other: Buffer, tmp_path: Path) -> None:
    file = tmp_path / "all.jsonl"
    exchange.export(labelled, file)
    file.write_text(file.read_text().replace('"value": 0.3', '"value": 7'))
    with pytest.raises(QueryError, match="an annotation of the kind score: the value must be a number from 0 up to 1"):
        exchange.load(other, file)
    assert other.sql("SELECT count(*) AS n FROM rft.experience")["n"].to_pylist() == [0]


def test_an_annotation_of_a_person_protects_its_group_from_retention(labelled: Buffer) -> None:
    with labelled.database.transaction() as connection:
        connection.execute("UPDATE rft.run SET status = 'finished'")
    rules = RetentionConfig(max_experiences=0, keep_labelled=True)
    annotate(labelled, [Annotation("good", 5, True)], author="rule", source="rule")
    done = apply(labelled, rules, author="ada")
    assert (done.num_protected, done.num_experiences) == (3, 3)


def test_damage_of_annotations_is_found(labelled: Buffer) -> None:
    with psycopg.connect(labelled.config.uri) as owner:
        owner.execute("ALTER TABLE rft.annotation DISABLE TRIGGER USER")
        owner.execute("UPDATE rft.annotation SET target_id = 77 WHERE kind = 'verdict'")
        owner.execute("ALTER TABLE rft.annotation ENABLE TRIGGER USER")
    assert [problem.partition(", which")[0].partition(" is ")[2] for problem in verify(labelled)] == [
        "about rollout 77"
    ]


def test_a_cut_covers_annotations_and_waits_for_those_of_open_transactions(labelled: Buffer) -> None:
    newest = labelled.sql("SELECT max(annotation_id) AS m FROM rft.annotation")["m"][0].as_py()
    with at_label_cut(labelled.database) as (_, cut):
        assert cut == newest
    with psycopg.connect(labelled.config.uri) as person, psycopg.connect(labelled.config.uri) as locker:
        person.execute("INSERT INTO rft.annotation (kind, target_id, value) VALUES ('score', 2, '0.1')")
        locker.execute("SET lock_timeout = '200ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            locker.execute("SELECT rft.lock_labels()")


def test_queries_and_rft_show_have_annotations(
    labelled: Buffer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_SEGMENTS", str(labelled.config.segments))
    query = "SELECT kind, num FROM annotation WHERE num IS NOT NULL ORDER BY annotation_id"
    assert [tuple(row.values()) for row in labelled.query(query).read_all().to_pylist()] == [
        ("good", 1),
        ("score", 0.3),
        ("score", 0.5),
    ]
    joined = "SELECT a.value::VARCHAR AS value FROM v_annotation a JOIN experience e ON e.experience_id = a.target_id WHERE a.kind = 'better'"
    assert "four" in labelled.query(joined).read_all()["value"][0].as_py()
    for words, told in ((["1"], "better of "), (["--rollout", "1"], "verdict of "), (["--group", "1"], "order of ")):
        assert run_command(["show", *words, "--buffer", labelled.config.uri]) == 0
        assert told in capsys.readouterr().out


def test_a_buffer_of_schema_0003_is_migrated_and_labelled(server: EmbeddedServer, empty_uri: str) -> None:
    database = Database(empty_uri)
    upgrade_to(database, "0003")
    with database.connection() as connection:
        connection.execute("INSERT INTO rft.pipeline (pipeline_version, digest, stages) VALUES ('old', '', '[]')")
        connection.execute("INSERT INTO rft.task (taskset, task_key, payload) VALUES ('t', 'k', '{}')")
    migrate(database)
    with database.connection() as connection:
        assert connection.execute("SELECT label_kinds FROM rft.pipeline").fetchall() == [{"label_kinds": []}]
        connection.execute("INSERT INTO rft.label_kind (kind, type, target) VALUES ('fair', 'bool', 'task')")
        connection.execute("INSERT INTO rft.annotation (kind, target_id, value) VALUES ('fair', 1, 'true')")
        assert connection.execute("SELECT value FROM rft.v_annotation").fetchall() == [{"value": True}]
    database.close()


def test_two_windows_supersede_each_other_and_a_repeated_key_waits(labelled: Buffer) -> None:
    """The second statement waits at the target, and then sees the first."""
    insert = "INSERT INTO rft.annotation (kind, target_id, value, key) VALUES ('score', 3, %s, %s) RETURNING supersedes"
    with psycopg.connect(labelled.config.uri) as one, psycopg.connect(labelled.config.uri, autocommit=True) as two:
        assert one.execute(insert, ["0.1", "a"]).fetchall() == [(None,)]
        finished: list[Any] = []
        waiting = _in_thread(lambda: finished.append(two.execute(insert, ["0.1", "a"]).fetchall()))
        one.commit()
        waiting()
        assert finished == [[]]
        one.execute(insert, ["0.3", "b"])
        waiting = _in_thread(lambda: finished.append(two.execute(insert, ["0.4", "c"]).fetchall()))
        one.commit()
        waiting()
    newest = history(labelled, target_id=3, kind="score")
    assert [(row["value"], row["supersedes"] is not None) for row in newest] == [(0.4, True), (0.3, True), (0.1, False)]
    assert finished[1] == [(newest[1]["annotation_id"],)]


def _in_thread(action: Callable[[], object]) -> Callable[[], None]:
    import threading
    import time

    thread = threading.Thread(target=action)
    thread.start()
    time.sleep(0.3)
    return thread.join
