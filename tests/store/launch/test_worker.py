"""Workers: claims of a lost one are released while the others continue, and the heartbeat survives outages of the database."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from rftcore.cli.status import status
from rftdata import Buffer
from rftdata.attempts.evaluations import plan_evaluations
from rftdata.errors import DiskFullError, FencedError, QueryError
from rftdata.postgres import notify
from rftdata.postgres.database import queries
from rftdata.workers.live_workers import record_exited_workers
from rftdata.workers.worker import Worker
from tests.support.store_roles import Roles, own_group
from tests.support.waiting import PATIENCE_S, wait_until

HOLDER = """
import sys, rftdata
from rftdata.pipeline.queue import claim_sealed_groups
from rftdata.planning.claims import claim_groups
from rftdata.attempts.evaluations import claim_evaluation
from rftdata.config import BufferConfig
from rftdata.workers.live_workers import record_exited_workers
from rftdata.workers.worker import Worker

uri, segments, run_id = sys.argv[1], sys.argv[2], int(sys.argv[3])
buffer = rftdata.open(BufferConfig(uri=uri, segments=segments))
run = buffer.find_run(run_id)
worker = Worker(run, "explorer", lease_s=7200)
held = [
    claim_groups(run, worker.worker_id, policy_step=0, last_step=9, count=9, lease_s=3600),
    claim_sealed_groups(run, worker.worker_id, count=9, lease_s=3600),
    claim_evaluation(run, worker.worker_id, lease_s=3600),
]
print(all(held), flush=True)
sys.stdin.read()  # until it is killed, or the test has ended
"""


LEASED = ("rollout_group", "worklist", "evaluation")


def started(arguments: list[str]) -> subprocess.Popen[str]:
    """A process that claims one of each, and prints whether it could."""
    command = [sys.executable, "-c", HOLDER, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def claims(buffer: Buffer) -> dict[str, int]:
    """How many claims there are of each kind."""
    found: dict[str, int] = buffer.sql(
        "SELECT (SELECT count(*) FROM rft.rollout_group WHERE status = 'claimed') AS groups,"
        " (SELECT count(*) FROM rft.worklist WHERE NOT available) AS items,"
        " (SELECT count(*) FROM rft.evaluation WHERE status = 'claimed') AS evaluations"
    ).to_pylist()[0]
    return found


def test_claims_of_a_killed_process_go_back_while_the_others_work_on(buffer: Buffer) -> None:
    """As if it had run on another machine: no process can check it, and no worker starts or stops meanwhile."""
    roles = Roles(buffer)
    with roles.attempt() as attempt:
        roles.insert(own_group())
        roles.plan()
        plan_evaluations(
            attempt,
            policy_version_id=1,
            trainer_step=0,
            purpose="validation",
            tasksets=["set0"],
            decodings=["greedy"],
            uri="/weights",
            checksum="0",
        )
        with Worker(roles.run, "trainer", lease_s=8):  # it looks for lost claims every two seconds
            arguments = [buffer.config.uri, str(buffer.config.segments), str(roles.run_id)]
            holder = started(arguments)
            assert holder.stdout is not None
            assert holder.stdout.readline().strip() == "True"
            buffer.sql("UPDATE rft.worker SET host = 'elsewhere'")
            assert claims(buffer) == {"groups": 1, "items": 1, "evaluations": 1}
            # A live worker keeps what it claimed: its heartbeat has renewed the leases of all three.
            renewed = " AND ".join(
                f"(SELECT min(lease_until) > now() + interval '6000 s' FROM rft.{table})" for table in LEASED
            )
            wait_until(
                lambda: buffer.sql(f"SELECT {renewed} AS yes")["yes"][0].as_py(), "longer leases", process=holder
            )
            assert claims(buffer) == {"groups": 1, "items": 1, "evaluations": 1}
            topics = [notify.Listener(buffer.database, topic) for topic in (notify.PLANNED, notify.SEALED, notify.RUN)]
            for listener in topics:
                listener.wait()
            holder.kill()
            holder.communicate()
            for table in LEASED:
                buffer.sql(f"UPDATE rft.{table} SET lease_until = now() - interval '1 s' WHERE lease_until IS NOT NULL")
            wait_until(lambda: claims(buffer) == {"groups": 0, "items": 0, "evaluations": 0})
            for listener in topics:
                assert listener.wait(PATIENCE_S)
                listener.close()
    (group,) = roles.claim()
    assert group.claim_token == 3  # claimed, taken back, claimed again: what the lost one held is fenced


def test_a_new_worker_frees_at_once_what_died_on_its_machine(buffer: Buffer) -> None:
    roles = Roles(buffer)
    with roles.attempt():
        roles.insert(own_group())
        roles.plan()
    arguments = [buffer.config.uri, str(buffer.config.segments), str(roles.run_id)]
    holder = started(arguments)
    assert holder.stdout is not None and holder.stdout.readline()
    assert claims(buffer)["groups"] == 1
    with Worker(roles.run, "pipeline"):
        assert claims(buffer)["groups"] == 1, "its holder lives"
    holder.kill()
    holder.communicate()
    with Worker(roles.run, "pipeline"):
        assert claims(buffer) == {"groups": 0, "items": 0, "evaluations": 0}


JUDGE = """
import sys, rftdata
from rftdata.config import BufferConfig
from rftdata.errors import FencedError
from rftdata.workers.live_workers import record_exited_workers

