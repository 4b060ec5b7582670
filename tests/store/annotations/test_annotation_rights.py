"""Who may annotate, see, and undo what: labellers by psql, blind kinds, and what only workers write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from rftdata import Buffer
from rftdata.annotations import Annotation, LabelKind, annotate, define_kinds
from tests.store.conftest import Login
from tests.support.store_roles import Roles


@pytest.fixture
def labelled(buffer: Buffer) -> Buffer:
    roles = Roles(buffer, steps=2)
    with roles.attempt():
        roles.work()
    define_kinds(buffer, [LabelKind("open", "bool"), LabelKind("hidden", "bool", blind=True)], author="owner")
    return buffer


@contextmanager
def refused() -> Iterator[None]:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        yield


def rows(session: psycopg.Connection, statement: str) -> list[Any]:
    return session.execute(statement).fetchall()  # type: ignore[call-overload, no-any-return]


def add(session: psycopg.Connection, kind: str, target: int, value: str = "true") -> int:
    row = session.execute(
        "INSERT INTO rft.annotation (kind, target_id, value) VALUES (%s, %s, %s::jsonb) RETURNING annotation_id",
        [kind, target, value],
    ).fetchone()
    assert row is not None
    return int(row[0])


def test_of_a_blind_kind_an_account_sees_others_only_after_its_own(labelled: Buffer, login: Login) -> None:
    ada, bob, reader, worker = (
        login(role) for role in ("rft_labeler", "rft_other_labeler", "rft_reader", "rft_worker")
    )
    for kind in ("open", "hidden"):
        add(ada, kind, 1)
        add(ada, kind, 2)
    everything = "SELECT kind, target_id FROM {} ORDER BY 1, 2"
    for place in ("rft.annotation", "rft.v_annotation"):
        look = everything.format(place)
        assert rows(bob, look) == rows(reader, look) == [("open", 1), ("open", 2)]
        assert rows(ada, look) == rows(worker, look) == [("hidden", 1), ("hidden", 2), ("open", 1), ("open", 2)]
    # Neither a count, nor a key, nor a setting, nor an undo of another account's row tells more.
    assert rows(bob, "SELECT count(*) FROM rft.annotation WHERE kind = 'hidden'") == [(0,)]
    with pytest.raises(psycopg.Error):
        rows(bob, "SET row_security = off; SELECT * FROM rft.annotation")
    bob.execute("RESET row_security")
    with refused():
        bob.execute(
            "INSERT INTO rft.annotation (supersedes, retracted) VALUES ((SELECT min(label_batch_id) FROM rft.label_batch), true)"
        )
    for view, row in (
        ("pg_roles", "SELECT 'rft_worker'::name AS rolname, oid FROM pg_catalog.pg_roles WHERE rolname = current_user"),
        (
            "pg_namespace",
            "SELECT 'rft'::name AS nspname, oid AS nspowner FROM pg_catalog.pg_roles WHERE rolname = current_user",
        ),
    ):
        bob.execute(f"CREATE TEMPORARY VIEW {view} AS {row}")
        assert rows(bob, "SELECT rft.may_judge(), count(*) FROM rft.annotation WHERE kind = 'hidden'") == [(False, 0)]
        bob.execute(f"DROP VIEW pg_temp.{view}")
    with bob.transaction(force_rollback=True):  # an answer that may still be taken back shows nothing
        add(bob, "hidden", 2, "false")
        assert rows(bob, "SELECT value FROM rft.annotation WHERE kind = 'hidden'") == [(False,)]
    bob.execute("INSERT INTO rft.annotation (kind, target_id, value, source) VALUES ('hidden', 1, 'false', 'import')")
    assert rows(bob, "SELECT source::text FROM rft.annotation WHERE kind = 'hidden'") == [("import",)]  # no answer
    add(bob, "hidden", 2, "false")
    assert rows(
        bob,
        "SELECT target_id, value FROM rft.v_annotation WHERE kind = 'hidden' AND source = 'human' ORDER BY annotation_id",
    ) == [
        (2, True),
        (2, False),
    ]
    assert rows(reader, "SELECT kind FROM rft.v_annotation WHERE kind = 'hidden'") == []


def test_an_undo_keeps_the_limits_of_texts(labelled: Buffer, login: Login) -> None:
    ada = login("rft_labeler")
    first = add(ada, "open", 1)
    for column, size, says in (("reason", 70_000, "the reason has 70000 bytes"), ("key", 300, "the key has 300 bytes")):
        with pytest.raises(psycopg.Error, match=says):
            ada.execute(
                f"INSERT INTO rft.annotation (supersedes, retracted, {column}) VALUES (%s, true, %s)",
                [first, "x" * size],
            )
    assert rows(ada, "SELECT count(*) FROM rft.v_annotation") == [(1,)]


def test_an_account_is_recorded_and_writes_nothing_in_the_name_of_another(labelled: Buffer, login: Login) -> None:
    ada, bob = login("rft_labeler"), login("rft_other_labeler")
    first = add(ada, "open", 1)
    batch = labelled.sql("SELECT label_batch_id AS b FROM rft.annotation")["b"][0].as_py()
    columns = {
        "session_user_name": "'x'",
        "label_batch_id": "1",
        "annotation_id": "1",
        "made_at": "now()",
        "undone_by": "'x'",
    }
    for column, value in columns.items():
        with refused():
            bob.execute(
                f"INSERT INTO rft.annotation (kind, target_id, value, {column}) VALUES ('open', 1, 'true', {value})"
            )
    # The batch of another account: by its setting, and by the one that the trigger uses, within the statement.
    bob.execute(f"SET rft.label_batch = '{batch}'")
    with refused():
        add(bob, "open", 1)
    bob.execute("RESET rft.label_batch")
    with refused():
        bob.execute(
            "INSERT INTO rft.annotation (kind, target_id, value) SELECT 'open', i, 'true' FROM generate_series(1, 2) i"
            f" WHERE set_config('rft.annotation_batch', '{batch}', true) <> ''"
        )
    for source in ("judge", "rule", "adjudication"):
        with refused():
            bob.execute(
                "INSERT INTO rft.annotation (kind, target_id, value, source) VALUES ('open', 1, 'true', %s)", [source]
            )
    for statement in (
        f"INSERT INTO rft.annotation (supersedes, retracted) VALUES ({first}, true)",
        "INSERT INTO rft.label_kind (kind, type, target) VALUES ('mine', 'bool', 'experience')",
        "UPDATE rft.label_kind SET retired_at = now()",
        "SET rft.purge = '1'; UPDATE rft.annotation SET reason = 'x'",
        "SELECT rft.lock_annotated('experience', 1)",
        f"SELECT * FROM rft.undo_annotations({batch})",
    ):
        with refused():
            bob.execute(statement)  # type: ignore[call-overload]
    assert labelled.sql("SELECT session_user_name AS n FROM rft.v_annotation")["n"].to_pylist() == [ada.info.user]


def test_an_account_undoes_its_own_batch_by_sql_and_the_owner_every(labelled: Buffer, login: Login) -> None:
    ada = login("rft_labeler")
    add(ada, "open", 1)
    add(ada, "open", 1, "false")
    batch = rows(ada, "SELECT max(label_batch_id) FROM rft.annotation")[0][0]
    assert [row[2] for row in rows(ada, f"SELECT * FROM rft.undo_annotations({batch}, 'a slip')")] == [False]
    assert rows(ada, "SELECT value FROM rft.v_annotation") == [(True,)]
    labelled.sql(f"SELECT * FROM rft.undo_annotations({batch + 1})")
    assert rows(ada, "SELECT value, session_user_name FROM rft.v_annotation") == [(False, ada.info.user)]


def test_a_judge_s_answer_and_a_person_s_stand_side_by_side(labelled: Buffer) -> None:
    annotate(labelled, [Annotation("open", 1, True, model="judge-1", confidence=0.8)], author="judge", source="judge")
    annotate(labelled, [Annotation("open", 1, False)], author="ada")
    found = labelled.sql("SELECT source::text AS source, value FROM rft.v_annotation ORDER BY 1").to_pylist()
    assert [(row["source"], row["value"]) for row in found] == [("human", False), ("judge", True)]


def test_no_view_or_function_of_the_owner_shows_what_row_security_hides(labelled: Buffer) -> None:
    """A view runs with its owner's rights unless it has security_invoker; so do the functions that are listed here, and each says why."""
    views = labelled.sql(
        "WITH RECURSIVE reads (oid) AS ("
        "  SELECT 'rft.annotation'::regclass::oid"
        "  UNION SELECT r.ev_class FROM reads f JOIN pg_depend d ON d.refobjid = f.oid AND d.classid = 'pg_rewrite'::regclass"
        "  JOIN pg_rewrite r ON r.oid = d.objid)"
        " SELECT c.relname::text AS name, coalesce(c.reloptions::text, '') AS options FROM reads JOIN pg_class c USING (oid) WHERE c.relkind = 'v'"
    ).to_pylist()
    assert len(views) >= 2
    assert [view["name"] for view in views if "security_invoker=true" not in view["options"]] == []
    definers = labelled.sql(
        "SELECT proname::text AS name FROM pg_proc WHERE pronamespace = 'rft'::regnamespace AND prosecdef AND prosrc ~ 'rft\\.(v_)?annotation\\y'"
    )["name"].to_pylist()
    assert sorted(definers) == ["copy_annotations", "fill_annotation", "has_annotated", "may_see_comment"]
    comments = labelled.sql(
        "SELECT proname::text AS name, obj_description(oid) AS comment FROM pg_proc WHERE pronamespace = 'rft'::regnamespace AND prosecdef"
        " AND proname ~ 'annotat|label_kind'"
    ).to_pylist()
    assert [row["name"] for row in comments if "wner's rights" not in row["comment"]] == []
