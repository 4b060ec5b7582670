"""The buffer: the object that roles, the command line and notebooks use.

It connects a database (embedded or on a server) with a segment store, and provides writers, attempts and queries. `rftdata.open` creates it.
Threads may share a `Buffer`; each process opens its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psycopg
import pyarrow as pa
from psycopg.rows import tuple_row
from psycopg.types.json import Jsonb

from rftdata.archives.files import ArchiveFolder
from rftdata.attempts import stored_selection
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.rewind import fork, rewind
from rftdata.attempts.sampling import SamplingConfig
from rftdata.attempts.stored_selection import Selection
from rftdata.config import BufferConfig
from rftdata.config_errors import did_you_mean
from rftdata.errors import PurgedError, QueryError
from rftdata.limits import check_integer, check_run_name
from rftdata.postgres.database import Database, Row, execute, fetch
from rftdata.postgres.embedded import EmbeddedServer
from rftdata.postgres.locks import holding
from rftdata.postgres.query_errors import query_error
from rftdata.query.arrays import OnDamage
from rftdata.run import Run, check_run_settings
from rftdata.segments.base import SegmentStore
from rftdata.segments.codec import Array
from rftdata.segments.reader import SegmentReader
from rftdata.uri import redacted
from rftdata.writing.writer import Writer

_MODES = ("both", "explore", "train")


class Buffer:
    """An open buffer; created by `rftdata.open`."""

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
        """Folder of an embedded buffer; None for one on a server."""
        return self.server.folder if self.server else None

    @property
    def location(self) -> str:
        """The value for the option `--buffer`, without password."""
        return str(self.server.folder) if self.server else redacted(self.config.uri)

    @property
    def runs_folder(self) -> Path:
        """Folder in which runs keep files other than experiences, each in its own folder (`Run.folder`)."""
        return (self.folder or Path(self.config.segments or ".").parent) / "runs"

    @property
    def archives(self) -> ArchiveFolder:
        """Folder with the Parquet files of archived runs: `archives` in the folder of an embedded buffer, else beside the segments."""
        owner = self.database.fetch("buffer_id")[0]["buffer_id"].hex[:12]
        return ArchiveFolder((self.folder or Path(self.config.segments or ".").parent).resolve() / "archives", owner)

    def close(self) -> None:
        """Close the connections; an embedded server that no other process uses stops after `buffer.idle_stop_s`."""
        self.database.close()
        if self.server is not None:
            self.server.release()

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def sql(self, query: str, parameters: Sequence[Any] | dict[str, Any] | None = None) -> pa.Table:
        """Return the result of a query as an Arrow table, empty for statements without one. The second of two columns `id` is `id_2`.

        Raises:
            QueryError: the database rejected the query; the message is the database's, with its hint.
        """
        with self.database.connection() as connection:
            cursor = connection.cursor(row_factory=tuple_row)  # not dictionaries, because two columns may have one name
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

    def query(
        self,
        text: str,
        *,
        run: Run | str | int | None = None,
        limit_bytes: int | None = None,
        on_damage: OnDamage | None = None,
    ) -> pa.RecordBatchReader:
        """Return the result of a DuckDB query over the tables, views and token arrays, as a stream; `read_all()` makes it a table.

        The tables are those of schema rft. `experience` has the columns of rft.v_experience and the arrays token_ids, loss_mask and
        behavior_logprobs, and if the query names them token_rewards, teacher_logprobs, step_reward and state_hash; arrays of purged
        experiences are NULL. What archived runs no longer have in the database is read from their files. Only the columns, and by simple
        conditions only the rows, that the query needs are read, all as of one moment. Close the reader, or read it to its end, before the buffer is closed.

        Args:
            run: `experience` has only the experiences of this run.
            limit_bytes: a query that would read more, by the server's statistics and the sizes of the segments, is refused.
            on_damage: called with the error of each damaged segment, whose experiences are left out where arrays are read; None to raise it.

        Raises:
            QueryError: DuckDB rejected the query, it is not a single statement that returns rows, or it would read more than the limit.
            SegmentCorruptError: a segment cannot be served; names its experiences.
        """
        from rftdata.query.duckdb_query import run_query  # DuckDB and Arrow's datasets take 0.2 s to import

        run_id = None if run is None else self._own(run).run_id
        return run_query(
            self.database,
            self.segments,
            self.archives,
            text,
            run_id=run_id,
            limit_bytes=limit_bytes,
            on_damage=on_damage,
        )

    def scan(
        self,
        columns: Sequence[str],
        where: str | None = None,
        *,
        run: Run | str | int | None = None,
        share: tuple[int, int] = (0, 1),
        on_damage: OnDamage | None = None,
    ) -> pa.RecordBatchReader:
        """Return experiences with their arrays as a stream of record batches, in ascending order of `experience_id`.

        Rows are those of one moment, and memory is bounded whatever their number. Of PostgreSQL and the segments only the named columns
        are read, and only the rows that meet the condition. What archived runs no longer have there is read from their files. Arrays are
        list columns; those of purged experiences are NULL. Close the reader, or read it to its end, before the buffer is closed.

        Args:
            columns: of rft.v_experience, and the arrays token_ids, loss_mask, behavior_logprobs, token_rewards, teacher_logprobs,
                step_reward and state_hash.
            where: a condition over rft.v_experience in PostgreSQL's SQL; None for all experiences.
            run: only the experiences of this run.
            share: index and number of shares, for several readers. Every experience is in exactly one share.
            on_damage: called with the error of each damaged segment, whose experiences are left out where arrays are read; None to raise it.

        Raises:
            QueryError: a column does not exist, or PostgreSQL rejected the condition.
            ArchivedError: the condition reads a text (prompt, response, messages, reward_parts, metrics, response_hash), and the run, or
                without `run` one of the buffer, is archived.
            ConfigError: there is no such share.
            SegmentCorruptError: a segment cannot be served; names its experiences.
        """
        from rftdata.query.experience_scan import scan_experiences  # Arrow's datasets and CSV take 0.1 s to import

        run_id = None if run is None else self._own(run).run_id
        return scan_experiences(
            self.database, self.segments, self.archives, columns, where, run_id=run_id, share=share, on_damage=on_damage
        )

    def create_run(
        self,
        *,
        name: str,
        config: dict[str, Any],
        seed: int,
        steps: int,
        pipeline_version: str,
        mode: str = "both",
        selected: Selection | None = None,
        epochs: int = 1,
        parent: Run | None = None,
    ) -> Run:
        """Store a new run; a number is appended to a name that is taken.

        Args:
            selected: the rows that the run trains on instead of its own groups, from `rftdata.attempts.stored_selection.select`.
            epochs: number of times each of these rows is drawn.
            parent: the run from whose checkpoint the new one starts, as its next stage.

        Raises:
            QueryError: the name, seed, number of steps or configuration cannot be stored.
        """
        check_run_name(name)
        check_integer("the seed of a run", seed)
        check_run_settings(config, steps, pipeline_version)
        if mode not in _MODES:
            raise QueryError("the mode of a run is unknown", value=mode, allowed=", ".join(_MODES))
        with self.database.transaction() as connection:
            execute(connection, "lock_run_names")
            row = fetch(
                connection,
                "insert_run",
                name=name,
                mode=mode,
                config=Jsonb(config),
                seed=seed,
                planned_steps=steps,
                pipeline_version=pipeline_version,
                parent_run_id=parent.run_id if parent else None,
            )[0]
            if selected is not None:
                row = stored_selection.store(connection, row["run_id"], selected, epochs)
        return self._run(row)

    def find_run(self, name_or_id: str | int | None = None) -> Run:
        """Return a run by name or id; a string may be either, None is the newest run.

        Raises:
            QueryError: the run does not exist; the message suggests the nearest names.
        """
        if name_or_id is None:
            rows = self._fetch_runs(limit=1)
        else:
            rows = self.database.fetch("find_run", run=str(name_or_id), by_name=isinstance(name_or_id, str))
        if rows:
            return self._run(rows[0])
        names = [str(row["name"]) for row in self.database.fetch("run_names")]
        if not names:
            raise QueryError(f"the buffer {self.location} contains no run", todo="start one with `rft run CONFIG`")
        raise QueryError(
            f"the buffer {self.location} contains no such run",
            value=name_or_id,
            allowed=", ".join(names),
            todo=did_you_mean(str(name_or_id), names, "name one of these, or another buffer with --buffer"),
        )

    def runs(self, name: str | None = None, *, imported: bool = True, at_work: bool = False) -> list[Run]:
        """Return the runs, newest first.

        Args:
            name: only those of this configured name, which a number may follow in their own names.
            imported: also those that an import created.
            at_work: only those with a live process.
        """
        return [self._run(row) for row in self._fetch_runs(name, imported=imported, at_work=at_work)]

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Lock out other processes that look for a run and create a missing one."""
        with holding(self.database, "join", wait_s=math.inf):
            yield

    def writer(
        self, run: Run | str | int, *, max_rows: int = 2048, max_bytes: int = 128 * 2**20, linger_ms: float = 0.0
    ) -> Writer:
        """Return a writer of groups for a run; a context manager.

        Args:
            max_rows, max_bytes: limits of experiences and bytes beyond which a transaction takes no further groups.
            linger_ms: how long to wait for more groups before storing a smaller batch.
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
        self,
        run: Run | str | int,
        *,
        lease_s: float = 30.0,
        sampling: SamplingConfig | None = None,
        max_refill: int = 0,
        tasksets: Sequence[str] = (),
    ) -> Attempt:
        """Start training a run, or continue from its last checkpoint; holds the run's lease until closed.

        Args:
            lease_s: seconds of silence after which this trainer may be replaced.
            sampling: how batches are drawn; None for first in first out, each group once.
            max_refill: number of groups that the planner may add to a step in place of dropped ones.
            tasksets: names of the run's tasksets, for `sampling.stratify`.

        Raises:
            FencedError: another live process trains the run.
            ConfigError: the priority formula is not a valid expression.
        """
        return Attempt.start(self._own(run), self.reader, lease_s, sampling or SamplingConfig(), max_refill, tasksets)

    def join_attempt(self, run: Run | str | int, attempt_id: int, *, max_refill: int = 0) -> Attempt:
        """Join an attempt that another process holds, as a further rank of its trainer, which draws its share of each step.

        Only the holder keeps the lease. If the holder is replaced, this process is fenced too.

        Args:
            attempt_id: of the holder's `Attempt`, which the holder broadcasts to its ranks.
            max_refill: the holder's value.

        Raises:
            FencedError: the attempt does not hold the run.
        """
        return Attempt.join(self._own(run), self.reader, attempt_id, max_refill)

    def rewind(self, run: Run | str | int, step: int, *, keep_rollouts: bool = False) -> None:
        """Take a run back to the checkpoint of an earlier step, from which its next trainer continues.

        Groups planned since then stay stored but are no longer used. Task statistics and selectors are reset to that step. Labels stay
        as they are.

        Args:
            step: a trainer step with a kept checkpoint, or 0 for the initial weights.
            keep_rollouts: undo only the draws, so that every group unused by the remaining steps can be drawn.

        Raises:
            ConfigError: there is no such checkpoint.
            FencedError: a live process trains the run.
        """
        rewind(self._own(run), step, keep_rollouts=keep_rollouts)

    def fork(
        self,
        run: Run | str | int,
        *,
        name: str,
        step: int | None = None,
        keep_rollouts: bool = False,
        config: dict[str, Any] | None = None,
        steps: int | None = None,
        pipeline_version: str | None = None,
    ) -> Run:
        """Create a run that continues from a step of another run, which is not changed.

        Groups that the history up to the step did not draw are copied, and the new run's pipeline decides on them. Copies share the
        arrays, and each experience has its origin in `parent_id`.

        Args:
            name: of the new run; a number is appended if it is taken.
            step: a trainer step with a kept checkpoint, 0 for the initial weights, None for the newest.
            keep_rollouts: also copy the groups planned after the step.
            config, steps, pipeline_version: of the new run; None for those of the old one.

        Raises:
            ConfigError: there is no such checkpoint.
            QueryError: the name, number of steps or configuration cannot be stored.
        """
        check_run_name(name)
        parent = self._own(run).refreshed()
        check_run_settings(
            parent.config if config is None else config,
            parent.planned_steps if steps is None else steps,
            pipeline_version or parent.pipeline_version,
        )
        new = {
            "name": name,
            "mode": parent.mode,
            "config": Jsonb(parent.config if config is None else config),
            "seed": parent.seed,
            "planned_steps": parent.planned_steps if steps is None else steps,
            "pipeline_version": pipeline_version or parent.pipeline_version,
        }
        row = fork(parent, new, step, keep_rollouts=keep_rollouts)
        return self._run(row)

    def read_arrays(
        self, experience_ids: Sequence[int], columns: Sequence[str], *, purged: Literal["refuse", "null"] = "refuse"
    ) -> pa.Table:
        """Return token arrays of experiences, in the given order: experience_id and the named list columns.

        Args:
            purged: what to do if the arrays were purged.

        Raises:
            QueryError: an experience does not exist, or none of them has such an array.
            PurgedError: the arrays of an experience were purged.
            ArchivedError: the run of an experience is archived.
        """
        places = self.reader.places(experience_ids)
        if purged == "refuse":
            for i in self.reader.purged(places):
                raise PurgedError(
                    f"the arrays of experience {experience_ids[i]} were purged",
                    todo="leave it out; rft.v_purged lists them all",
                )
        table = self.reader.take(places, columns)
        return table.add_column(0, "experience_id", pa.array(np.asarray(experience_ids, dtype=np.int64)))

    def arrays(self, experience_ids: Sequence[int], name: str) -> list[Array | None]:
        """Return one array of each experience in its own shape; None if it has none, or it was purged.

        The arrays are views of the mapped files, not copies: use them within an hour, after which bytes of purged rows are overwritten.

        Raises:
            QueryError: an experience does not exist.
        """
        return self.reader.arrays(self.reader.places(experience_ids), name)

    def _fetch_runs(
        self, name: str | None = None, *, imported: bool = True, at_work: bool = False, limit: int | None = None
    ) -> list[Row]:
        return self.database.fetch("runs", name=name, imported=imported, at_work=at_work, limit=limit)

    def _run(self, row: Row) -> Run:
        return Run.of_row(self.database, self.runs_folder, row)

    def _own(self, run: Run | str | int) -> Run:
        """Return a run with this buffer's database, for a name, an id or another buffer's run."""
        if isinstance(run, Run):
            return run if run.database is self.database else self.find_run(run.run_id)
        return self.find_run(run)


def unique_names(names: Sequence[str]) -> list[str]:
    """Return unique names of columns: the second of two columns `id` becomes `id_2`."""
    taken, unique = set(names), []
    for i, name in enumerate(names):
        number = names[:i].count(name) + 1
        while number > 1 and f"{name}_{number}" in taken:
            number += 1
        unique.append(name if number == 1 else f"{name}_{number}")
        taken.add(unique[-1])
    return unique


def _column(values: list[Any]) -> pa.Array:
    # Arrow takes nine times as long to find out that texts are texts.
    first = next((value for value in values if value is not None), None)
    try:
        return pa.array(values, pa.string() if isinstance(first, str) else None)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
        # Mixed JSON, numbers beyond 64 bits and similar values are returned as text.
        return pa.array(
            [None if v is None else v if isinstance(v, str) else json.dumps(v, default=str) for v in values]
        )