with rftdata.open(BufferConfig(uri=sys.argv[1], segments=sys.argv[2])) as buffer:
    run = buffer.find_run(int(sys.argv[3]))
    dead = record_exited_workers(run)
    try:
        buffer.attempt(run).close()
    except FencedError as error:
        print(dead, "is being trained" in str(error))
"""
# A process id namespace with a /proc of its own, as a container has.
AS_ROOT = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
CONTAINER = ["unshare", *AS_ROOT, "--pid", "--fork", "--kill-child", "--mount-proc"]


def judged_from(command: Sequence[str], buffer: Buffer, roles: Roles) -> str:
    """What a process that a command starts finds: how many workers have ended, and whether the run is being trained."""
    arguments = [buffer.config.uri, str(buffer.config.segments), str(roles.run_id)]
    return subprocess.run(
        [*command, sys.executable, "-c", JUDGE, *arguments], stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def test_a_process_in_another_container_of_the_same_host_name_is_not_taken_for_dead(buffer: Buffer) -> None:
    if (
        shutil.which("unshare") is None
        or subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this account may not create process id namespaces")
    roles = Roles(buffer)
    with roles.attempt(), Worker(roles.run, "explorer"):
        assert judged_from(CONTAINER, buffer, roles).split() == ["0", "True"]
    assert buffer.sql("SELECT error FROM rft.worker WHERE role = 'explorer'")["error"].to_pylist()[-1] is None


def test_stacks_are_not_asked_of_the_process_that_has_the_number_here(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The signal would reach another process."""
    monkeypatch.setenv("RFT_SEGMENTS", str(buffer.config.segments))
    roles = Roles(buffer)
    with Worker(roles.run, "trainer"), Worker(roles.run, "pipeline") as elsewhere:
        buffer.sql(f"UPDATE rft.worker SET pid_space = 'another' WHERE worker_id = {elsewhere.worker_id}")
        status(uri=buffer.config.uri, stacks=True)
    asked = capsys.readouterr().out
    assert f"\ntrainer {os.getpid()}\n" in asked and f"\npipeline {os.getpid()}\n" not in asked


@pytest.mark.parametrize(
    ("changed", "num_dead"),
    [
        ("pid = pid", 0),
        ("pid_started = pid_started + 1", 1),  # a later process has the number
        ("pid = {gone}", 1),
        ("pid = {gone}, pid_space = 'another'", 0),
        ("pid = {gone}, pid_space = ''", 0),
        ("pid = {gone}, host = 'elsewhere'", 0),
    ],
)
def test_a_worker_is_gone_if_the_process_of_its_number_space_and_start_is(
    buffer: Buffer, changed: str, num_dead: int
) -> None:
    roles = Roles(buffer)
    gone = subprocess.Popen(["true"])
    gone.wait()
    buffer.sql("UPDATE rft.worker SET stopped_at = now()")
    worker = Worker(roles.run, "explorer")
    worker.stop()
    buffer.sql(
        f"UPDATE rft.worker SET stopped_at = NULL, {changed.format(gone=gone.pid)} WHERE worker_id = %s",
        [worker.worker_id],
    )
    assert record_exited_workers(roles.run) == num_dead


@pytest.mark.parametrize(
    ("changed", "is_held"),
    [
        ("pid = pid", True),
        ("pid_started = pid_started + 1", False),
        ("pid = {gone}", False),
        ("pid = {gone}, pid_space = 'another'", True),
    ],
)
def test_a_run_is_held_while_the_process_of_its_attempt_may_be_alive(
    buffer: Buffer, changed: str, is_held: bool
) -> None:
    roles = Roles(buffer)
    gone = subprocess.Popen(["true"])
    gone.wait()
    with roles.attempt() as first:
        buffer.sql(f"UPDATE rft.run_attempt SET {changed.format(gone=gone.pid)}")
        with pytest.raises(FencedError) if is_held else contextlib.nullcontext():
            buffer.attempt(roles.run).close()
        with contextlib.nullcontext() if is_held else pytest.raises(FencedError):
            first.release_step(1)


