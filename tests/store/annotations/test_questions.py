"""Questions to several people: claimed by lease, never by more than are wanted, and decided by a rule once enough have answered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from operators.chain.build import build_chain
from rftdata import Buffer, labels
from rftdata.annotations import LabelKind, define_kinds
from rftdata.errors import ConfigError, QueryError
from tests.store.annotations.test_annotation_rights import add, refused, rows
from tests.store.conftest import Login
from tests.store.pipeline.test_pipeline_worker import run_pipeline
from tests.support.store_roles import Roles, two_sealed_groups

KINDS = [
    LabelKind("good", "bool"),
    LabelKind("hidden", "bool", blind=True),
    LabelKind("score", "number", spec={"min": 0, "max": 1}),
    LabelKind("verdict", "choice", spec={"choices": ["keep", "bin"]}),
]
CLAIM = "SELECT target_id FROM rft.claim_questions('{}', {})"


@pytest.fixture
def roles(buffer: Buffer) -> Roles:
    """Experiences 1 to 4 in two sealed groups, and the kinds."""
    found = two_sealed_groups(buffer)
    define_kinds(buffer, KINDS, author="owner")
    return found


@pytest.fixture
def people(buffer: Buffer, login: Login) -> list[psycopg.Connection]:
    return [login(role) for role in ("rft_labeler", "rft_other_labeler", "rft_third_labeler")]


def ask(buffer: Buffer, kind: str = "good", wanted: int = 1, targets: str = "generate_series(1, 4)") -> None:
    buffer.sql(f"INSERT INTO rft.question (kind, target_id, wanted) SELECT '{kind}', i, {wanted} FROM {targets} i")


def claim(session: psycopg.Connection, queue: str = "good", num: int = 1) -> list[int]:
    return [row[0] for row in rows(session, CLAIM.format(queue, num))]


def pass_time(buffer: Buffer, minutes: int) -> None:
    """Make all leases older. A labeller's setting of the clock has no effect."""
    buffer.sql(f"UPDATE rft.assignment SET leased_until = leased_until - interval '{minutes} min'")


