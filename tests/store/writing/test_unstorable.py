"""Texts and numbers that PostgreSQL cannot hold: recorded with replaced characters, or refused by our own error where they enter."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pydantic import ValidationError

from rftcore.config.sections import RunSection
from rftdata import Buffer, Group, Rollout, exchange, labels
from rftdata.attempts import stored_selection
from rftdata.attempts.sampling import SamplingConfig
from rftdata.config import TasksetConfig
from rftdata.errors import BufferUnavailableError, ConflictError, QueryError, RftError
from rftdata.labels import RewardLabel
from rftdata.limits import MAX_COUNT
from rftdata.maintenance import purge
from rftdata.planning.claims import release_groups
from rftdata.postgres.database import execute, queries, send
from rftdata.processes import pid_space
from rftdata.sql_session import run_statements
from rftdata.workers.live_workers import end_worker
from rftdata.workers.worker import Worker
from tests.support.store_roles import Roles, own_group, tokens
from tests.support.waiting import wait_until

ODD = "a\x00b \ud800 \udfff"
REPLACED = "a\ufffdb \ufffd \ufffd"


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "kept"), [(ValueError(ODD), f"ValueError: {REPLACED}"), (UnreadableError(), "UnreadableError")]
)
def test_an_error_with_any_text_ends_an_attempt_and_a_worker_and_is_stored_unchanged(
    buffer: Buffer, error: Exception, kept: str
) -> None:
    roles = Roles(buffer)

    def train() -> None:
        with roles.attempt():
            roles.plan()
            raise error

    def explore() -> None:
        with Worker(roles.run, "explorer") as worker:
            roles.worker_id = worker.worker_id
            assert roles.claim()
            raise error

    for work in (train, explore):
        with pytest.raises(type(error)) as ended:
            work()
        assert ended.value is error
    row = buffer.sql(
        "SELECT (SELECT outcome FROM rft.run_attempt WHERE ended_at IS NOT NULL AND lease_until <= rft.clock()) AS attempt,"
        " (SELECT error FROM rft.worker WHERE worker_id = %s AND stopped_at IS NOT NULL) AS worker,"
        " (SELECT count(*) FROM rft.rollout_group WHERE status = 'claimed') AS claimed",
        [roles.worker_id],
    ).to_pylist()
    assert row == [{"attempt": kept, "worker": kept, "claimed": 0}]


def test_a_heartbeat_continues_whatever_a_worker_waits_for(buffer: Buffer) -> None:
    def shown() -> dict[str, Any]:
        found: dict[str, Any] = buffer.sql("SELECT state, waiting_for, heartbeat_at FROM rft.worker").to_pylist()[0]
        return found

    run = buffer.create_run(name="r", config={}, seed=1, steps=1, pipeline_version="none")
    with Worker(run, "explorer") as worker:
        worker.set_state(ODD, ODD)
        first = shown()
        assert (first["state"], first["waiting_for"]) == (REPLACED, REPLACED)
        wait_until(lambda: shown()["heartbeat_at"] > first["heartbeat_at"], "the next heartbeat")
        worker.set_state("working")


def test_outcomes_are_replaced_and_cut(buffer: Buffer) -> None:
    run = buffer.create_run(name="r", config={}, seed=1, steps=1, pipeline_version="none")
    assert run.end("failed", ODD)
    assert run.refreshed().outcome == REPLACED
    assert run.end("failed", "begin" + "x" * 10**6 + "end")
    outcome = str(run.refreshed().outcome)
    assert re.match(r"beginx+\n\[… \d+,\d+ characters left out …\]\nx+end$", outcome) and len(outcome) < 110_000
    with Worker(run, "pipeline") as worker:
        end_worker(run, *_place(buffer, worker), ODD, crashed=True, pid_space=pid_space())
    assert buffer.sql("SELECT error FROM rft.worker")["error"].to_pylist() == [REPLACED]


def _place(buffer: Buffer, worker: Worker) -> tuple[str, int]:
    row = buffer.sql("SELECT host, pid FROM rft.worker WHERE worker_id = %s", [worker.worker_id]).to_pylist()[0]
    return row["host"], row["pid"]


def test_every_query_parameter_that_sounds_like_an_error_or_a_state_is_one(buffer: Buffer) -> None:
    """A new query that records such a text gets it replaced without doing anything for it."""
    # A stop_reason is a value of a type, and no text.
    words = r"%\((\w*(?:error|(?<!stop_)reason|outcome|waiting|detail|activities|why|message|note)\w*|state)\)s"
    found = {name for text in queries().values() for name in re.findall(words, text)}
    assert len(found) > 8
    refused = []
    for name in sorted(found):
        query = next(key for key, text in queries().items() if f"%({name})s" in text)
        parameters: dict[str, Any] = dict.fromkeys(re.findall(r"%\((\w+)\)s", queries()[query]))
        parameters[name] = [ODD] if name in ("activities", "details", "errors", "reasons") else ODD
        try:
            with buffer.database.connection() as connection, connection.transaction(force_rollback=True):
                send(connection, query, **parameters)
        except (QueryError, psycopg.Error) as error:
            refused.append(str(error))
    # The server may refuse the other parameters, which are all NULL, and a text that is not among the values of a type.
    assert [text for text in refused if "cannot be stored" in text or "surrogate" in text] == []


CREATED: list[tuple[dict[str, Any], str]] = [
    ({"name": ODD}, "the name of a run cannot be stored"),
    ({"name": "é" * 101}, "the name of a run is too long"),
    ({"name": ""}, "the name of a run is not valid"),
    ({"name": "../r"}, "the name of a run is not valid"),
    ({"name": "a\nb"}, "the name of a run is not valid"),
    ({"seed": 2**63}, r"the seed of a run is not valid .*from -9223372036854775808 to 9223372036854775807"),
    ({"seed": 10**5000}, "the seed of a run is not valid"),
    ({"seed": 0.5}, "the seed of a run is not valid"),
    ({"steps": -1}, r"the number of steps of a run is not valid .got -1.*from 0 to 1000000000"),
    ({"steps": 2**31}, "the number of steps of a run is not valid"),
    ({"pipeline_version": ODD}, "the pipeline version of a run cannot be stored"),
    ({"pipeline_version": "v" * 3000}, "the pipeline version of a run is too long"),
    ({"config": {"tasks": [{"name": ODD}]}}, r"the configuration of a run, at tasks\[0\]\.name, cannot be stored"),
    ({"config": {"a": float("nan")}}, "the configuration of a run, at a, is not a finite number"),
    ({"config": {ODD: 1}}, "a key of the configuration of a run cannot be stored"),
    ({"mode": "sleep"}, "the mode of a run is unknown"),
]


@pytest.mark.parametrize(("changes", "what"), CREATED)
def test_a_run_that_cannot_be_stored_is_refused(buffer: Buffer, changes: dict[str, Any], what: str) -> None:
    given: dict[str, Any] = {"name": "r", "config": {}, "seed": 1, "steps": 1, "pipeline_version": "none", **changes}
    with pytest.raises(QueryError, match=what):
        buffer.create_run(**given)
    assert buffer.runs() == []


def test_numbers_at_their_limits_are_stored_and_used(buffer: Buffer) -> None:
    """A group rests for as many steps as may be named, after the last step that may be named."""
    run = buffer.create_run(
        name="n" * 180, config={}, seed=2**63 - 1, steps=MAX_COUNT, pipeline_version="none", mode="train"
    )
    assert (run.seed, run.planned_steps) == (2**63 - 1, MAX_COUNT)
    again = buffer.create_run(name="n" * 180, config={}, seed=-(2**63), steps=0, pipeline_version="none")
    assert again.name == "n" * 180 + "-2"
    with buffer.writer(run) as writer:
        writer.insert(_group("k" * 1600))
    sampling = SamplingConfig(max_times_sampled=0, cooldown_steps=MAX_COUNT)
    with buffer.attempt(run, sampling=sampling) as attempt:
        batch = attempt.draw(MAX_COUNT, 1, timeout_s=5)
        assert batch is not None and len(batch) == 2
        with pytest.raises(QueryError, match=r"the trainer step of a draw is not valid .*from 1 to 1000000000"):
            attempt.draw(2**31, 1)
    for refused in (
        lambda: SamplingConfig(cooldown_steps=2**31 - 1),
        lambda: RunSection(name="r", seed=2**63),
        lambda: TasksetConfig(name=ODD, source="s"),
    ):
        with pytest.raises(ValidationError, match=r"it may be up to|cannot be stored"):
            refused()  # type: ignore[no-untyped-call]


def _group(task_key: str) -> Group:
    rollouts = [Rollout(i, "ok", float(i), [tokens(float(i))]) for i in range(2)]
    return Group(rollouts, source="import", taskset="t" * 1000, task_key=_random(task_key), payload={})


def _random(text: str) -> str:
    """As many characters that PostgreSQL cannot compress."""
    return "".join(random.Random(0).choices(string.ascii_letters + string.digits, k=len(text)))


def test_unstorable_authors_and_names_are_refused_with_our_own_errors(buffer: Buffer, tmp_path: Path) -> None:
    run = buffer.create_run(name="r", config={}, seed=1, steps=1, pipeline_version="none")
    with buffer.writer(run) as writer:
        writer.insert(own_group())
    asked: list[Callable[[], object]] = [
        lambda: labels.set_rewards(buffer, {1: 0.5}, author=ODD),
        lambda: labels.apply(buffer, [RewardLabel(1, 0.5)], author="\ud800", source="set"),
        lambda: purge.purge(buffer, where="true", reason="asked", author=ODD),
        lambda: buffer.find_run(ODD),
        lambda: buffer.sql("SELECT %s::text", ["\x00"]),
        lambda: buffer.sql("SELECT %s::text", ["\ud800"]),
        lambda: buffer.sql("SELECT '\ud800'"),
        lambda: buffer.query("SELECT '\ud800'"),
        lambda: buffer.query("SELECT 'a\x00b'"),
        lambda: buffer.scan(["experience_id"], where="response = '\ud800'").read_all(),
        lambda: buffer.scan(["experience_id"], where="response = '\x00'").read_all(),
        lambda: exchange.export(buffer, tmp_path / "a.jsonl", where="response = '\ud800'"),
        lambda: exchange.export(buffer, tmp_path / "a.jsonl", where="response = '\x00'"),
        lambda: stored_selection.select(
            buffer.database, "SELECT experience_id FROM rft.experience WHERE response = '\ud800'"
        ),
        lambda: stored_selection.select(
            buffer.database, "SELECT experience_id FROM rft.experience WHERE response = '\x00'"
        ),
        lambda: run_statements(buffer.database, "SELECT '\ud800'", author="ada"),
        lambda: run_statements(buffer.database, "SELECT 1", author=ODD),
        lambda: buffer.read_arrays([2**63 - 1], ["token_ids"]),
        lambda: buffer.read_arrays([2**63], ["token_ids"]),
        lambda: buffer.find_run(2**70),
        lambda: buffer.rewind(run, 2**31),
        lambda: buffer.fork(run, name=ODD),
        lambda: buffer.attempt(run, lease_s=1e300),
    ]
    others = []
    for i, ask in enumerate(asked):
        try:
            others.append((i, ask()))
        except RftError:
            pass
        except Exception as error:  # noqa: BLE001 - this is what must not happen
            others.append((i, repr(error)))
    assert others == []
    assert buffer.sql("SELECT count(*) AS n FROM rft.label")["n"].to_pylist() == [0]
    assert buffer.sql("SELECT count(*) AS n FROM rft.purge")["n"].to_pylist() == [0]


def test_a_key_that_no_index_holds_is_not_taken_for_a_database_that_is_away(buffer: Buffer) -> None:
    """Keys from other places than ours: the server refuses them, once."""
    tasks = {"tasksets": ["t"], "task_keys": [_random("k" * 5000)], "payloads": ["{}"], "features": ["{}"]}
    with pytest.raises(QueryError, match="the database cannot carry out a statement: index row size"):
        buffer.database.run("insert_tasks", **tasks)

    def in_a_pipeline() -> None:
        with buffer.database.transaction() as connection, connection.pipeline():
            execute(connection, "allow_hash_joins")
            send(connection, "insert_tasks", **tasks)
            send(connection, "buffer_id")

    with pytest.raises(QueryError, match="index row size"):
        in_a_pipeline()


@pytest.mark.parametrize(
    ("sqlstate", "kind"),
    [
        ("08006", BufferUnavailableError),
        ("53300", BufferUnavailableError),
        ("57P01", BufferUnavailableError),
        ("57P02", BufferUnavailableError),
        ("57P03", BufferUnavailableError),
        ("57P05", BufferUnavailableError),
        ("28000", BufferUnavailableError),
        ("25P03", BufferUnavailableError),
        ("40001", ConflictError),
        ("55P03", ConflictError),
        ("54000", QueryError),
        ("54001", QueryError),
        ("53200", QueryError),
        ("53400", QueryError),
        ("55000", QueryError),
        ("58030", QueryError),
        ("57014", QueryError),
        ("22003", QueryError),
        ("22021", QueryError),
        ("22P05", QueryError),
    ],
)
def test_only_an_error_of_the_connection_is_one(buffer: Buffer, sqlstate: str, kind: type[RftError]) -> None:
    with pytest.raises(RftError) as refused, buffer.database.connection() as connection:
        connection.execute(f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{sqlstate}'; END $$")
    assert type(refused.value) is kind


def test_json_that_an_import_would_refuse_is_not_written(buffer: Buffer) -> None:
    run = buffer.create_run(name="deep", config={}, seed=1, steps=1, pipeline_version="p")
    value: Any = 1
    for _ in range(298):
        value = [value]
    with buffer.writer(run) as writer:
        writer.insert(_with_metadata(value))
        for deeper in ([value], [[[[[value]]]]]):
            with pytest.raises(QueryError, match="nested too deeply; allowed: up to 300 levels"):
                writer.insert(_with_metadata(deeper))
    assert buffer.sql("SELECT count(*) AS n FROM rft.v_group WHERE run = 'deep'")["n"].to_pylist() == [1]


def test_a_task_that_an_update_nested_too_deeply_is_reported_as_such(buffer: Buffer) -> None:
    roles = Roles(buffer)
    with roles.attempt(), buffer.database.connection() as connection:
        roles.plan()
        connection.execute("update rft.task set payload = %s::jsonb", ["[" * 2500 + "]" * 2500])
        with pytest.raises(
            QueryError, match="nested too deeply to be read; allowed: up to 300 levels; make it flatter"
        ):
            roles.claim()
        connection.execute("update rft.task set payload = '{}' where payload @? '$.**{301}'")
        release_groups(roles.run, roles.worker_id)  # as its end does
        assert roles.claim()


def _with_metadata(value: Any) -> Group:
    group = own_group(task_key="deep")
    return Group(
        group.rollouts,
        source="import",
        taskset="mine",
        task_key="deep",
        payload={"answer": "2", "metadata": {"x": value}},
    )
