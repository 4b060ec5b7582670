"""`Run`: a frozen view of a run's row, from any handle of the buffer; and a `Worker` that waits for what its role works on."""

from __future__ import annotations

import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

import rftdata
from rftdata import Buffer, Run
from rftdata.errors import FencedError, QueryError
from rftdata.workers.worker import Worker
from tests.support.store_roles import Roles
from tests.support.waiting import PATIENCE_S, wait_until

BLOCKED = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


@pytest.fixture
def run(buffer: Buffer) -> Run:
    return buffer.create_run(name="7", config={"a": 1}, seed=3, steps=2, pipeline_version="p1")


def test_a_run_has_the_columns_of_its_row(buffer: Buffer, run: Run) -> None:
    columns = buffer.sql("SELECT * FROM rft.run").column_names
    fields = {field.name for field in dataclasses.fields(Run)} - {"database", "folder"}
    assert fields == set(columns)
    assert (run.name, run.mode, run.status, run.config, run.seed) == ("7", "both", "created", {"a": 1}, 3)
    assert run.folder == buffer.runs_folder / "7" and run == buffer.find_run(run.run_id)


def test_a_number_is_an_id_and_a_text_a_name_or_an_id(buffer: Buffer, run: Run) -> None:
    others = [buffer.create_run(name="r", config={}, seed=1, steps=1, pipeline_version="p") for _ in range(8)]
    seventh = next(other for other in others if other.run_id == 7)
    assert buffer.find_run("7") == run and buffer.find_run(7) == seventh and buffer.find_run("8").run_id == 8
    with pytest.raises(QueryError, match="contains no such run"):
        buffer.find_run(99)


def test_a_run_is_as_it_was_read_until_it_is_refreshed(run: Run) -> None:
    assert run.end("failed", "the explorer ended") and not run.has_ended
    ended = run.refreshed()
    assert (ended.status, ended.outcome, ended.has_ended) == ("failed", "the explorer ended", True)
    more = ended.continue_with({"a": 2}, steps=9, pipeline_version="p2")
    assert (more.status, more.outcome, more.config, more.planned_steps, more.pipeline_version) == (
        "created",
        None,
        {"a": 2},
        9,
        "p2",
    )


@pytest.mark.parametrize("commits", [True, False], ids=["a trainer", "a trainer that starts at this moment"])
def test_settings_are_not_stored_under_a_live_trainer(buffer: Buffer, commits: bool) -> None:
    """With another pipeline version its next batch would take groups without any of their experiences."""
    roles = Roles(buffer)
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(1))
        if commits:
            attempt = stack.enter_context(roles.attempt())
            roles.work()
        else:
            starting = stack.enter_context(psycopg.connect(buffer.config.uri))
            starting.execute("SELECT FROM rft.run FOR UPDATE")
            starting.execute(
                "WITH begun AS (INSERT INTO rft.run_attempt (run_id, host, pid, lease_until) VALUES (1, 'h', 1, now() + interval '1 hour')"
                " RETURNING attempt_id) UPDATE rft.run SET current_attempt_id = attempt_id FROM begun"
            )
        storing = threads.submit(lambda: roles.run.continue_with({"a": 2}, steps=9, pipeline_version="p2"))
        if not commits:
            wait_until(lambda: storing.done() or buffer.sql(BLOCKED).num_rows, "the settings wait for the start")
            starting.commit()
        with pytest.raises(
            FencedError, match=r"is being trained by process .*, so its settings cannot be changed.*stop that process"
        ):
            storing.result()
        now = roles.run.refreshed()
        assert (now.config, now.planned_steps, now.pipeline_version) == ({}, 4, "p1")
        if commits:
            assert len(roles.train(attempt, 1)) == 2
    if commits:
        assert roles.run.continue_with({"a": 2}, steps=9, pipeline_version="p2").planned_steps == 9


def test_a_run_that_has_finished_stays_so(run: Run) -> None:
    assert run.end("finished", "2 steps done") and not run.end("failed", "too late")
    assert run.refreshed().outcome == "2 steps done"


def test_a_handle_uses_its_own_connections_for_a_run_of_another(buffer: Buffer, run: Run) -> None:
    with rftdata.open(buffer.config) as other:
        attempt = other.attempt(run)
    buffer.runs()
    assert attempt.run.database is other.database and attempt.run == run


def test_a_worker_is_woken_by_what_its_role_works_on(run: Run) -> None:
    with Worker(run, "trainer") as worker:
        worker.wait(0.0)  # the first wait begins to listen
        while worker.wait(0.5):
            pass
        assert not worker.is_asked_to_stop()
        run.request_stop()
        assert worker.wait(PATIENCE_S), "it was not woken"
        assert worker.is_asked_to_stop() and worker.should_stop()