def test_people_who_claim_at_once_never_hold_more_places_than_are_wanted(
    buffer: Buffer, roles: Roles, people: list[psycopg.Connection]
) -> None:
    ask(buffer, wanted=2)
    begin, got = threading.Barrier(3), dict[int, list[int]]()

    def work(i: int) -> None:
        begin.wait()
        got[i] = [target for _ in range(4) for target in claim(people[i], num=4)]

    threads = [threading.Thread(target=work, args=[i]) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    leases = buffer.sql("SELECT question_id, count(*) AS n FROM rft.assignment GROUP BY 1 ORDER BY 1").to_pylist()
    assert [row["n"] for row in leases] == [2, 2, 2, 2]
    assert sum(len(set(found)) for found in got.values()) == 8


def test_a_lease_ends_by_the_clock_unless_it_is_renewed(
    buffer: Buffer, roles: Roles, people: list[psycopg.Connection]
) -> None:
    ada, bob, _ = people
    ask(buffer)
    assert claim(ada, num=2) == [1, 2] and claim(bob, num=4) == [3, 4]
    assert claim(ada, num=2) == [1, 2]  # the same two in another tab
    pass_time(buffer, 4)
    assert rows(ada, "SELECT * FROM rft.renew_questions('{1, 3}')") == [(1,)]
    pass_time(buffer, 2)
    assert sorted(claim(bob, num=4)) == [2, 3, 4] and claim(ada, num=4) == [1]
    assert rows(ada, "SELECT rft.release_questions('{1, 3}')") == [(1,)]
    assert sorted(claim(bob, num=4)) == [1, 2, 3, 4]
    with refused():
        ada.execute("UPDATE rft.assignment SET state = 'answered'")
    with refused():
        ada.execute("SELECT rft.lease_questions('{1}')")


def test_a_skipped_question_comes_last_and_can_be_taken_back(
    buffer: Buffer, roles: Roles, people: list[psycopg.Connection]
) -> None:
    ada, bob, _ = people
    ask(buffer)
    assert claim(ada) == [1]
    assert rows(ada, "SELECT rft.skip_question(1)") == [(True,)]
    assert rows(bob, "SELECT rft.skip_question(1)") == [(False,)]
    for target in (2, 3, 4):
        assert claim(ada) == [target]
        add(ada, "good", target)
    assert claim(ada) == [1]
    assert rows(ada, "SELECT rft.skip_question(1)") == rows(ada, "SELECT rft.unskip_question(1)") == [(True,)]
    assert claim(bob) == [] and claim(ada) == [1]  # taken back, it is leased again
    assert rows(ada, "SELECT rft.skip_question(1)") == [(True,)]
    assert rows(ada, "SELECT question_id, target_id FROM rft.skipped_questions('good')") == [(1, 1)]
    assert claim(bob) == [1] and rows(bob, "SELECT * FROM rft.skipped_questions('good')") == []  # its place was free
    assert (
        rows(ada, "SELECT rft.unskip_question(1)") == [(True,)] and claim(ada) == []
    )  # back at its place, which bob holds


def test_a_known_answer_is_handed_out_at_its_rate_alone_and_comes_last_once_skipped(
    buffer: Buffer, roles: Roles, people: list[psycopg.Connection]
) -> None:
    ada, bob, _ = people
    ask(buffer, targets="generate_series(2, 3)")
    buffer.sql("INSERT INTO rft.gold (kind, target_id, value) VALUES ('good', 1, 'true')")
    assert claim(ada, num=4) == [2, 3] and claim(bob, num=4) == []  # without a rate, never
    buffer.sql("INSERT INTO rft.gold_rate (kind, rate) VALUES ('good', 0.5)")
    while claim(bob) != [1]:
        pass
    assert rows(bob, "SELECT rft.skip_question(question_id) FROM rft.skipped_questions('good')") == []
    assert rows(bob, "SELECT rft.skip_question(question_id) FROM rft.claim_questions('good')") == [(True,)]
    assert rows(ada, "SELECT rft.release_questions(ARRAY(SELECT question_id FROM rft.assignment))") == [(2,)]
    assert [claim(bob, num=3) for _ in range(2)] == [[2, 3, 1]] * 2
    buffer.sql(
        "INSERT INTO rft.archive (run_id, status, schema_version, author) SELECT run_id, 'archived', '1', 'o' FROM rft.run"
    )
    buffer.sql("DELETE FROM rft.assignment")
    assert all(claim(bob, num=3) == [] for _ in range(9))  # nor of an archived run
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="to claim is -1"):
        claim(bob, num=-1)
    bob.execute("SET default_transaction_isolation = 'repeatable read'")
    for statement in ("SELECT * FROM rft.claim_questions('good')", "SELECT rft.unskip_question(1)"):
        with pytest.raises(psycopg.errors.InvalidTransactionState, match="repeatable read"):
            bob.execute(statement)  # type: ignore[call-overload]


def test_an_answer_closes_a_place_and_its_undo_opens_it_again(
    buffer: Buffer, roles: Roles, people: list[psycopg.Connection]
) -> None:
    ada, bob, cyd = people
    ask(buffer, wanted=2, targets="generate_series(1, 1)")
    state = "SELECT num_answers, is_open FROM rft.question"
    assert claim(ada) == [1]
    add(ada, "good", 1)
    add(ada, "good", 1, "false")  # corrected: still one
    assert buffer.sql(state).to_pylist() == [{"num_answers": 1, "is_open": True}]
    assert claim(ada) == [] and claim(bob) == [1] and claim(cyd) == []
    add(bob, "good", 1)
    assert buffer.sql(state).to_pylist() == [{"num_answers": 2, "is_open": False}]
    buffer.sql("SELECT * FROM rft.undo_annotation_rows(ARRAY(SELECT max(annotation_id) FROM rft.annotation), NULL)")
    assert buffer.sql(state).to_pylist() == [{"num_answers": 1, "is_open": True}]
    assert claim(bob) == [1]


