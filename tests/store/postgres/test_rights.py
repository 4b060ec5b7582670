"""Rights under attack: what accounts of each role try beyond their rights, and every right in the catalogue."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

import rftdata
from rftdata import Buffer, labels
from rftdata.errors import QueryError
from rftdata.maintenance.roles import grant_roles
from rftdata.maintenance.verification import verify
from rftdata.pipeline.records import Question, Review
from rftdata.pipeline.verdicts import ask
from rftdata.sql_session import run_statements
from scripts import rights_reference
from tests.store.conftest import Login
from tests.support.store_roles import Roles

ROLES = ("rft_reader", "rft_labeler", "rft_worker")


@pytest.fixture
def roles(buffer: Buffer) -> Roles:
    """Two groups, decided on."""
    roles = Roles(buffer, steps=2, sampling={"order": "prioritized", "priority": {"formula": "mean_reward + 1"}})
    with roles.attempt():
        roles.work()
    return roles


@contextmanager
def refused() -> Iterator[None]:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        yield


def test_every_right_is_in_the_reference_and_public_has_none(buffer: Buffer) -> None:
    found = buffer.sql(rights_reference.QUERY.read_text(encoding="utf-8")).to_pylist()
    assert [row for row in found if row["role"] == "PUBLIC"] == []
    page = rights_reference.PAGE.read_text(encoding="utf-8")
    assert page == rights_reference.render(found), "a right changed; if it is meant, run: make docs"


def test_no_function_with_the_owners_rights_takes_anything_from_its_caller(buffer: Buffer) -> None:
    """No search path, and no type that a caller could have made; no account may attach a trigger's function to its own table."""
    definers = buffer.sql(
        "SELECT p.oid::regprocedure::text AS name, p.proconfig AS settings, p.proargtypes::regtype[]::text[] AS arguments,"
        " p.prorettype = 'trigger'::regtype AS is_trigger, p.proacl::text AS rights, r.rolname::text AS owner"
        " FROM pg_proc p JOIN pg_roles r ON r.oid = p.proowner WHERE p.pronamespace = 'rft'::regnamespace AND p.prosecdef"
    ).to_pylist()
    assert len(definers) > 10
    for function in definers:
        assert "search_path=pg_catalog, pg_temp" in function["settings"], function["name"]
        assert set(function["arguments"]) <= {"bigint", "bigint[]", "integer", "text", "text[]"}, function["name"]
        if function["is_trigger"]:
            assert re.fullmatch(rf"{{{function['owner']}=X/{function['owner']}}}", function["rights"]), function["name"]


def test_every_trigger_finds_the_objects_of_the_schema_alone(buffer: Buffer) -> None:
    triggers = buffer.sql(
        "SELECT oid::regprocedure::text AS name, proconfig AS settings FROM pg_proc"
        " WHERE pronamespace = 'rft'::regnamespace AND prorettype = 'trigger'::regtype"
    ).to_pylist()
    open_ones = [
        found["name"] for found in triggers if "search_path=pg_catalog, pg_temp" not in (found["settings"] or [])
    ]
    assert len(triggers) > 15 and open_ones == []


def test_a_function_that_every_account_may_call_is_reported_and_revoked(buffer: Buffer) -> None:
    buffer.sql("GRANT EXECUTE ON FUNCTION rft.clock() TO PUBLIC")
    (problem,) = verify(buffer)
    assert "rft.clock()" in problem and "rft db roles" in problem
    grant_roles(buffer.database)
    assert list(verify(buffer)) == []


