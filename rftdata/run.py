"""`Run`: one run of a buffer, as its row was when it was read.

Functions that concern a run take it as an argument: `Buffer.writer(run)`, `Worker(run, role)`, `newest_policy(run)`. It contains its
database, which therefore needs no separate argument. `Buffer.create_run`, `Buffer.find_run` and `Buffer.fork` create it.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from psycopg.types.json import Jsonb

from rftdata.errors import ArchivedError, QueryError
from rftdata.holder import live_holder, refuse_if_held
from rftdata.limits import MAX_COUNT, check_integer, check_json, check_name, check_run_name
from rftdata.postgres import notify
from rftdata.postgres.database import Connection, Database, Row, execute, fetch

NO_PIPELINE = "none"
"""The pipeline version of runs without stages. A complete group is drawable as soon as it is written."""
_MODES = ("both", "explore", "train", "eval")
_ENDED = ("finished", "interrupted", "failed")


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """A run to create; its fields are columns of `rft.run`.

    Raises:
        QueryError: one of them cannot be stored as it is.
    """

    name: str
    mode: str
    config: dict[str, Any]
    seed: int
    planned_steps: int
    pipeline_version: str

    def __post_init__(self) -> None:
        check_run_name(self.name)
        check_integer("the seed of a run", self.seed)
        _check_settings(self.config, self.planned_steps, self.pipeline_version)
        if self.mode not in _MODES:
            raise QueryError("the mode of a run is unknown", value=self.mode, allowed=", ".join(_MODES))

    def insert(self, connection: Connection, *, parent_run_id: int | None) -> Row:
        """Store the run, with a number after its name if the name is taken, and return its row."""
        execute(connection, "lock_run_names")
        values = {**vars(self), "config": Jsonb(self.config)}
        return fetch(connection, "insert_run", parent_run_id=parent_run_id, **values)[0]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run; its fields are the columns of `rft.run`, its database and its folder.

    Attributes:
        folder: contains the run's files other than experiences: checkpoints, weights, curves.
    """

    run_id: int
    name: str
    parent_run_id: int | None
    mode: str
    status: str
    config: dict[str, Any] = field(hash=False)
    seed: int
    planned_steps: int
    pipeline_version: str
    current_attempt_id: int | None
    stop_requested: bool
    outcome: str | None
    source_sql: str | None
    source_kind: str | None
    source_rows: int | None
    source_hash: str | None
    source_epochs: int | None
    source_weighted: bool | None
    label_cut: int | None
    created_at: datetime.datetime
    finished_at: datetime.datetime | None
    database: Database = field(repr=False, compare=False)
    folder: Path = field(compare=False)

    @classmethod
    def of_row(cls, database: Database, folder: Path, row: Row) -> Run:
        """Create a run from its row; `folder` contains the folders of all runs of the buffer."""
        columns = {f.name: row[f.name] for f in fields(cls) if f.name not in ("database", "folder")}
        return cls(database=database, folder=folder / str(row["name"]), **columns)

    @property
    def has_ended(self) -> bool:
        """Whether the run is finished, interrupted or failed."""
        return self.status in _ENDED

    @property
    def was_imported(self) -> bool:
        """Whether an import created the run, which then has no checkpoint and no configuration to continue with."""
        return "import" in self.config

    def server_address(self) -> str | None:
        """Return the IP address of the server with the run's rows; None if it is reached by a unix socket."""
        return self.database.server_address()

    def end(self, status: str, outcome: str) -> bool:
        """Store that the run is finished, interrupted or failed, and why; return False for a finished run, which stays finished."""
        with self.database.transaction() as connection:
            execute(connection, "lock_run_state", run_id=self.run_id)
            ended = execute(connection, "finish_run", run_id=self.run_id, status=status, outcome=outcome)
        return bool(ended)

    def request_stop(self) -> None:
        """Ask every process of the run to stop at the next safe place."""
        self.database.run("request_stop", run_id=self.run_id)
        notify.notify(self.database, notify.RUN)

    def continue_with(self, config: dict[str, Any], *, steps: int, pipeline_version: str) -> Run:
        """Store the settings with which the run continues; return the updated run. They apply from the next attempt on.

        Raises:
            QueryError: one of them cannot be stored.
            FencedError: a trainer is at work with other settings; nothing was stored.
        """
        _check_settings(config, steps, pipeline_version)
        with self.database.transaction() as connection:
            (locked,) = fetch(connection, "lock_run", run_id=self.run_id)
            refuse_if_held(connection, locked, ", so its settings cannot be changed")
            execute(
                connection,
                "set_run_config",
                run_id=self.run_id,
                config=Jsonb(config),
                planned_steps=steps,
                pipeline_version=pipeline_version,
            )
        return self.refreshed()

    def trainer_at_work(self) -> str | None:
        """Return the process that holds the run as its trainer, if it may be at work; it may not have registered as a worker yet."""
        with self.database.connection() as connection:
            (row,) = fetch(connection, "find_run", run=str(self.run_id), by_name=False)
            holder = live_holder(connection, row)
        return None if holder is None else f"trainer {holder['pid']} on {holder['host']}"

    def refuse_archived(self, purpose: str) -> None:
        """Refuse a request that needs the texts, arrays or scores of the run; see `refuse_archived`."""
        with self.database.connection() as connection:
            refuse_archived(connection, self.run_id, purpose)

    def refreshed(self) -> Run:
        """Return the run as it is now."""
        (row,) = self.database.fetch("find_run", run=str(self.run_id), by_name=False)
        return Run.of_row(self.database, self.folder.parent, row)


def _check_settings(config: dict[str, Any], steps: int, pipeline_version: str) -> None:
    check_integer("the number of steps of a run", steps, (0, MAX_COUNT))
    check_name("the pipeline version of a run", pipeline_version)
    check_json("the configuration of a run", config)


def refuse_archived(connection: Connection, run_id: int, purpose: str) -> None:
    """Refuse a request that needs what lies in the archive of a run. Changes of an archived run are refused by the database itself.

    Args:
        purpose: what cannot be done, such as "it cannot be forked".

    Raises:
        ArchivedError: the run is archived.
    """
    for row in fetch(connection, "archived_among", run_ids=[run_id]):
        raise ArchivedError(
            f"the run {row['run']!r} is archived: {purpose}",
            todo=f"bring it back first: `rft restore-run {row['run']}`",
        )
