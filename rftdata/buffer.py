"""The buffer: the object that roles, the command line and notebooks use.

It connects a database (embedded or on a server) with a segment store, and provides writers, attempts and queries. `rftdata.open` creates it.
Threads may share a `Buffer`; each process opens its own.
"""

from __future__ import annotations

import copy
from collections import abc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from psycopg.sql import Composable

from rftdata.archives.files import ArchiveFolder
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.sampling import SamplingConfig
from rftdata.config import BufferConfig
from rftdata.errors import PurgedError, QueryError
from rftdata.limits import (
    INT8,
    MAX_COUNT,
    check_integer,
    check_integers,
    check_kind,
    check_number,
    check_text,
    check_texts,
)
from rftdata.postgres.database import Database
from rftdata.postgres.embedded import EmbeddedServer
from rftdata.query.arrays import OnDamage
from rftdata.query.sql_result import sql_result
from rftdata.run import Run
from rftdata.runs import Runs
from rftdata.segments.base import SegmentStore
from rftdata.segments.codec import Array
from rftdata.segments.reader import SegmentReader
from rftdata.uri import redacted
from rftdata.writing.writer import Writer


class Buffer(Runs):
    """An open buffer; created by `rftdata.open`.

    Attributes:
        folder: the folder of an embedded buffer; None for one on a server.
    """

    def __init__(
        self, config: BufferConfig, database: Database, server: EmbeddedServer | None, segments: SegmentStore
    ) -> None:
        self.folder: Path | None = server.folder if server else None
        self._files = self.folder or Path(config.segments or ".").parent
        super().__init__(database, str(self.folder) if self.folder else redacted(config.uri), self._files / "runs")
        self.config = config
        self.server = server
        self.segments = segments
        self.reader = SegmentReader(database, segments)

    @property
    def archives(self) -> ArchiveFolder:
        """Folder with the Parquet files of archived runs: `archives` in the folder of an embedded buffer, else beside the segments."""
        owner = self.database.fetch("buffer_id")[0]["buffer_id"].hex[:12]
        return ArchiveFolder(self._files.resolve() / "archives", owner)

    def with_database(self, database: Database) -> Buffer:
        """Return the same buffer with other connections, such as those of another account. Closing it leaves the server to this one."""
        other = copy.copy(self)
        other.database, other.server = database, None
        other.reader = SegmentReader(database, self.segments)
        return other

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
        check_kind("the statement", query, (str, Composable), "a text")
        if isinstance(parameters, str | bytes) or not isinstance(parameters, abc.Sequence | abc.Mapping | None):
            check_kind("the parameters of the statement", parameters, (), "a list, a dictionary or None")
        return sql_result(self.database, query, parameters)

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
        behavior_logprobs, and if the query names them token_rewards, teacher_logprobs, step_reward, state_hash and turns; arrays of purged
        experiences are NULL. `turn` has a row for each turn. What archived runs no longer have in the database is read from their files. Only the
        columns, and by simple conditions only the rows, that the query needs are read, all as of one moment. Close the reader, or read it to its end,
        before the buffer is closed.

        Args:
            run: `experience` has only the experiences of this run.
            limit_bytes: a query that would read more, by the server's statistics and the sizes of the segments, is refused.
            on_damage: called with the error of each damaged segment, whose experiences are left out where arrays are read; None to raise it.

        Raises:
            QueryError: DuckDB rejected the query, it is not a single statement that returns rows, or it would read more than the limit.
            SegmentCorruptError: a segment cannot be served; names its experiences.
        """
        from rftdata.query.duckdb_query import run_query  # DuckDB and Arrow's datasets take 0.2 s to import

        check_text("the query", text)
        if limit_bytes is not None:
            check_integer("limit_bytes", limit_bytes)
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
                step_reward, state_hash and turns.
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

        check_texts("columns", columns)
        if where is not None:
            check_text("the condition", where)
        check_integers("share", share)
        if len(share) != 2:
            raise QueryError("share is not valid", value=share, allowed="an index and the number of shares")
        run_id = None if run is None else self._own(run).run_id
        return scan_experiences(
            self.database, self.segments, self.archives, columns, where, run_id=run_id, share=share, on_damage=on_damage
        )

    def writer(
        self, run: Run | str | int, *, max_rows: int = 2048, max_bytes: int = 128 * 2**20, linger_ms: float = 0.0
    ) -> Writer:
        """Return a writer of groups for a run; a context manager.

        Args:
            max_rows, max_bytes: limits of experiences and bytes beyond which a transaction takes no further groups.
            linger_ms: how long to wait for more groups before storing a smaller batch.
        """
        check_integer("max_rows", max_rows, (1, INT8[1]))
        check_integer("max_bytes", max_bytes, (1, INT8[1]))
        check_number("linger_ms", linger_ms)
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
        check_number("lease_s", lease_s)
        check_integer("max_refill", max_refill, (0, MAX_COUNT))
        check_texts("tasksets", tasksets)
        if sampling is not None:
            check_kind("sampling", sampling, SamplingConfig, "a SamplingConfig or None")
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
        check_integer("attempt_id", attempt_id)
        check_integer("max_refill", max_refill, (0, MAX_COUNT))
        return Attempt.join(self._own(run), self.reader, attempt_id, max_refill)

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
        check_integers("experience_ids", experience_ids)
        check_texts("columns", columns)
        if not columns:
            raise QueryError("no column is named", allowed="at least one array", todo="name one, such as token_ids")
        if purged not in ("refuse", "null"):
            raise QueryError("purged is not valid", value=purged, allowed="refuse or null")
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
        check_integers("experience_ids", experience_ids)
        check_text("the name of the array", name)
        return self.reader.arrays(self.reader.places(experience_ids), name)
