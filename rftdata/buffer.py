"""The buffer: the one object that roles, the command line and notebooks hold.

It ties a database (embedded or a server's) to a segment store and hands out writers, attempts and queries. `rftdata.open` makes it.
A `Buffer` may be shared by threads; each process opens its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psycopg
import pyarrow as pa
from psycopg.rows import tuple_row
from psycopg.types.json import Jsonb

from rftdata.config import BufferConfig
from rftdata.config_errors import did_you_mean
from rftdata.errors import PurgedError, QueryError, SegmentCorruptError
from rftdata.postgres.database import Database, Row, execute, fetch
from rftdata.postgres.embedded import EmbeddedServer
from rftdata.postgres.query_errors import query_error
from rftdata.run import Run
from rftdata.segments.base import SegmentStore
from rftdata.segments.codec import Array, purged_rows
from rftdata.segments.reader import SegmentReader
from rftdata.training import stored_selection
from rftdata.training.attempt import Attempt
from rftdata.training.rewind import fork, rewind
from rftdata.training.sampling import SamplingConfig
from rftdata.training.stored_selection import Selection
from rftdata.uri import redacted
from rftdata.writing.writer import Writer


class Buffer:
    """An open buffer; made by `rftdata.open`."""

    def __init__(
        self, config: BufferConfig, database: Database, server: EmbeddedServer | None, segments: SegmentStore
    ) -> None:
        self.config = config
        self.database = database
        self.server = server
        self.segments = segments
        self.reader = SegmentReader(database, segments)

    @property
    def folder(self) -> Path | None:
        """Folder of an embedded buffer; None for a server's."""
        return self.server.folder if self.server else None

    @property
    def location(self) -> str:
        """What a person would pass to `--buffer`; without password."""
        return str(self.server.folder) if self.server else redacted(self.config.uri)

    @property
    def runs_folder(self) -> Path:
        """Where runs keep files that are not experiences, each in a folder of its own (`Run.folder`)."""
        return (self.folder or Path(self.config.segments or ".").parent) / "runs"

    def close(self) -> None:
        """Close the connections; an embedded server that nothing else uses stops after `buffer.idle_stop_s`."""
        self.database.close()
        if self.server is not None:
            self.server.release()

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def sql(self, query: str, parameters: Sequence[Any] | dict[str, Any] | None = None) -> pa.Table:
        """Rows of a query as an Arrow table; empty for statements that return none. Of columns `id` and `id` the second is `id_2`.

        Raises:
            QueryError: the database refused the query; the message is the database's, with its hint.
        """
        with self.database.connection() as connection:
            cursor = connection.cursor(row_factory=tuple_row)  # not dictionaries: two columns may have one name
            try:
                cursor.execute(query, parameters)
            except psycopg.OperationalError:
                raise
            except psycopg.DatabaseError as error:
                raise query_error(error) from error
            if cursor.description is None:
                return pa.table({})
            names = unique_names([column.name for column in cursor.description])
            rows = cursor.fetchall()
        return pa.table([_column([row[i] for row in rows]) for i in range(len(names))], names=names)

    def create_run(
        self, *, name: str, config: dict[str, Any], seed: int, steps: int, pipeline_version: str, mode: str = "both",
        selected: Selection | None = None, epochs: int = 1, parent: Run | None = None,
    ) -> Run:  # fmt: skip
        """Store a new run; a taken name gets a number.

        Args:
            selected: what the run trains on instead of groups of its own; from `rftdata.training.stored_selection.select`.
            epochs: how often each row of it is drawn.
            parent: the run whose checkpoint the new one starts from, as its next stage.
        """
        with self.database.transaction() as connection:
            execute(connection, "lock_run_names")
            row = fetch(
                connection, "insert_run", name=name, mode=mode, config=Jsonb(config), seed=seed, planned_steps=steps,
                pipeline_version=pipeline_version, parent_run_id=parent.run_id if parent else None,
            )[0]  # fmt: skip
            if selected is not None:
                row = stored_selection.store(connection, row["run_id"], selected, epochs)
        return self._run(row)

    def find_run(self, name_or_id: str | int | None = None) -> Run:
        """A run by name or id, of which a text may be either; the newest when None.

        Raises:
            QueryError: no such run, with the nearest names.
        """
        if name_or_id is None:
            found = self.newest_run()
        else:
            by_id = isinstance(name_or_id, int)
            rows = (
                self.database.fetch("run_by_id", run_id=name_or_id)
                if by_id
                else self.database.fetch("run_by_name_or_id", run=name_or_id)
            )
            found = self._run(rows[0]) if rows else None
        if found is not None:
            return found
        names = [str(row["name"]) for row in self.database.fetch("run_names")]
        if not names:
            raise QueryError(f"the buffer {self.location} holds no run", todo="start one with `rft run CONFIG`")
        raise QueryError(
            f"the buffer {self.location} holds no such run",
            value=name_or_id,
            allowed=", ".join(names),
            todo=did_you_mean(str(name_or_id), names, "name one of these, or another buffer by --buffer"),
        )

    def newest_run(self, *, imported: bool = True) -> Run | None:
        """The run that was stored last, or without `imported` the last that was started here; None where there is none."""
        rows = self.database.fetch("newest_run" if imported else "newest_own_run")
        return self._run(rows[0]) if rows else None

    def runs_of_name(self, name: str, *, imported: bool = False) -> list[Run]:
        """Runs of a configured name, newest first; with `imported` those that were run elsewhere, too."""
        runs = [self._run(row) for row in self.database.fetch("runs_of_name", name=name)]
        return [run for run in runs if imported or not run.was_imported]

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Look for a run and make it where there is none as the only process that does."""
        with self.database.transaction() as connection:
            execute(connection, "lock_joining")
            yield

    def runs_at_work(self) -> list[Run]:
        """Runs with a live process of their own, newest first."""
        return [self._run(row) for row in self.database.fetch("runs_at_work")]

    def writer(
        self, run: Run | str | int, *, max_rows: int = 2048, max_bytes: int = 128 * 2**20, linger_ms: float = 0.0
    ) -> Writer:
        """A writer of groups for a run; a context manager.

        Args:
            max_rows, max_bytes: a transaction takes no further groups beyond this many experiences or bytes.
            linger_ms: how long to wait for more before a smaller batch is stored.
        """
        return Writer(
            self.database,
            self.segments,
            self._own(run).run_id,
            max_rows=max_rows,
            max_bytes=max_bytes,
            linger_ms=linger_ms,
        )

    def attempt(
        self, run: Run | str | int, *, lease_s: float = 30.0, sampling: SamplingConfig | None = None, max_refill: int = 0,
        tasksets: Sequence[str] = (),
    ) -> Attempt:  # fmt: skip
        """Start training a run, or go on from its last checkpoint; holds the run's lease until closed.

        Args:
            lease_s: a trainer that is silent for this long may be replaced.
            sampling: how batches are drawn; first in first out, each group once, by default.
            max_refill: how many groups the planner may add to a step in the place of dropped ones.
            tasksets: names of the run's tasksets, for `sampling.stratify`.

        Raises:
            FencedError: another live process trains the run.
            ConfigError: a priority formula that is no expression.
        """
        return Attempt.start(self._own(run), self.reader, lease_s, sampling or SamplingConfig(), max_refill, tasksets)

    def join_attempt(self, run: Run | str | int, attempt_id: int, *, max_refill: int = 0) -> Attempt:
        """Take part in an attempt that another process holds: a further rank of its trainer, which draws its share of each step.

        Only the holder keeps the lease; when it is replaced, this one is fenced too.

        Args:
            attempt_id: of the holder's `Attempt`, which tells its ranks (broadcast).
            max_refill: as the holder has it.

        Raises:
            FencedError: the attempt does not hold the run.
        """
        return Attempt.join(self._own(run), self.reader, attempt_id, max_refill)

    def rewind(self, run: Run | str | int, step: int, *, keep_rollouts: bool = False) -> None:
        """Take a run back to the checkpoint of an earlier step; what trains it next goes on from there.

        Groups planned since then stay stored and are not used any more; task statistics and selectors are as they were.
        Labels stay as they are.

        Args:
            step: a trainer step with a kept checkpoint, or 0 for the initial weights.
            keep_rollouts: undo only the draws: every group that the remaining steps did not use can be drawn.

        Raises:
            ConfigError: there is no such checkpoint.
            FencedError: a live process trains the run.
        """
        rewind(self._own(run), step, keep_rollouts=keep_rollouts)

    def fork(
        self, run: Run | str | int, *, name: str, step: int | None = None, keep_rollouts: bool = False,
        config: dict[str, Any] | None = None, steps: int | None = None, pipeline_version: str | None = None,
    ) -> Run:  # fmt: skip
        """A new run that goes on from a step of another, which stays as it is.

        Groups that the history up to the step did not draw are copied (their arrays are shared; each experience names its origin in
        `parent_id`), and the new run's pipeline decides on them.

        Args:
            name: of the new run; a taken one gets a number.
            step: a trainer step with a kept checkpoint, 0 for the initial weights; by default the newest.
            keep_rollouts: copy the groups planned after the step, too.
            config, steps, pipeline_version: of the new run; by default those of the old one.

        Raises:
            ConfigError: there is no such checkpoint.
        """
        parent = self._own(run).refreshed()
        new = {
            "name": name, "mode": parent.mode, "config": Jsonb(parent.config if config is None else config), "seed": parent.seed,
            "planned_steps": parent.planned_steps if steps is None else steps,
            "pipeline_version": pipeline_version or parent.pipeline_version,
        }  # fmt: skip
        row = fork(parent, new, step, keep_rollouts=keep_rollouts)
        return self._run(row)

    def read_arrays(
        self, experience_ids: Sequence[int], columns: Sequence[str], *, purged: Literal["refuse", "null"] = "refuse"
    ) -> pa.Table:
        """Token arrays of experiences, in the order asked for: experience_id and the list columns named.

        Args:
            purged: what to do where the arrays were purged.

        Raises:
            QueryError: no such experience, or none of them has such an array.
            PurgedError: the arrays of one are gone.
        """
        places = self._places(experience_ids)
        if purged == "refuse":
            for i in self.reader.purged(places):
                raise PurgedError(
                    f"the arrays of experience {experience_ids[i]} were purged",
                    todo="leave it out; rft.v_purged lists them all",
                )
        table = self.reader.take(places, columns)
        return table.add_column(0, "experience_id", pa.array(np.asarray(experience_ids, dtype=np.int64)))

    def arrays(self, experience_ids: Sequence[int], name: str) -> list[Array | None]:
        """One array of each experience in its own shape; None where it has none, or it was purged.

        Views of the mapped files, not copies: for use within an hour, after which the bytes of a purged row's segment are overwritten.

        Raises:
            QueryError: no such experience.
        """
        places = self._places(experience_ids)
        gone = set(self.reader.purged(places))
        readers = self.reader.columns(sorted({segment_id for segment_id, _ in places}), name, needed=False)
        found = [(i, readers[segment_id], row) for i, (segment_id, row) in enumerate(places)]
        return [None if reader is None or i in gone else reader.row(row) for i, reader, row in found]

    def _places(self, experience_ids: Sequence[int]) -> list[tuple[int, int]]:
        """(segment, row in it) of each experience."""
        rows = self.database.fetch("experience_addresses", experience_ids=list(experience_ids))
        place = {row["experience_id"]: (row["segment_id"], row["segment_row"]) for row in rows}
        missing = [i for i in experience_ids if i not in place]
        if missing:
            raise QueryError("no such experience", value=missing[0])
        return [place[i] for i in experience_ids]

    def verify(self) -> Iterator[str]:
        """Check every segment's checksum, every reference to it and every purge of it; yields one sentence per problem.

        Raises:
            BufferUnavailableError: the folder of the segments cannot be read.
        """
        purged = {row["segment_id"]: set(row["rows"]) for row in self.database.fetch("purged_rows")}
        damaged: list[SegmentCorruptError] = []
        for address, num_rows in self.reader.all_addresses():
            try:
                found = self.reader.read(address)
            except SegmentCorruptError as error:
                damaged.append(error)
                continue
            if found.num_rows != num_rows:
                yield f"segment {address.segment_id} holds {found.num_rows} rows where rft.segment says {num_rows}"
            kept = sorted(purged.get(address.segment_id, set()) - purged_rows(found))
            if kept:
                yield f"segment {address.segment_id} still holds row {kept[0]}, which was purged; restore the newer file, or purge again"
        yield from map(str, self.reader.with_experiences(damaged))
        for row in self.database.fetch("misplaced_segments"):
            yield f"segment {row['segment_id']} is in {row['place']}"
        for row in self.database.fetch("dangling_references"):
            place = f"row {row['segment_row']} of segment {row['segment_id']}"
            yield f"experience {row['experience_id']} points at {place}, which does not exist"

    def _run(self, row: Row) -> Run:
        return Run.of_row(self.database, self.runs_folder, row)

    def _own(self, run: Run | str | int) -> Run:
        """A run as this buffer's connections see it; another buffer's object may name it."""
        if isinstance(run, Run):
            return run if run.database is self.database else self.find_run(run.run_id)
        return self.find_run(run)


def unique_names(names: Sequence[str]) -> list[str]:
    """Names of columns, each once: of `id` and `id` the second becomes `id_2`."""
    taken, unique = set(names), []
    for i, name in enumerate(names):
        number = names[:i].count(name) + 1
        while number > 1 and f"{name}_{number}" in taken:
            number += 1
        unique.append(name if number == 1 else f"{name}_{number}")
        taken.add(unique[-1])
    return unique


def _column(values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
        # Mixed JSON, numbers beyond 64 bits and the like: as the text a person would read.
        return pa.array(
            [None if v is None else v if isinstance(v, str) else json.dumps(v, default=str) for v in values]
        )