@pytest.mark.parametrize(
    ("config", "said", "expected"),
    [
        ({"kind": "good", "decide": "majority"}, ["true", "true", "false"], "pass"),
        ({"kind": "good", "decide": "majority"}, ["false", "true", "false"], "drop"),
        ({"kind": "good", "decide": "all"}, ["true", "true", "false"], "drop"),
        ({"kind": "hidden", "decide": "all"}, ["true", "true", "true"], "pass"),
        ({"kind": "score", "decide": "mean", "least": 0.6}, ["0.5", "0.5", "0.8"], "pass"),
        ({"kind": "score", "decide": "majority", "least": 0.6}, ["0.5", "0.5", "0.8"], "drop"),
        ({"kind": "verdict", "passing": ["keep"]}, ['"keep"', '"keep"', '"bin"'], "pass"),
        ({"kind": "good", "decide": "adjudicated"}, ["true", "true", "false"], None),
        ({"kind": "good", "decide": "adjudicated"}, ["false", "false", "false"], "drop"),
    ],
)
def test_the_chain_waits_for_all_and_decides_by_the_rule(
    buffer: Buffer,
    roles: Roles,
    people: list[psycopg.Connection],
    config: dict[str, Any],
    said: list[str],
    expected: str | None,
) -> None:
    chain = build_chain([{"human_review": {"where": "experience_id = 1", "wanted": 3, "timeout": "1 h", **config}}])
    assert run_pipeline(roles, chain) == [2]
    kind = config["kind"]
    for person, value in zip(people, said, strict=True):
        assert buffer.sql("SELECT answer FROM rft.review")["answer"].to_pylist() == [None]
        assert claim(person, kind) == [1]
        add(person, kind, 1, value)
    assert buffer.sql("SELECT answer::text AS answer FROM rft.review")["answer"].to_pylist() == [expected]
    assert run_pipeline(roles, chain) == ([] if expected is None else [1])
    if expected is None:
        buffer.sql(
            f"INSERT INTO rft.annotation (kind, target_id, value, source) VALUES ('{kind}', 1, 'false', 'adjudication')"
        )
        assert run_pipeline(roles, chain) == [1]
        expected = "drop"
    kept = buffer.sql("SELECT kept FROM rft.verdict WHERE experience_id = 1 AND is_newest")["kept"].to_pylist()
    assert kept == [expected == "pass"]


def test_neither_a_reward_nor_an_update_answers_for_several_people(
    buffer: Buffer, roles: Roles, people: list[psycopg.Connection]
) -> None:
    chain = build_chain([{"human_review": {"kind": "good", "wanted": 2, "timeout": "1 h"}}])
    assert run_pipeline(roles, chain) == []
    labels.apply(buffer, [labels.RewardLabel(1, 0.5)], author="ada", source="set")
    with pytest.raises(psycopg.errors.InvalidParameterValue, match='annotations of the kind "good"'):
        people[0].execute("UPDATE rft.review SET answer = 'pass'")
    # A trigger of an own table runs as deep as the trigger that answers.
    body = "BEGIN UPDATE rft.review SET answer = 'pass'; RETURN NEW; END"
    people[0].execute("CREATE TEMPORARY TABLE own (i integer)")
    people[0].execute(f"CREATE FUNCTION pg_temp.answer() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$")
    people[0].execute("CREATE TRIGGER own BEFORE INSERT ON own FOR EACH ROW EXECUTE FUNCTION pg_temp.answer()")
    with pytest.raises(psycopg.errors.InvalidParameterValue, match='annotations of the kind "good"'):
        people[0].execute("INSERT INTO own VALUES (1)")
    assert buffer.sql("SELECT count(*) AS n FROM rft.review WHERE answer IS NULL")["n"].to_pylist() == [4]
    for person in people[:2]:
        for target in (1, 2):
            add(person, "good", target)
    assert run_pipeline(roles, chain) == [1]
    # Once undone, the group waits again.
    buffer.sql("SELECT * FROM rft.undo_annotation_rows(ARRAY(SELECT max(annotation_id) FROM rft.annotation), NULL)")
    assert buffer.sql("SELECT answer::text AS answer FROM rft.review WHERE experience_id <= 2 ORDER BY 1 NULLS LAST")[
        "answer"
    ].to_pylist() == ["pass", None]
    assert run_pipeline(roles, chain) == []


def test_a_review_without_a_kind_is_leased_to_one_person(
    buffer: Buffer, roles: Roles, people: list[psycopg.Connection], login: Login
) -> None:
    ada, bob, _ = people
    worker = login("rft_worker")
    assert run_pipeline(roles, build_chain([{"human_review": {"timeout": "1 h"}}])) == []
    assert claim(ada, "", 3) == [1, 2, 3] and claim(bob, "", 3) == [4]
    ada.execute("UPDATE rft.review SET answer = 'drop' WHERE experience_id = 1")
    bob.execute("UPDATE rft.experience SET reward = 0.5 WHERE experience_id = 4")
    assert claim(ada, "", 3) == [2, 3] and claim(bob, "", 3) == []
    ada.execute("UPDATE rft.review SET answer = NULL WHERE experience_id = 1")
    assert claim(bob, "", 3) == [] and sorted(claim(ada, "", 3)) == [1, 2, 3]  # what ada takes back stays with ada
    pass_time(buffer, 6)
    assert claim(bob, "", 1) == [1]
    # What another account takes back returns to the queue of the one who answered.
    bob.execute("UPDATE rft.review SET answer = 'drop' WHERE experience_id = 1")
    buffer.sql("UPDATE rft.review SET answer = NULL WHERE experience_id = 1")
    assert claim(bob, "", 1) == [1] and claim(worker, "", 1) == [2]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"kind": "missing"}, 'the kind of label "missing" does not exist'),
        ({"kind": "verdict", "passing": ["maybe"]}, "those that pass must be among them"),
        ({"kind": "verdict"}, "name the choices that pass"),
    ],
)
def test_a_review_that_no_kind_can_answer_is_refused(
    buffer: Buffer, roles: Roles, config: dict[str, Any], told: str
) -> None:
    with pytest.raises(QueryError, match=told):
        run_pipeline(roles, build_chain([{"human_review": config}]))


