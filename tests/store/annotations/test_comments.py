"""Comments of people: threads that are append-only, tell no blind answer, and go where the labels of their target go."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from rftdata import Buffer, Group, exchange
from rftdata.annotations import LabelKind, define_kinds
from rftdata.annotations.comments import add_comment, comments, num_comments
from rftdata.config import RetentionConfig
from rftdata.errors import ArchivedError, PurgedError, QueryError
from rftdata.maintenance.archive import archive
from rftdata.maintenance.purge import purge
from rftdata.maintenance.retention import apply
from rftdata.maintenance.verification import verify
from tests.store.annotations.test_annotation_rights import add, refused, rows
from tests.store.conftest import Login
from tests.store.writing.test_turns import TASK, single, walk
from tests.support.store_roles import publish_versions

INSERT = "INSERT INTO rft.comment (target, target_id, comment, kind) VALUES (%s, %s, %s, %s)"
SEEN = "SELECT comment FROM rft.comment ORDER BY comment_id"


@pytest.fixture
def walks(buffer: Buffer) -> Buffer:
    """Two groups of the run `walks`: experiences 1 to 3 of two rollouts in the first; kinds of all targets, some of them blind."""
    publish_versions(buffer, 8)
    run = buffer.create_run(name="walks", config={}, seed=1, steps=3, pipeline_version="none")
    with buffer.writer(run) as writer:
        for key in ("one", "two"):
            writer.insert(Group([walk(), single()], **{**TASK, "task_key": key}))
    kinds = [
        LabelKind("open", "bool"),
        LabelKind("hidden", "bool", blind=True),
        LabelKind("hidden_group", "bool", target="group", blind=True),
        LabelKind("hidden_task", "bool", target="task", blind=True),
    ]
    define_kinds(buffer, kinds, author="owner")
    return buffer


def said(session: psycopg.Connection) -> list[str]:
    return [row[0] for row in rows(session, SEEN)]


def test_a_thread_is_append_only_and_names_its_accounts(walks: Buffer, login: Login) -> None:
    ada, bob, reader = login("rft_labeler"), login("rft_other_labeler"), login("rft_reader")
    ada.execute(INSERT, ["experience", 1, "Is the unit right?", None])
    bob.execute(INSERT, ["experience", 1, "Yes, see the task.", "open"])
    first = add_comment(walks, "group", 1, "Look at both.", author="eve", key="k")
    assert add_comment(walks, "group", 1, "Look at both.", author="eve", key="k") == first
    with pytest.raises(QueryError, match=f'"k" was used for comment {first}'):
        add_comment(walks, "group", 1, "Look at the second.", author="eve", key="k")
    thread = comments(walks, "experience", 1)
    assert [(each.comment, each.kind) for each in thread] == [
        ("Is the unit right?", None),
        ("Yes, see the task.", "open"),
    ]
    assert [each.author for each in thread] == [each.session_user_name for each in thread]
    assert [each.session_user_name.split("_of_")[0] for each in thread] == ["rft_labeler", "rft_other_labeler"]
    assert num_comments(walks, "experience", [1, 2]) == {1: 2} and num_comments(walks, "group", [1]) == {1: 1}
    assert len(said(reader)) == 3
    with refused():
        reader.execute(INSERT, ["experience", 1, "I may only look.", None])
    for column, value in (("session_user_name", "'eve'"), ("made_at", "now()"), ("group_id", "2")):
        with refused():
            ada.execute(
                f"INSERT INTO rft.comment (target, target_id, comment, {column}) VALUES ('experience', 1, 'x', {value})"
            )
    for change in ("UPDATE rft.comment SET comment = 'x'", "DELETE FROM rft.comment", "TRUNCATE rft.comment"):
        with refused():
            ada.execute(change)
        with pytest.raises(QueryError, match="append-only"):
            walks.sql(change)


@pytest.mark.parametrize(
    ("target", "target_id", "text", "kind", "says"),
    [
        ("experience", 99, "x", None, "there is no experience 99"),
        ("experience", 1, " \n", None, "has 0 bytes"),
        ("experience", 1, "x" * 65_537, None, "has 65537 bytes"),
        ("experience", 1, "x", "unknown", 'no kind of label "unknown"'),
        ("experience", 1, "x", "hidden_group", "is about a group"),
        ("experience", 1, "x\x00", None, "NUL"),
    ],
)  # fmt: skip
def test_what_cannot_be_stored_is_refused(
    walks: Buffer, target: str, target_id: int, text: str, kind: str | None, says: str
) -> None:
    with pytest.raises(QueryError, match=says):
        add_comment(walks, target, target_id, text, author="ada", kind=kind)  # type: ignore[arg-type]
    assert walks.sql("SELECT FROM rft.comment").num_rows == 0


def test_a_comment_tells_nothing_to_an_account_with_an_open_blind_question(walks: Buffer, login: Login) -> None:
    ada, bob, reader, worker = (
        login(role) for role in ("rft_labeler", "rft_other_labeler", "rft_reader", "rft_worker")
    )
    # Experience 1 is asked, experience 2 is annotated, experience 3 is neither; all are of group 1. Group 2 has no blind item.
    walks.sql("INSERT INTO rft.question (kind, target_id, wanted) VALUES ('hidden', 1, 2)")
    add(ada, "hidden", 1, "false")
    add(ada, "hidden", 2, "false")
    for target, target_id, text, kind in (
        ("experience", 1, "1 is wrong", None),
        ("experience", 2, "2 is wrong", "open"),
        ("experience", 3, "3 is wrong", None),
        ("experience", 3, "3 as an item", "hidden"),
        ("rollout", 1, "its rollout", None),
        ("group", 1, "its group", None),
        ("group", 2, "another group", None),
    ):
        ada.execute(INSERT, [target, target_id, text, kind])
    everything = said(ada)
    assert len(everything) == 7 and said(worker) == everything
    assert said(bob) == said(reader) == ["3 is wrong", "another group"]
    assert rows(bob, "SELECT count(*) FROM rft.v_comment_in_file") == [(2,)]
    ids = rows(ada, "SELECT comment_id FROM rft.comment ORDER BY 1")
    assert rows(bob, f"SELECT rft.may_see_comment({ids[0][0]}), rft.may_see_comment(0)") == [(False, False)]
    with pytest.raises(psycopg.Error):
        rows(bob, "SET row_security = off; SELECT * FROM rft.comment")
    bob.execute("RESET row_security")
    # An answer that may still be taken back shows nothing.
    with bob.transaction(force_rollback=True):
        add(bob, "hidden", 1)
        assert "1 is wrong" not in said(bob)
    add(bob, "hidden", 1)
    assert said(bob) == ["1 is wrong", "3 is wrong", "another group"]
    add(bob, "hidden", 2)
    assert said(bob) == ["1 is wrong", "2 is wrong", "3 is wrong", "its rollout", "its group", "another group"]
    # One's own comment is always seen, and shows those of others no earlier.
    reader_only = said(reader)
    bob.execute(INSERT, ["experience", 1, "No, it is right", None])
    assert said(bob)[-1] == "No, it is right" and said(reader) == reader_only
    # A blind question about the group, or its task, covers comments on its experiences.
    add(ada, "hidden_task", 1)
    assert said(bob) == ["another group", "No, it is right"]
    add(bob, "hidden_task", 1)
    add(ada, "hidden_group", 2)
    assert "another group" not in said(bob) and "1 is wrong" in said(bob)


def test_an_account_comments_where_it_may_label(walks: Buffer, login: Login) -> None:
    ada = login("rft_labeler")
    walks.sql(f"INSERT INTO rft.label_permission (account, kind) VALUES ('{ada.info.user}', 'open')")
    ada.execute(INSERT, ["experience", 1, "x", "open"])
    ada.execute(INSERT, ["experience", 1, "x", None])
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="may not comment on experience 1"):
        ada.execute(INSERT, ["experience", 1, "x", "hidden"])
    walks.sql("UPDATE rft.label_permission SET revoked_at = now()")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="may not comment on group 1"):
        ada.execute(INSERT, ["group", 1, "x", None])


def test_purge_archive_export_retention_and_doctor_cover_comments(walks: Buffer, other: Buffer, tmp_path: Path) -> None:
    places = (("experience", 1), ("experience", 2), ("rollout", 1), ("group", 1), ("group", 2), ("task", 1))
    for target, target_id in places:
        add_comment(walks, target, target_id, f"about {target} {target_id}", author="ada", kind=None)  # type: ignore[arg-type]
    walks.sql("UPDATE rft.run SET status = 'finished'")
    rules = RetentionConfig(max_experiences=0, keep_labelled=True)
    assert apply(walks, rules, author="ada", dry_run=True).num_protected == 6

    file = tmp_path / "walks.parquet"
    exchange.export(walks, file)
    exchange.load(other, file)
    columns = "target, kind, comment, author, session_user_name, made_at"
    texts = f"SELECT {columns} FROM rft.comment WHERE target <> 'task' ORDER BY comment"
    assert other.sql(texts).to_pylist() == walks.sql(texts).to_pylist()
    assert list(verify(other)) == []

    purge(walks, "experience_id = 1", reason="asked", author="ada", tasks_too=True)
    left = walks.sql(
        "SELECT target || ' ' || target_id AS place, comment FROM rft.comment ORDER BY comment_id"
    ).to_pylist()
    assert [row["comment"] for row in left] == [
        "[purged]",
        "about experience 2",
        "[purged]",
        "[purged]",
        "about group 2",
        "[purged]",
    ]
    for target, target_id in (("experience", 1), ("rollout", 1), ("group", 1), ("task", 1)):
        with pytest.raises(PurgedError, match="was purged"):
            add_comment(walks, target, target_id, "again", author="bob")  # type: ignore[arg-type]

    assert list(verify(walks)) == []
    walks.sql("ALTER TABLE rft.comment DISABLE TRIGGER USER")
    walks.sql("UPDATE rft.comment SET group_id = 2 WHERE comment = 'about experience 2'")
    walks.sql("ALTER TABLE rft.comment ENABLE TRIGGER USER")
    assert [problem for problem in verify(walks) if problem.startswith("comment 2 is about experience 2")]
    walks.sql("ALTER TABLE rft.comment DISABLE TRIGGER USER")
    walks.sql("UPDATE rft.comment SET group_id = 1 WHERE comment = 'about experience 2'")
    walks.sql("ALTER TABLE rft.comment ENABLE TRIGGER USER")

    archive(walks, "walks", author="ada")
    with pytest.raises(ArchivedError, match="archived"):
        add_comment(walks, "group", 2, "too late", author="bob")
