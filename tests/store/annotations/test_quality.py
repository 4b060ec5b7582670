"""Known answers, agreement, and decisions where people disagree."""

from __future__ import annotations

import json
from pathlib import Path

import psycopg
import pytest

from rftcore.cli import run_command
from rftdata import Buffer
from rftdata.annotations import Annotation, LabelKind, annotate, define_kinds, questions, standing
from rftdata.annotations.quality import quality
from rftdata.errors import QueryError
from tests.store.annotations.test_annotation_rights import add, refused, rows
from tests.store.annotations.test_questions import ask, claim
from tests.store.conftest import Login
from tests.support.store_roles import two_sealed_groups


@pytest.fixture
def people(buffer: Buffer, login: Login) -> list[psycopg.Connection]:
    """Experiences 1 to 4, and three labellers."""
    two_sealed_groups(buffer)
    kinds = [LabelKind("good", "bool"), LabelKind("hidden", "bool", blind=True), LabelKind("order", "ranking", "group")]
    define_kinds(buffer, kinds, author="owner")
    return [login(role) for role in ("rft_labeler", "rft_other_labeler", "rft_third_labeler")]


def test_known_answers_are_handed_out_once_and_cannot_be_told_from_others(
    buffer: Buffer, people: list[psycopg.Connection]
) -> None:
    ada, bob, _ = people
    ask(buffer, targets="generate_series(1, 3)")
    questions.add_gold(buffer, "good", {4: True}, author="olga", rate=0.5)
    got: list[int] = []
    for _ in range(60):
        got += [target for target in claim(ada) if target not in got]
        for target in got:
            ada.execute("SELECT rft.release_questions(ARRAY(SELECT question_id FROM rft.assignment))")
            if target == 4:
                add(ada, "good", 4, "false")
        if 4 in got:
            break
    assert 4 in got
    add(bob, "good", 4)
    assert all(claim(bob) != [4] for _ in range(20))
    for place in ("rft.gold", "rft.gold_rate", "rft.question"):
        with refused():  # row security would hide the rows, and EXPLAIN ANALYZE count them
            rows(ada, f"SELECT count(*) FROM {place}")
    assert rows(ada, "SELECT * FROM rft.known_answers()") == []
    with refused():
        ada.execute("INSERT INTO rft.gold (kind, target_id, value) VALUES ('good', 1, 'true')")
    (found,) = quality(buffer, kind="good")
    accuracy = {person.person: (person.num_gold, person.gold_accuracy) for person in found.people}
    assert accuracy == {ada.info.user: (1, 0.0), bob.info.user: (1, 1.0)}
    with pytest.raises(QueryError, match="must be true or false"):
        questions.add_gold(buffer, "good", {1: "yes"}, author="olga")
    with pytest.raises(QueryError, match="rate"):
        questions.add_gold(buffer, "good", {}, author="olga", rate=0.9)
    with pytest.raises(psycopg.errors.Error, match="holds facts"), buffer.database.connection() as connection:
        connection.execute("UPDATE rft.gold SET value = 'false'")


def test_of_a_blind_kind_the_answer_before_looking_counts(buffer: Buffer, people: list[psycopg.Connection]) -> None:
    ada, bob, _ = people
    for kind in ("good", "hidden"):
        for target in (1, 2):
            add(ada, kind, target, "true" if target == 1 else "false")
            add(bob, kind, target, "false" if target == 1 else "true")
            add(bob, kind, target, "true" if target == 1 else "false")  # after looking at ada's
    alphas = {found.kind: found.alpha and found.alpha.value for found in quality(buffer)}
    assert alphas == {"good": 1.0, "hidden": pytest.approx(-0.5)}
    # The answer of a review tells what people said: bob's answer after it does not count.
    review = (
        "INSERT INTO rft.review (experience_id, group_id, run_id, name, question, deadline, otherwise, kind)"
        " SELECT experience_id, group_id, run_id, 'q', '?', now() + interval '1 h', 'drop', 'hidden' FROM rft.experience WHERE experience_id = 3"
    )
    buffer.sql(review)
    add(ada, "hidden", 3)
    add(bob, "hidden", 3)
    (found,) = quality(buffer, kind="hidden")
    assert found.alpha is not None and found.alpha.num_units == 2
    # By psql, a third labeller sees no answers of others, and the figures computed for him have none.
    assert rows(people[2], "SELECT count(*) FROM rft.v_annotation WHERE kind = 'hidden'") == [(0,)]


