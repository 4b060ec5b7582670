"""Decide on a batch on which a stage raises: find the failing rows, set them aside, and decide on the others.

A batch consists of units that belong together: groups of experiences, or tasks. When a stage raises, a few units are tried alone,
and if none succeeds, some of their rows. If no row succeeds either, the stage counts as broken (a server that does not respond, a full
disk): nothing is decided, and the caller tries again later. Otherwise the batch is halved until the failing units are found. The rows of
a failing unit are tried one by one. Those that fail alone are set aside, dropped with the error as their reason, and the rest of the
unit is decided without them. A unit that fails only as a whole is set aside as a whole.

Tasks that are set aside are decided again when their set is loaded again. Large batches of them are therefore not searched row by row:
a part is set aside whole when all the samples of it that are tried alone fail.

Where stages compare all rows of a batch, the batch is one unit, and its failing rows are searched by halves.

When a stage exceeds its time limit and names its current row, that row is set aside at once, since every further try would take the
limit again. For the same reason fewer units are tried alone before such a stage counts as broken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from operators.base import StageOutcome, UnavailableError
from operators.chain.chain import Chain
from operators.chain.stage import Stage, StageError
from operators.groups import Ints
from rftdata.errors import time_limit_behind
from rftdata.pipeline.records import Verdicts, dropped
from rftdata.pipeline.scores import StoredScores, remember

_PROBES = 8
_FEW_PROBES = 3
"""Units that are tried alone. `_FEW_PROBES` applies where each unit brings several rows to try, or each try may take a time limit."""
_NUM_LATE_FIRST = 3
"""Number of consecutive rows set aside because a stage exceeds its limit on the first row of the rest; after that it may exceed it on all."""


class Recorder(Protocol):
    """Records what stages change, for callers that need more than decisions."""

    def start(self) -> None:
        """Start a run. What was recorded since the last `keep` belongs to a failed run."""

    def watch(self, stage: Stage, before: pa.Table, after: pa.Table, outcome: StageOutcome) -> None:
        """Record the outcome of a stage; see `operators.chain.chain.Watch`."""

    def keep(self, verdicts: Verdicts) -> None:
        """Keep what was recorded, because the run succeeded."""


def decide_despite_failures(
    chain: Chain,
    table: pa.Table,
    stored_scores: StoredScores | None = None,
    *,
    patient: bool = False,
    as_whole: bool = False,
    min_group_size: int | None = None,
    retried: bool = False,
    recorder: Recorder | None = None,
) -> Verdicts:
    """Decide on every row of a batch, even if stages raise on some of them.

    Args:
        table: whole units by group_id.
        stored_scores: computed in earlier calls, and not computed again.
        patient: raise if a stage fails on everything that is tried, instead of setting all rows aside.
        as_whole: stages compare all rows, so they are decided together.
        min_group_size: overrides the chain's value.
        retried: rows set aside are decided again later; an unavailable stage then ends the call at once.
        recorder: called with what stages do.

    Raises:
        StageError: with `patient`, the stage's error; with `as_whole`, the error of a batch in which no row fails alone; with `retried`,
            the error of an unavailable stage.
    """
    return _Isolator(chain, stored_scores or {}, min_group_size, retried, recorder).decide(table, patient, as_whole)


class _Isolator:
    def __init__(
        self,
        chain: Chain,
        stored_scores: StoredScores,
        min_group_size: int | None,
        retried: bool,
        recorder: Recorder | None,
    ) -> None:
        self._chain = chain
        self._stored_scores = {key: dict(scores) for key, scores in stored_scores.items()}
        self._min_group_size = min_group_size
        self._retried = retried
        self._recorder = recorder
        self._found = Verdicts()

    def decide(self, table: pa.Table, patient: bool, as_whole: bool) -> Verdicts:
        first = error = self._try(table)
        rest, error = self._without_late_rows(table, error) if error is not None else (table, None)
        if patient and first is not None and error is None and not self._has_passed(first) and self._error_of(rest):
            raise first from first.__cause__  # no row succeeded: the rest of the groups was dropped before the stage
        if error is not None:
            if patient and not self._any_passes(rest, error):
                raise error from error.__cause__
            if as_whole:
                self._decide_whole(rest, error)
            else:
                self._decide_parts(rest, error)
        return self._found

    def _try(self, table: pa.Table) -> StageError | None:
        """Decide on a part of the batch; return the error if it fails."""
        watch = None
        if self._recorder is not None:
            self._recorder.start()
            watch = self._recorder.watch
        try:
            verdicts = self._chain.run(table, self._min_group_size, stored_scores=self._stored_scores, watch=watch)
        except StageError as error:
            # Keep the scores, so that no later try computes them again.
            self._found.scores += error.scores
            remember(self._stored_scores, error.scores)
            return self._checked(error)
        self._found.add(verdicts)
        remember(self._stored_scores, verdicts.scores)
        if self._recorder is not None:
            self._recorder.keep(verdicts)
        return None

    def _error_of(self, table: pa.Table, min_group_size: int | None = 1) -> StageError | None:
        """Try a part without deciding on it; return its error."""
        try:
            self._chain.run(table, min_group_size, stored_scores=self._stored_scores)
        except StageError as error:
            return self._checked(error)
        return None

    def _checked(self, error: StageError) -> StageError:
        if self._retried and isinstance(error.__cause__, UnavailableError):
            raise error from error.__cause__  # no single row is the cause
        return error

    def _set_aside(self, table: pa.Table, error: StageError) -> None:
        """Drop rows for good; what earlier stages did with them is counted."""
        self._found.stages += error.stages
        self._set_rows_aside(table, error)

    def _set_rows_aside(self, table: pa.Table, error: StageError) -> None:
        """Drop rows of a table whose other rows run through the stages again and are counted then."""
        self._record(error)
        stage = error.run.stage if error.run else "chain"
        self._found.failed.update(table["experience_id"].to_pylist())
        self._found.add(Verdicts(dropped(table, stage, error.reason)))

    def _record(self, error: StageError) -> None:
        """Record the failure of a part that is retried in smaller parts. Other stages are recorded with those, so rows count once."""
        self._found.stages += [error.run] if error.run else []

    def _without_late_rows(self, table: pa.Table, error: StageError | None) -> tuple[pa.Table, StageError | None]:
        """Set aside, one after the other, the rows on which a stage exceeds its time limit, and decide on the rest.

        Returns:
            the undecided rows and the error, if a stage fails otherwise, or on the first row each time, so that it may fail on all.
        """
        num_first = 0
        while error is not None and (row := _late_row(table, error)) is not None and num_first < _NUM_LATE_FIRST:
            limit = time_limit_behind(error)
            num_first = 0 if limit is not None and limit.num_done else num_first + 1
            if table.num_rows == 1 and num_first:
                break
            self._set_rows_aside(table.slice(row, 1), error)
            table = pa.concat_tables([table.slice(0, row), table.slice(row + 1)]).combine_chunks()
            if not table.num_rows:
                return table, None
            error = self._try(table)
        return table, error

    def _has_passed(self, error: StageError) -> bool:
        """Return whether any row got through the failed stage."""
        return error.run is None or any(
            run.index == error.run.index and run.error is None and run.rows_in for run in self._found.stages
        )

    def _any_passes(self, table: pa.Table, error: StageError) -> bool:
        """Return whether one of a few units succeeds alone, or one of their rows (every unit may have a failing row)."""
        units = _units(table)
        is_late = time_limit_behind(error) is not None
        probes = _PROBES if len(units) == table.num_rows and not is_late else _FEW_PROBES
        if not is_late and len(units) == table.num_rows <= 2 * _PROBES:
            probes = len(units)
        tried = units[np.unique(np.linspace(0, len(units) - 1, probes).astype(int))]
        parts = [_of(table, unit) for unit in tried]
        if len(units) > 1 and any(self._error_of(part, self._min_group_size) is None for part in parts):
            return True
        if len(units) == table.num_rows > 1:
            return False  # their rows were tried
        rows = [part.slice(row, 1) for part in parts for row in range(1 if is_late else part.num_rows)]
        return any(self._error_of(row) is None for row in rows)

    def _is_long(self, table: pa.Table) -> bool:
        """Return whether the table is too long to try every row when some fail alone."""
        return self._retried and bool(table.num_rows > 2 * _PROBES)

    def _decide_parts(self, table: pa.Table, error: StageError) -> None:
        """Decide on the two halves of a failed part, or on a single unit without its failing rows."""
        units = _units(table)
        if len(units) == 1:
            self._decide_unit(table, error)
        elif self._is_long(table) and not self._any_passes(table, error):
            self._set_aside(table, error)
        else:
            self._record(error)
            for half in np.array_split(units, 2):
                part = _of(table, half)
                failure = self._try(part)
                if failure is not None:
                    self._decide_parts(part, failure)

    def _decide_unit(self, table: pa.Table, error: StageError) -> None:
        """Decide on a failing unit without the rows that fail alone; set it aside whole if there are none."""
        culprits = list(self._culprits(table, error)) if table.num_rows > 1 else []
        rest = _without(table, culprits)
        if rest.num_rows in (0, table.num_rows):
            self._set_aside(table, error)
            return
        failure = self._try(rest)
        if failure is not None:
            self._set_aside(rest, failure)
        for part, part_error in culprits:
            self._set_aside(part, part_error)

    def _decide_whole(self, table: pa.Table, error: StageError) -> None:
        """Decide on rows that are compared with one another, without those that fail alone.

        Raises:
            StageError: the remaining rows fail as well.
        """
        culprits = list(self._culprits(table, error))
        for part, part_error in culprits:
            self._set_aside(part, part_error)
        rest = _without(table, culprits)
        failure = self._try(rest) if rest.num_rows else None
        if failure is not None:
            raise failure from failure.__cause__

    def _culprits(self, table: pa.Table, error: StageError) -> Iterator[tuple[pa.Table, StageError]]:
        """Yield the rows on which a stage raises even when they are alone, in parts that share an error."""
        alone = self._error_of(table)
        if alone is None:
            return
        if table.num_rows == 1 or (self._is_long(table) and not self._any_passes(table, error)):
            yield table, alone
            return
        half = table.num_rows // 2
        yield from self._culprits(table.slice(0, half).combine_chunks(), alone)
        yield from self._culprits(table.slice(half).combine_chunks(), alone)


def _late_row(table: pa.Table, error: StageError) -> int | None:
    """Return the row on which a stage exceeded its time limit, if stored_scores."""
    limit = time_limit_behind(error)
    if limit is None or limit.subject is None:
        return None
    row: int = pc.index(table["experience_id"], pa.scalar(limit.subject, pa.int64())).as_py()
    return row if row >= 0 else None


def _units(table: pa.Table) -> Ints:
    """Return the ids of the units, ascending."""
    return np.unique(table["group_id"].to_numpy())


def _of(table: pa.Table, units: Ints | int) -> pa.Table:
    return table.filter(pc.is_in(table["group_id"], pa.array(np.atleast_1d(units), pa.int64()))).combine_chunks()


def _without(table: pa.Table, culprits: list[tuple[pa.Table, StageError]]) -> pa.Table:
    ids = pa.chunked_array([part["experience_id"].combine_chunks() for part, _ in culprits] or [[]], pa.int64())
    return table.filter(pc.invert(pc.is_in(table["experience_id"], ids.combine_chunks()))).combine_chunks()