@pytest.mark.parametrize("role", ROLES)
def test_no_account_runs_code_through_a_trigger_that_runs_as_the_owner(buffer: Buffer, login: Login, role: str) -> None:
    """The attack: a temporary table whose column is of a type of the attacker, with a cast, and our function as its trigger."""
    session = login(role)
    session.execute("CREATE TYPE pg_temp.kind AS ENUM ('a')")
    session.execute("CREATE TEMPORARY TABLE bait (taskset pg_temp.kind)")
    functions = buffer.sql(
        "SELECT oid::regproc::text AS f FROM pg_proc WHERE pronamespace = 'rft'::regnamespace AND prorettype = 'trigger'::regtype"
    )["f"].to_pylist()
    assert "rft.record_task_change" in functions
    for function in functions:
        with refused():
            session.execute(
                "CREATE TRIGGER t AFTER INSERT ON bait REFERENCING NEW TABLE AS changed"
                f" FOR EACH STATEMENT EXECUTE FUNCTION {function}()"
            )
    if role != "rft_worker":
        with refused():
            session.execute("SELECT rft.compact_task_changes('t')")


def test_a_formula_is_checked_for_every_account(buffer: Buffer, roles: Roles, login: Login) -> None:
    worker = login("rft_worker")
    worker.execute(
        "CREATE FUNCTION pg_temp.become(float8) RETURNS float8 LANGUAGE sql IMMUTABLE AS 'SELECT 1.0::float8'"
    )
    place = worker.execute("SELECT pg_my_temp_schema()::regnamespace::text").fetchone()
    assert place is not None
    worker.execute("CREATE TEMPORARY SEQUENCE ran")
    # Constant, so that it would be computed while the formula is checked, and could replace what is checked.
    worker.execute(
        "CREATE FUNCTION pg_temp.note(float8) RETURNS float8 LANGUAGE plpgsql AS 'BEGIN PERFORM nextval(''pg_temp.ran''); RETURN 1; END'"
    )
    worker.execute(
        "CREATE FUNCTION pg_temp.lure(float8) RETURNS float8 LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN pg_temp.note($1); END'"
    )
    for formula in (
        f"{place[0]}.become(priority)",
        f"{place[0]}.lure(1.0)",
        "(SELECT 1)",
        "1); ALTER ROLE postgres; SELECT (1",
        "1)::float8) STORED, ADD COLUMN b float8 DEFAULT ((2",
        "setval('rft.run_run_id_seq', 1)",
        "clock_timestamp()::text::float8",
    ):
        for statement in (
            "UPDATE rft.sampler SET formula = %s",
            "INSERT INTO rft.sampler SELECT (jsonb_populate_record(s, jsonb_build_object('run_id', 99, 'formula', %s::text))).* FROM rft.sampler s",
        ):
            with pytest.raises(psycopg.Error):
                worker.execute(statement, [formula])
    assert worker.execute("SELECT is_called FROM pg_temp.ran").fetchone() == (False,)
    worker.execute("UPDATE rft.sampler SET formula = 'priority  *2'")
    assert buffer.sql("SELECT formula FROM rft.sampler")["formula"].to_pylist() == [
        "(priority * (2)::double precision)"
    ]


def asked(buffer: Buffer, roles: Roles) -> int:
    """A question about the first experience, whose deadline is in a minute."""
    first = buffer.sql("SELECT experience_id, group_id FROM rft.experience ORDER BY 1 LIMIT 1").to_pylist()[0]
    with buffer.database.transaction() as connection:
        ask(
            connection,
            roles.run_id,
            [
                Question(
                    first["experience_id"], first["group_id"], "asks", Review("polite", "Is it polite?", 60.0, "drop")
                )
            ],
        )
    return int(first["experience_id"])