def test_what_people_disagree_about_is_decided_once_and_becomes_gold(
    buffer: Buffer, people: list[psycopg.Connection]
) -> None:
    ada, bob, cyd = people
    for person, value in ((ada, "true"), (bob, "false"), (cyd, "true")):
        add(person, "good", 1, value)
        add(person, "good", 2, "true")
    (open_one,) = questions.disagreements(buffer, "good")
    assert (open_one["target_id"], [each["value"] for each in open_one["answers"]]) == (1, [True, False, True])
    with refused():
        ada.execute("SELECT rft.adjudicate('good', 1, 'true')")
    questions.adjudicate(buffer, "good", 1, False, author="olga", reason="the unit is missing")
    assert questions.disagreements(buffer, "good") == []
    decided = [row for row in standing(buffer, kind="good") if row["source"] == "adjudication"]
    assert [(row["value"], row["author"], row["reason"]) for row in decided] == [(False, "olga", "the unit is missing")]
    (gold,) = buffer.sql(
        "SELECT value::text AS value, method::text AS method, annotation_ids, author FROM rft.gold"
    ).to_pylist()
    assert (gold["value"], gold["method"], len(gold["annotation_ids"]), gold["author"]) == (
        "false",
        "adjudicated",
        3,
        "olga",
    )
    (found,) = quality(buffer, kind="good")
    assert {person.gold_accuracy for person in found.people} == {0.0, 1.0}


def test_a_preference_for_the_left_is_seen(buffer: Buffer, people: list[psycopg.Connection]) -> None:
    group = buffer.sql("SELECT group_id FROM rft.experience WHERE experience_id = 1")["group_id"].to_pylist()[0]
    for author, shown in (("ada", [1, 2]), ("bob", [2, 1])):
        value = {"order": [[1], [2]]}
        annotate(buffer, [Annotation("order", group, value, shown={"order": shown}, seconds=4.0)], author=author)
    (found,) = quality(buffer, kind="order")
    first = {person.person.split()[0]: (person.num_shown, person.first_shown_share) for person in found.people}
    assert first == {"ada": (1, 1.0), "bob": (1, 0.0)}
    assert found.people[0].median_seconds == 4.0 and found.people[0].agreement == 1.0


def test_the_order_of_the_queue_follows_doubt(buffer: Buffer, people: list[psycopg.Connection]) -> None:
    judged = [Annotation("good", i, True, confidence=c, model="m") for i, c in ((1, 0.9), (2, 0.2), (3, 0.6))]
    annotate(buffer, judged, author="judge", source="judge")
    assert questions.ask(buffer, "good", [1, 2, 3, 4], author="olga", wanted=2, order="uncertainty") == 4
    assert claim(people[0], num=4) == [2, 4, 3, 1]
    with pytest.raises(QueryError, match="there is no experience 99"):
        questions.ask(buffer, "good", [99], author="olga")


def test_the_commands_ask_measure_and_decide(
    buffer: Buffer,
    people: list[psycopg.Connection],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RFT_SEGMENTS", str(tmp_path))

    def rft(*words: str) -> str:
        assert run_command(["label", *words, "--buffer", buffer.config.uri]) == 0
        return capsys.readouterr().out

    query = "SELECT experience_id FROM rft.experience ORDER BY 1"
    assert rft("ask", "good", query, "--people", "2") == "4 targets for 2 people each: good\n"
    for person, value in zip(people, ("true", "false", "true"), strict=True):
        add(person, "good", 1, value)
        add(person, "good", 2)
    shown = rft("agreement", "--kind", "good")
    assert "Krippendorff's alpha" in shown and "95 % interval" in shown and people[0].info.user in shown
    (figures,) = json.loads(rft("agreement", "--json"))
    assert figures["alpha"]["num_units"] == 2 and len(figures["cohen"]) == 3
    assert json.loads(rft("disagreements", "good", "--json"))[0]["target_id"] == 1
    assert "is decided" in rft("adjudicate", "good", "1", "true")
    assert "1 known answers" in rft("gold", "good", "3=true", "--rate", "0.1")
    rft("permit", people[0].info.user, "--kind", "hidden")
    with refused():
        add(people[0], "good", 3)