def test_a_heartbeat_clears_a_wrong_verdict(buffer: Buffer) -> None:
    roles = Roles(buffer)
    with Worker(roles.run, "explorer") as worker:
        buffer.database.run("stop_worker", worker_id=worker.worker_id, error="the process is gone")
        state = "SELECT stopped_at IS NULL AND error IS NULL AS lives FROM rft.worker WHERE worker_id = %s"
        wait_until(lambda: buffer.sql(state, [worker.worker_id])["lives"][0].as_py())
        buffer.database.run("stop_worker", worker_id=worker.worker_id, error="the process is gone")
    row = buffer.sql("SELECT error, stopped_at FROM rft.worker WHERE worker_id = %s", [worker.worker_id]).to_pylist()[0]
    assert row["error"] is None and row["stopped_at"], "it has left in good order"


def worker_row(buffer: Buffer, worker: Worker) -> dict[str, Any]:
    row: dict[str, Any] = buffer.sql(
        "SELECT progress, heartbeat_at FROM rft.worker WHERE worker_id = %s",
        [worker.worker_id],
    ).to_pylist()[0]
    return row


REFUSING = """
CREATE FUNCTION rft.test_refuse() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'no room' USING ERRCODE = '{code}'; END $$;
CREATE TRIGGER refuse BEFORE UPDATE ON rft.worker FOR EACH STATEMENT EXECUTE FUNCTION rft.test_refuse();
"""
DISK_FULL, CANCELED, CHECK_VIOLATION = "53100", "57014", "23514"


@pytest.mark.parametrize("code", [DISK_FULL, CANCELED, CHECK_VIOLATION])
def test_the_heartbeat_outlives_whatever_the_database_states(buffer: Buffer, code: str) -> None:
    roles = Roles(buffer)
    with Worker(roles.run, "explorer") as worker:
        buffer.sql(REFUSING.format(code=code))
        worker.set_state("works")
        wait_until(lambda: worker._heartbeat_error is not None)
        before = worker_row(buffer, worker)["heartbeat_at"]
        buffer.sql("DROP FUNCTION rft.test_refuse CASCADE")
        wait_until(lambda: "last_heartbeat_error" in str(worker_row(buffer, worker)["progress"]))
        row = worker_row(buffer, worker)
    assert row["heartbeat_at"] > before and row["progress"]["last_heartbeat_error"].startswith("at ")


def test_an_error_of_the_work_is_not_hidden_by_one_of_leaving(buffer: Buffer) -> None:
    roles = Roles(buffer)
    buffer.sql(REFUSING.format(code=DISK_FULL))
    with pytest.raises(QueryError, match="no_such_table"), Worker(roles.run, "explorer"):
        buffer.sql("SELECT * FROM no_such_table")
    buffer.sql("DROP FUNCTION rft.test_refuse CASCADE")
    with pytest.raises(DiskFullError), Worker(roles.run, "explorer"):
        buffer.sql(REFUSING.format(code=DISK_FULL))


def plan_nodes(node: dict[str, Any]) -> list[tuple[str, str]]:
    """(kind, table) of every node of an EXPLAIN that reads a table."""
    own = [(node["Node Type"], node["Relation Name"])] if "Relation Name" in node else []
    return own + [found for child in node.get("Plans", ()) for found in plan_nodes(child)]


@pytest.mark.parametrize("query", ["renew_claims", "release_lost_claims"])
def test_claims_are_found_by_index_among_everything_that_waits(buffer: Buffer, query: str) -> None:
    run_id = Roles(buffer).run_id
    buffer.sql(
        "INSERT INTO rft.worklist (run_id, consumer, item_id, sort_key) SELECT r, c, n, n"
        " FROM generate_series(1, 20000) AS n, (VALUES (%s::bigint, 'trainer'::rft.consumer), (9, 'pipeline')) AS v (r, c)",
        [run_id],
    )
    buffer.sql(
        "INSERT INTO rft.rollout_group (run_id, attempt_id, ordinal, task_id, explore_step, group_size, status)"
        " SELECT 9, 9, n, 1, 0, 1, 'claimed' FROM generate_series(1, 20000) AS n"
    )
    buffer.sql("ANALYZE rft.worklist, rft.rollout_group")
    with psycopg.connect(buffer.config.uri) as connection:
        explained = connection.execute(
            "EXPLAIN (FORMAT JSON) " + queries()[query], {"worker_id": 1, "run_id": run_id, "lease_s": 1}
        ).fetchone()
    assert explained is not None
    nodes = plan_nodes(explained[0][0]["Plan"])
    assert {table for _, table in nodes} >= {"worklist", "rollout_group"}
    assert [node for node in nodes if node[0] == "Seq Scan" and node[1] in ("worklist", "rollout_group")] == []


def test_workers_that_one_process_registers_at_once_are_as_many(buffer: Buffer) -> None:
    run, together = Roles(buffer).run, threading.Barrier(4)

    def register(_: int) -> int:
        together.wait(PATIENCE_S)
        with Worker(run, "explorer") as worker:
            together.wait(PATIENCE_S)
            return worker.worker_id

    with ThreadPoolExecutor(4) as pool:
        assert len({*pool.map(register, range(4))}) == 4