def test_a_labeller_does_not_move_the_clock(buffer: Buffer, roles: Roles, login: Login) -> None:
    key = asked(buffer, roles)
    buffer.sql("UPDATE rft.review SET answer = 'pass'")
    labeller = login("rft_labeler")
    # Temporary tables are found before those of the system, whatever the search path is.
    labeller.execute(
        "CREATE TEMPORARY TABLE pg_namespace AS SELECT oid AS nspowner, 'rft'::name AS nspname FROM pg_roles WHERE rolname = session_user"
    )
    clock = "SELECT abs(extract(epoch FROM rft.clock() - clock_timestamp())) < 60 AS same"
    for shift in ("-2 hours", "2 hours", "nonsense"):
        labeller.execute("SELECT set_config('rft.clock_shift', %s, false)", [shift])
        assert labeller.execute(clock).fetchone() == (True,)
        labeller.execute("UPDATE rft.review SET answer = 'drop' WHERE experience_id = %s", [key])
        labeller.execute("UPDATE rft.review SET answer = 'pass' WHERE experience_id = %s", [key])
    answered = buffer.sql("SELECT answered_at < deadline AND answered_at > asked_at AS in_time FROM rft.review")
    assert answered["in_time"].to_pylist() == [True]


def test_a_labeller_keeps_no_correction_out_of_the_statistics(buffer: Buffer, roles: Roles, login: Login) -> None:
    labeller = login("rft_labeler")
    for setting in ("done", "rebuild"):
        labeller.execute("SELECT set_config('rft.folding', %s, false)", [setting])
        labeller.execute("UPDATE rft.experience SET reward = (reward + 1) / 4")
    assert buffer.sql("SELECT count(*) AS n FROM rft.task_observation WHERE kind = 'correction'")["n"][0].as_py() > 0
    assert len(buffer.sql(f"SELECT * FROM rft.check_task_stat({roles.run_id})")) == 0


_OF_A_LABELLER = {
    "search_path": "pg_temp, public",
    "transform_null_equals": "on",
    "standard_conforming_strings": "off",
    "quote_all_identifiers": "on",
    "array_nulls": "off",
    "extra_float_digits": "-15",
    "DateStyle": "SQL, DMY",
    "IntervalStyle": "sql_standard",
    "TimeZone": "Pacific/Kiritimati",
    "bytea_output": "escape",
    "row_security": "off",
    "plpgsql.extra_errors": "all",
    "enable_nestloop": "off",
    "enable_indexscan": "off",
    "join_collapse_limit": "1",
    "rft.folding": "done",
    "rft.purge": "1",
    "rft.clock_shift": "2 hours",
}


def test_what_a_labeller_sets_and_makes_changes_nothing_of_a_correction(
    buffer: Buffer, roles: Roles, login: Login
) -> None:
    """Every setting that an account may change and a function could notice, and temporary tables and types with the names of ours."""
    columns = "kind::text, task_id, successes, trials"

    def corrected(session: psycopg.Connection) -> list[tuple[object, ...]]:
        with session.transaction(force_rollback=True):
            session.execute("UPDATE rft.experience SET reward = (reward + 1) / 4")
            # Binary, because a session may also shorten the numbers that it reads as text.
            corrections = session.execute(f"SELECT {columns} FROM rft.task_observation ORDER BY 1, 2", binary=True)
            found = corrections.fetchall()
            labels = session.execute(
                "SELECT experience_id, old_value, new_value FROM rft.label ORDER BY 1", binary=True
            )
            return found + labels.fetchall()

    expected = corrected(login("rft_labeler"))
    assert "correction" in {row[0] for row in expected}
    labeller = login("rft_labeler")
    labeller.execute("CREATE TYPE pg_temp.bigint AS ENUM ('a')")
    for table in ("new_rows", "old_rows", "experience", "rollout_group", "task_observation", "label", "task_stat"):
        labeller.execute(f"CREATE TEMPORARY TABLE {table} (experience_id pg_temp.bigint, reward pg_temp.bigint)")
    for name, value in _OF_A_LABELLER.items():
        labeller.execute("SELECT set_config(%s, %s, false)", [name, value])
    assert corrected(labeller) == expected


