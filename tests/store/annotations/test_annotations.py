"""Annotations: every type and target is validated in the database, superseded, undone and read as it stands."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from rftdata import Buffer, Group, labels
from rftdata.annotations import Annotation, LabelKind, annotate, define_kinds, history, kinds, retire_kind, standing
from rftdata.errors import ConflictError, QueryError, RftError
from tests.store.writing.test_turns import TASK, single, walk
from tests.support.store_roles import publish_versions

KINDS = [
    LabelKind("good", "bool", reopens=True),
    LabelKind("score", "number", spec={"min": 0, "max": 1, "step": 0.1}),
    LabelKind("verdict", "choice", "rollout", spec={"choices": ["keep", "drop"]}),
    LabelKind("flags", "tags", spec={"tags": ["rude", "wrong"]}),
    LabelKind("grades", "rubric", spec={"criteria": {"clear": {"min": 0, "max": 3}, "true": {"min": 0, "max": 1}}}),
    LabelKind("critique", "text", "task"),
    LabelKind("better", "edit"),
    LabelKind("order", "ranking", "group"),
    LabelKind("marks", "spans", spec={"labels": ["wrong"]}),
    LabelKind("steps", "turns", "rollout", spec={"min": -1, "max": 1}),
]
VALUES: dict[str, Any] = {
    "good": True,
    "score": 0.3,
    "verdict": "drop",
    "flags": ["rude"],
    "grades": {"clear": 2, "true": 1},
    "critique": "The question has two answers.",
    "better": {"response": "four"},
    "order": {"order": [[3], [1, 2]]},
    "marks": [{"start": 0, "end": 1, "unit": "token", "label": "wrong", "note": "no"}],
    "steps": [{"turn": 0, "value": -1}, {"turn": 1, "value": 0.5}],
}


@pytest.fixture
def labelled(buffer: Buffer) -> Buffer:
    """Experiences 1 to 3 of the rollouts 1 and 2 of group 1, and all kinds."""
    publish_versions(buffer, 8)
    run = buffer.create_run(name="walks", config={}, seed=1, steps=3, pipeline_version="none")
    with buffer.writer(run) as writer:
        writer.insert(Group([walk(), single()], **TASK))
    define_kinds(buffer, KINDS, author="owner")
    return buffer


def stands(buffer: Buffer, kind: str) -> list[Any]:
    return [row["value"] for row in standing(buffer, kind=kind)]


def test_a_value_of_every_type_is_stored_by_python_and_by_sql(labelled: Buffer) -> None:
    batch = annotate(labelled, [Annotation(kind, 1, value) for kind, value in VALUES.items()], author="ada")
    assert {row["kind"]: row["value"] for row in standing(labelled)} == VALUES
    assert sorted(batch.annotation_ids) == [row["annotation_id"] for row in standing(labelled)][::-1]
    groups = {row["kind"]: row["group_id"] for row in standing(labelled)}
    assert groups == dict.fromkeys(VALUES, 1) | {"critique": None}
    for kind, value in VALUES.items():
        labelled.sql(
            "INSERT INTO rft.annotation (kind, target_id, value, author) VALUES (%s, 1, %s::jsonb, 'bob')",
            [kind, json.dumps(value)],
        )
    assert sorted((r["kind"], r["author"]) for r in standing(labelled)) == sorted(
        (k, a) for k in VALUES for a in ("ada", "bob")
    )
    found = labelled.sql(
        "SELECT kind, num, choice FROM rft.v_annotation WHERE author = 'ada' AND (num, choice) IS NOT NULL OR num IS NOT NULL"
    ).to_pylist()
    assert {(r["kind"], r["num"]) for r in found} == {("good", 1), ("score", 0.3)}


WRONG: list[tuple[str, int, Any, str]] = [
    ("good", 1, 1, "must be true or false"),
    ("good", 99, True, "there is no experience 99"),
    ("nothing", 1, True, 'there is no kind of label "nothing"'),
    ("score", 1, 2, "must be a number from 0 up to 1"),
    ("score", 1, 0.25, "in steps of 0.1"),
    ("score", 1, "0.5", "must be a number"),
    ("verdict", 3, "keep", "there is no rollout 3"),
    ("verdict", 1, "maybe", 'must be one of ["keep", "drop"]'),
    ("flags", 1, ["rude", "rude"], "must not contain a word twice"),
    ("flags", 1, ["odd"], "must be a list of words from"),
    ("grades", 1, {"clear": 1}, "must have a number for each of clear, true"),
    ("grades", 1, {"clear": 9, "true": 1}, "of clear must be a number from 0 up to 3"),
    ("critique", 1, "  ", "must be a text that is not empty"),
    ("critique", 1, "x" * 70_000, "the value has 70002 bytes; up to 65536"),
    ("better", 1, {"response": "x" * 1_100_000}, "up to 1048576"),
    ("better", 1, "four", 'must be {"response": "…"}'),
    ("order", 1, {"order": [[1], [99]]}, "ranks experience 99, which is not of group 1"),
    ("order", 1, {"order": [[1], [1]]}, "each of them once"),
    ("order", 1, {"order": [[1.5], [2]]}, "must be {"),
    ("marks", 1, [{"start": 3, "end": 3, "label": "wrong"}], "has a span from 3 to 3"),
    ("marks", 1, [{"start": 0, "end": 9999, "label": "wrong"}], "has a span up to 9999 token of"),
    ("marks", 1, [{"start": 0, "end": 1, "label": "odd"}], "has a span with the label odd"),
    ("steps", 1, [{"turn": 77, "value": 0}], "has turn 77; the rollout has"),
    ("steps", 1, [{"turn": 0, "value": 0}, {"turn": 0, "value": 1}], "has a turn twice"),
    ("steps", 1, [{"turn": 0, "value": 5}], "of turn 0 must be a number from -1 up to 1"),
]


@pytest.mark.parametrize(("kind", "target", "value", "told"), WRONG, ids=lambda v: str(v)[:30])
def test_a_wrong_value_is_refused_and_nothing_is_stored(
    labelled: Buffer, kind: str, target: int, value: Any, told: str
) -> None:
    with pytest.raises(QueryError, match="") as caught:
        annotate(labelled, [Annotation("good", 2, True), Annotation(kind, target, value)], author="ada")
    assert told in str(caught.value)
    with pytest.raises(RftError):
        labelled.sql(
            "INSERT INTO rft.annotation (kind, target_id, value) VALUES (%s, %s, %s::jsonb)",
            [kind, target, json.dumps(value)],
        )
    assert history(labelled) == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"value": float("nan")}, "is not a finite number"),
        ({"reason": "x" * 10_000_000}, "the reason has 10000000 bytes; up to 65536 are allowed"),
        ({"confidence": 1.5}, "it must be from 0 to 1"),
        ({"seconds": float("inf")}, "it must be a finite number"),
        ({"seconds": -1.0}, "it must be a finite number of 0 or more"),
        ({"key": "k" * 300}, "the key has 300 bytes"),
        ({"reason": "a\x00b"}, "NUL"),
    ],
)
def test_what_comes_with_a_value_is_checked(labelled: Buffer, given: dict[str, Any], told: str) -> None:
    with pytest.raises(QueryError, match="") as caught:
        annotate(labelled, [Annotation("score", 1, **({"value": 0.5} | given))], author="ada")
    assert told in str(caught.value)
    assert history(labelled) == []


def test_a_further_value_supersedes_and_undoing_restores_what_stood(labelled: Buffer) -> None:
    first = annotate(labelled, [Annotation("score", 1, 0.1), Annotation("score", 2, 0.2)], author="ada")
    other = annotate(labelled, [Annotation("score", 1, 0.9)], author="bob")
    second = annotate(labelled, [Annotation("score", 1, 0.3)], author="ada")
    assert (second.num_superseded, other.num_superseded) == (1, 0)
    assert stands(labelled, "score") == [0.3, 0.9, 0.2]
    assert labels.undo(labelled, first.label_batch_id, author="ada").overruled_annotations == (first.annotation_ids[0],)
    assert stands(labelled, "score") == [0.3, 0.9]  # of the first batch, what still stood is undone
    undone = labels.undo(labelled, second.label_batch_id, author="carl", reason="a slip")
    assert (undone.num_annotations, stands(labelled, "score")) == (1, [0.1, 0.9])
    assert labels.undo(labelled, first.label_batch_id, author="ada").num_annotations == 1
    assert stands(labelled, "score") == [0.9]
    assert labels.undo(labelled, undone.label_batch_id, author="ada").num_annotations == 0  # it was undone since
    newest = history(labelled, target_id=1)[1]
    assert (newest["undone_by"], newest["author"], newest["reason"]) == (
        "carl",
        "ada",
        f"undo of label batch {second.label_batch_id}: a slip",
    )
    again = annotate(labelled, [Annotation("score", 1, 0.5)], author="ada")
    assert (again.num_superseded, stands(labelled, "score")) == (1, [0.5, 0.9])


def test_a_repeated_request_stores_nothing(labelled: Buffer) -> None:
    asked = [Annotation("score", 1, 0.1, key="a"), Annotation("score", 2, 0.2, key="b")]
    first = annotate(labelled, asked, author="ada")
    again = annotate(labelled, asked, author="ada")
    assert (again.annotation_ids, again.label_batch_id, again.num_repeated) == (
        first.annotation_ids,
        first.label_batch_id,
        2,
    )
    mixed = annotate(labelled, [asked[1], Annotation("score", 1, 0.4, key="c")], author="ada")
    assert (mixed.annotation_ids[0], mixed.num_repeated, stands(labelled, "score")) == (
        first.annotation_ids[1],
        1,
        [0.4, 0.2],
    )
    with pytest.raises(QueryError, match="was used for annotation"):
        annotate(labelled, [Annotation("score", 3, 0.1, key="a")], author="ada")
    for other in (0.3, 0.1):  # another value, or another reason
        with pytest.raises(QueryError, match="was used for annotation"):
            annotate(labelled, [Annotation("score", 1, other, key="a", reason="x")], author="ada")
    undo = "INSERT INTO rft.annotation (supersedes, retracted, key) VALUES (%s, true, 'undo')"
    (newest,) = labelled.sql("SELECT max(annotation_id) AS id FROM rft.v_annotation WHERE target_id = 2")[
        "id"
    ].to_pylist()
    for _ in range(2):  # a repeated undo
        labelled.sql(undo, [newest])
    with pytest.raises(QueryError, match="was used for annotation"):
        labelled.sql(undo, [newest - 1])


def test_a_kind_that_is_changed_while_people_label_refuses_the_old_version(labelled: Buffer) -> None:
    annotate(labelled, [Annotation("score", 1, 0.9, kind_version=1)], author="ada")
    (changed,) = define_kinds(labelled, [LabelKind("score", "number", spec={"min": 0, "max": 5})], author="owner")
    assert (
        changed.version,
        define_kinds(labelled, [LabelKind("score", "number", spec={"min": 0, "max": 5})], author="x"),
    ) == (2, [])
    with pytest.raises(ConflictError, match="this is a label of version 1, and the newest is 2"):
        annotate(labelled, [Annotation("score", 1, 0.5, kind_version=1)], author="ada")
    annotate(labelled, [Annotation("score", 1, 4, kind_version=2)], author="ada")
    assert [(r["kind_version"], r["value"]) for r in history(labelled, kind="score")] == [(2, 4), (1, 0.9)]
    retire_kind(labelled, "score")
    assert "score" not in [kind.kind for kind in kinds(labelled)]
    with pytest.raises(ConflictError, match="is retired"):
        annotate(labelled, [Annotation("score", 1, 4)], author="ada")
    assert stands(labelled, "score") == [4]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (LabelKind("Good", "bool"), "cannot be called"),
        (LabelKind("x", "choice", spec={"choices": ["a"]}), "must have at least 2 choices"),
        (LabelKind("x", "number", spec={"min": 1, "max": 0}), "must have a min below its max"),
        (LabelKind("x", "number", spec={"low": 1}), "its keys for the type number: min, max, step"),
        (LabelKind("x", "rubric", spec={"criteria": {}}), "must have criteria"),
        (LabelKind("x", "edit", "group"), "is about an experience"),
        (LabelKind("x", "bool", "task", reopens=True), "cannot reopen groups"),
        (LabelKind("good", "number"), "do not change"),
        (LabelKind("x", "number", spec={"min": float("-inf")}), "is not a finite number"),
    ],
    ids=str,
)
def test_a_wrong_definition_is_refused(labelled: Buffer, kind: LabelKind, told: str) -> None:
    with pytest.raises(QueryError, match="") as caught:
        define_kinds(labelled, [LabelKind("fine", "bool"), kind], author="owner")
    assert told in str(caught.value)
    assert len(kinds(labelled)) == len(KINDS)


@pytest.mark.parametrize(
    "statement",
    ["UPDATE rft.annotation SET value = 'false'", "DELETE FROM rft.annotation", "TRUNCATE rft.annotation CASCADE"],
)
def test_annotations_are_append_only(labelled: Buffer, statement: str) -> None:
    annotate(labelled, [Annotation("good", 1, True)], author="ada")
    with (
        pytest.raises(psycopg.errors.IntegrityError, match="append-only"),
        labelled.database.connection() as connection,
    ):
        connection.execute(statement)  # type: ignore[call-overload]


def test_a_label_reopens_its_group_where_the_chain_reads_its_kind(labelled: Buffer) -> None:
    def status() -> str:
        return str(labelled.sql("SELECT status::text AS s FROM rft.rollout_group")["s"][0])

    annotate(labelled, [Annotation("good", 1, True)], author="ada")
    assert status() == "ready"
    labelled.sql(
        "INSERT INTO rft.pipeline (pipeline_version, digest, stages, label_kinds) VALUES ('none', '', '[]', '{good,score}')"
    )
    annotate(labelled, [Annotation("score", 1, 0.5)], author="ada")  # of a kind that does not reopen
    assert status() == "ready"
    batch = annotate(labelled, [Annotation("good", 1, False)], author="ada")
    assert status() == "sealed"
    labelled.sql("UPDATE rft.rollout_group SET status = 'ready'")
    labels.undo(labelled, batch.label_batch_id, author="ada")
    assert (status(), stands(labelled, "good")) == ("sealed", [True])


def test_an_undo_of_a_batch_leaves_what_another_batch_wrote_between(labelled: Buffer) -> None:
    with labelled.database.transaction() as connection:
        one, two = (row["b"] for row in connection.execute("SELECT rft.begin_label_batches(2) AS b").fetchall())
        for batch, value in ((one, 0.1), (two, 0.2), (one, 0.3), (one, 0.4)):
            connection.execute("SELECT set_config('rft.label_batch', %s, true)", [str(batch)])
            connection.execute(
                "INSERT INTO rft.annotation (kind, target_id, value) VALUES ('score', 1, to_jsonb(%s::float8))", [value]
            )
    ids = labelled.sql("SELECT annotation_id FROM rft.annotation ORDER BY 1")["annotation_id"].to_pylist()
    done = labels.undo(labelled, one, author="ada")
    assert stands(labelled, "score") == [0.2]
    assert (done.num_annotations, done.overruled_annotations) == (1, (ids[0],))