def test_a_decided_review_is_copied_whatever_became_of_its_kind(buffer: Buffer, roles: Roles) -> None:
    review = (
        "INSERT INTO rft.review (experience_id, group_id, run_id, name, question, deadline, otherwise, kind)"
        " SELECT experience_id, group_id, run_id, 'q', '?', now() + '{}', 'drop', 'retired' FROM rft.experience WHERE experience_id = 1"
    )
    buffer.sql(review.format("-1 h"))
    with pytest.raises(QueryError, match="does not exist or was retired"):
        buffer.sql(review.format("1 h"))


def test_several_people_need_a_kind() -> None:
    with pytest.raises(ConfigError, match="wanted: needs kind"):
        build_chain([{"human_review": {"wanted": 3}}])


PAIR = "INSERT INTO rft.preference_pair (chosen_id, rejected_id, author) VALUES (2, 1, gen_random_uuid()::text)"
PERMITTED: list[tuple[str, Callable[[psycopg.Connection], Any]]] = [
    ("good", lambda session: add(session, "good", 1)),
    ("reward", lambda session: session.execute("UPDATE rft.experience SET reward = 0.25 WHERE experience_id = 1")),
    (
        "reward",
        lambda session: session.execute(PAIR),
    ),
]


@pytest.mark.parametrize(("kind", "label"), PERMITTED)
def test_an_account_with_permissions_labels_only_what_they_cover(
    buffer: Buffer,
    roles: Roles,
    people: list[psycopg.Connection],
    kind: str,
    label: Callable[[psycopg.Connection], Any],
) -> None:
    ada = people[0]
    ask(buffer)
    grant = "INSERT INTO rft.label_permission (account, kind, taskset) VALUES ('{}', '{}', '{}')"
    taskset = buffer.sql("SELECT taskset FROM rft.task LIMIT 1")["taskset"].to_pylist()[0]
    buffer.sql(grant.format(ada.info.user, kind, "another"))
    assert claim(ada) == []
    with refused():
        label(ada)
    with refused():
        ada.execute(grant.format(ada.info.user, kind, taskset))
    buffer.sql(grant.format(ada.info.user, kind, taskset))
    label(ada)
    buffer.sql("UPDATE rft.label_permission SET revoked_at = now()")
    with refused():
        label(ada)


def test_no_table_view_or_function_shows_a_blind_answer_before_ones_own(
    buffer: Buffer, roles: Roles, people: list[psycopg.Connection]
) -> None:
    ada, bob, _ = people
    define_kinds(buffer, [LabelKind("critique", "text", blind=True)], author="owner")
    ask(buffer, "critique", wanted=2)
    assert claim(ada, "critique") == [1] and claim(bob, "critique") == [1]
    add(ada, "critique", 1, '"SECRET-OF-ADA"')
    places = rows(
        bob,
        "SELECT oid::regclass::text FROM pg_class WHERE relnamespace = 'rft'::regnamespace AND relkind IN ('r', 'v')"
        " AND has_table_privilege(oid, 'SELECT')",
    )
    assert len(places) > 60

    def seen() -> list[str]:
        return [
            p
            for (p,) in places
            if rows(bob, f"SELECT count(*) FROM {p} t WHERE t::text LIKE '%SECRET-OF-ADA%'") != [(0,)]
        ]

    assert seen() == []
    account = ada.info.user
    assert rows(
        bob, f"SELECT rft.has_standing('critique', 1, '{account}'), rft.num_people_who_said('critique', 1)"
    ) == [(False, 0)]
    assert claim(bob, "critique") == [1]
    add(bob, "critique", 1, '"mine"')
    assert {"rft.annotation", "rft.v_annotation"} <= set(seen())