def test_a_labeller_adds_nothing_to_the_batch_of_another(buffer: Buffer, roles: Roles, login: Login) -> None:
    first, second = buffer.sql("SELECT experience_id AS i FROM rft.experience ORDER BY 1 LIMIT 2")["i"].to_pylist()
    theirs = labels.set_rewards(buffer, {first: 0.5}, author="ada").label_batch_id
    labeller = login("rft_labeler")
    relabel = "UPDATE rft.experience SET reward = 0.25 WHERE experience_id = %s"
    for batch in (theirs, theirs + 1, -1):
        labeller.execute("SELECT set_config('rft.label_batch', %s, false)", [str(batch)])
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="label batch"):
            labeller.execute(relabel, [second])
    begun = labeller.execute("SELECT rft.begin_label_batches(1)").fetchone()
    assert begun is not None
    labeller.execute("SELECT set_config('rft.label_batch', %s, false)", [str(begun[0])])
    labeller.execute(relabel, [second])
    undone = labels.undo(buffer, theirs, author="ada")
    assert undone.num_changed == 1
    assert buffer.sql(f"SELECT reward FROM rft.experience WHERE experience_id = {second}")["reward"].to_pylist() == [
        0.25
    ]


def test_a_labeller_corrects_the_reward_of_a_turn_and_no_fact_of_it(buffer: Buffer, roles: Roles, login: Login) -> None:
    buffer.sql("INSERT INTO rft.turn_reward VALUES (1, 0, 0.5, 0.5)")
    session = login("rft_labeler")
    assert session.execute("UPDATE rft.turn_reward SET reward = 0.75").rowcount == 1
    for statement in (
        "UPDATE rft.turn_reward SET reward_sampled = 0.75",
        "INSERT INTO rft.turn_reward VALUES (2, 0, 0.5, 0.5)",
        "DELETE FROM rft.turn_reward",
        "SELECT rft.own_label_batch(1)",
    ):
        with refused():
            session.execute(statement)
    (label,) = labels.history(buffer, 1)
    assert (label["turn"], label["old_value"], label["new_value"]) == (0, 0.5, 0.75)
    assert label["session_user_name"].startswith("rft_labeler")
    assert session.execute(
        "SELECT rft.label_rollout((SELECT rollout_id FROM rft.experience WHERE experience_id = 2), 0.25)"
    ).fetchone() == (1,)


def test_labels_are_recorded_with_the_account(buffer: Buffer, roles: Roles, login: Login) -> None:
    key, labeller = asked(buffer, roles), login("rft_labeler")
    labeller.execute("SET rft.author = 'the boss'")
    labeller.execute("UPDATE rft.review SET answer = 'drop'")
    labeller.execute("UPDATE rft.experience SET reward = (reward + 1) / 4 WHERE experience_id = %s", [key])
    labeller.execute(
        "INSERT INTO rft.preference_pair (chosen_id, rejected_id, author) SELECT max(experience_id), %s, 'the boss' FROM rft.experience",
        [key],
    )
    for table in ("review", "label", "task_observation", "preference_pair"):
        said = buffer.sql(f"SELECT author, session_user_name FROM rft.{table} WHERE author IS NOT NULL").to_pylist()
        assert said == [{"author": "the boss", "session_user_name": labeller.info.user}], table
    for statement in (
        "UPDATE rft.review SET answer = 'pass', session_user_name = 'x'",
        "INSERT INTO rft.preference_pair (chosen_id, rejected_id, session_user_name) VALUES (1, 2, 'x')",
    ):
        with refused():
            labeller.execute(statement)


@pytest.mark.parametrize("role", ["rft_labeler", "rft_worker"])
def test_no_setting_lets_facts_change(buffer: Buffer, roles: Roles, login: Login, role: str) -> None:
    """All settings that the schema reads, at once."""
    read = buffer.sql(
        "SELECT DISTINCT (regexp_matches(pg_get_functiondef(oid), 'current_setting\\(''(rft\\.\\w+)''', 'g'))[1] AS name"
        " FROM pg_proc WHERE pronamespace = 'rft'::regnamespace AND prokind = 'f'"
    )["name"].to_pylist()
    assert sorted(read) == [
        "rft.annotation_batch",
        "rft.author",
        "rft.clock_shift",
        "rft.folding",
        "rft.label_batch",
        "rft.label_source",
        "rft.purge",
        "rft.reason",
    ]
    before = buffer.sql("SELECT experience_id, response, reward_sampled FROM rft.experience ORDER BY 1").to_pylist()
    session = login(role)
    for name in ("rft.purge", "rft.folding"):
        session.execute("SELECT set_config(%s, '1', false)", [name])
    for statement in (
        "UPDATE rft.experience SET response = 'x'",
        "DELETE FROM rft.group_prompt",
        "UPDATE rft.label SET author = 'x'",
        "UPDATE rft.review SET question = 'x'",
        "DELETE FROM rft.experience",
    ):
        with refused():
            session.execute(statement)
    assert (
        buffer.sql("SELECT experience_id, response, reward_sampled FROM rft.experience ORDER BY 1").to_pylist()
        == before
    )


@pytest.mark.parametrize("role", ["rft_labeler", "rft_worker"])
def test_the_settings_of_an_account_forge_no_label_of_a_turn(
    buffer: Buffer, roles: Roles, login: Login, role: str
) -> None:
    """The trigger runs with the owner's rights: objects of the caller's, and settings that the schema reads, must not reach it."""
    buffer.sql("INSERT INTO rft.turn_reward VALUES (1, 0, 0.5, 0.5)")
    (others,) = buffer.sql("SELECT rft.begin_label_batches(1) AS batch")["batch"].to_pylist()
    session = login(role)
    with refused():  # it would turn the triggers off
        session.execute("SET session_replication_role = replica")
    session.execute("CREATE TEMPORARY TABLE label (LIKE rft.label)")
    session.execute("CREATE TEMPORARY TABLE experience (LIKE rft.experience)")
    session.execute("SET search_path = pg_temp, rft, pg_catalog")
    for name, value in (("label_batch", str(others)), ("label_source", "forged")):
        session.execute("SELECT set_config(%s, %s, false)", [f"rft.{name}", value])
        with pytest.raises(psycopg.Error):
            session.execute("UPDATE rft.turn_reward SET reward = 0.75")
        session.execute("SELECT set_config(%s, '', false)", [f"rft.{name}"])
    assert buffer.sql("SELECT reward FROM rft.turn_reward")["reward"].to_pylist() == [0.5]
    for name in ("rft.purge", "rft.folding", "enable_seqscan", "enable_indexscan"):
        session.execute("SELECT set_config(%s, '1', false)", [name])
    session.execute("SET rft.author = 'someone else'")
    session.execute("SET row_security = off")
    assert session.execute("UPDATE rft.turn_reward SET reward = 0.75").rowcount == 1
    (label,) = buffer.sql("SELECT turn, new_value, session_user_name FROM rft.label").to_pylist()
    assert (label["turn"], label["new_value"]) == (0, 0.75)
    account = session.execute("SELECT session_user::text").fetchone()
    assert account is not None and label["session_user_name"] == account[0]
    assert session.execute("SELECT count(*) FROM pg_temp.label").fetchone() == (0,)


def test_statements_of_a_person_leave_nothing_in_the_pool(buffer: Buffer, roles: Roles) -> None:
    with rftdata.open(buffer.config) as other:
        run_statements(other.database, "SET rft.reason = 'left'; SELECT 1", "ada")
        with pytest.raises(QueryError, match="began a transaction without ending it"):
            run_statements(other.database, "BEGIN; UPDATE rft.experience SET reward = 0.125", "ada")
        with pytest.raises(QueryError, match="does not exist"):
            run_statements(other.database, "SELECT * FROM nothing", "ada")
        other.sql("UPDATE rft.experience SET reward = 0.75")
    written = buffer.sql(
        "SELECT DISTINCT author = session_user_name AS own, reason, new_value FROM rft.label"
    ).to_pylist()
    assert written == [{"own": True, "reason": None, "new_value": 0.75}]
