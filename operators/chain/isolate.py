"""Deciding on a batch on which a stage raises: the rows that do it are found and set aside, and the others are decided on without them.

A batch consists of units that belong together: groups of experiences, or tasks. When a stage raises, a few units are tried by themselves,
and if none passes, some of their rows. If no row passes either, the stage is taken to be broken (a server that is away, a full disk):
nothing is decided, and the caller tries again later. Otherwise the batch is halved until the units are found that do it. In a unit that
fails alone its rows are tried one by one: those that fail alone are set aside, dropped with the error as their reason, and the rest of
the unit is decided on without them. A unit that fails only as a whole is set aside as a whole.

Where rows that are set aside are decided on again later, as tasks are when their set is loaded again, not each of many rows is asked
about in vain: a part of which some that are tried alone all fail is set aside as a whole.

Where stages compare all rows of a batch, it is one unit, and the rows that fail alone are looked for by halves.

Where a stage exceeds its time limit and names the row at which it was, that row is set aside at once: to look for it would take the
limit again and again. For the same reason fewer units are tried alone before a stage that exceeds its limit is taken to be broken.
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
from rftdata.pipeline.records import Known, Verdicts, dropped, remember

_PROBES = 8
_FEW_PROBES = 3
"""Units that are tried by themselves: fewer where each brings several rows to try, or where each try may take a time limit."""
_NUM_LATE_FIRST = 3
"""So many rows are set aside though a stage exceeds its limit on the first of what is left; then it may do so on all."""


class Recorder(Protocol):
    """Notes what stages change, for callers that need more than decisions."""

    def start(self) -> None:
        """A pass begins; what was noted since the last `keep` belongs to a pass that failed."""

    def watch(self, stage: Stage, before: pa.Table, after: pa.Table, outcome: StageOutcome) -> None:
        """See `operators.chain.chain.Watch`."""

    def keep(self, verdicts: Verdicts) -> None:
        """The pass decided."""


def decide(
    chain: Chain, table: pa.Table, known: Known | None = None, *, patient: bool = False, as_whole: bool = False,
    min_group_size: int | None = None, retried: bool = False, recorder: Recorder | None = None,
) -> Verdicts:  # fmt: skip
    """Verdicts on every row of a batch, whatever stages raise on some of them.

    Args:
        table: whole units by group_id.
        known: scores that are stored already.
        patient: raise where a stage fails on everything that is tried, rather than set everything aside.
        as_whole: stages compare all rows: they are decided on together.
        min_group_size: overrides the chain's own.
        retried: what is set aside is decided on again later; a stage that is unavailable then ends the call at once.
        recorder: is shown what stages do.

    Raises:
        StageError: with `patient`, the stage's error; with `as_whole` that of a batch of which no row fails alone; with `retried` that
            of a stage that is unavailable.
    """
    return _Isolator(chain, known or {}, min_group_size, retried, recorder).decide(table, patient, as_whole)


class _Isolator:
    def __init__(
        self, chain: Chain, known: Known, min_group_size: int | None, retried: bool, recorder: Recorder | None
    ) -> None:
        self._chain = chain
        self._known = {key: dict(scores) for key, scores in known.items()}
        self._min_group_size = min_group_size
        self._retried = retried
        self._recorder = recorder
        self._found = Verdicts()

    def decide(self, table: pa.Table, patient: bool, as_whole: bool) -> Verdicts:
        first = error = self._try(table)
        rest, error = self._without_late_rows(table, error) if error is not None else (table, None)
        if patient and first is not None and error is None and not self._has_passed(first) and self._error_of(rest):
            raise first from first.__cause__  # no row passed: what was left of the groups was dropped before the stage
        if error is not None:
            if patient and not self._any_passes(rest, error):
                raise error from error.__cause__
            if as_whole:
                self._decide_whole(rest, error)
            else:
                self._decide_parts(rest, error)
        return self._found

    def _try(self, table: pa.Table) -> StageError | None:
        """Decide on a part of the batch; the error where that fails."""
        watch = None
        if self._recorder is not None:
            self._recorder.start()
            watch = self._recorder.watch
        try:
            verdicts = self._chain.run(table, self._min_group_size, known=self._known, watch=watch)
        except StageError as error:
            # No later pass computes them again.
            self._found.scores += error.scores
            remember(self._known, error.scores)
            return self._checked(error)
        self._found.add(verdicts)
        remember(self._known, verdicts.scores)
        if self._recorder is not None:
            self._recorder.keep(verdicts)
        return None

    def _error_of(self, table: pa.Table, min_group_size: int | None = 1) -> StageError | None:
        """The error of a part that is only tried."""
        try:
            self._chain.run(table, min_group_size, known=self._known)
        except StageError as error:
            return self._checked(error)
        return None

    def _checked(self, error: StageError) -> StageError:
        if self._retried and isinstance(error.__cause__, UnavailableError):
            raise error from error.__cause__  # no row does it
        return error

    def _set_aside(self, table: pa.Table, error: StageError) -> None:
        """Drop rows for good; what the stages before did with them counts."""
        self._found.stages += error.stages
        self._set_rows_aside(table, error)

    def _set_rows_aside(self, table: pa.Table, error: StageError) -> None:
        """Drop rows of a table whose other rows pass the stages again, and are counted then."""
        self._note(error)
        stage = error.run.stage if error.run else "chain"
        self._found.failed.update(table["experience_id"].to_pylist())
        self._found.add(Verdicts(dropped(table, stage, error.reason)))

    def _note(self, error: StageError) -> None:
        """Note the failure of what is tried again in parts. What other stages did is noted with the parts: rows count once."""
        self._found.stages += [error.run] if error.run else []

    def _without_late_rows(self, table: pa.Table, error: StageError | None) -> tuple[pa.Table, StageError | None]:
        """Set aside the rows at which a stage exceeds its time limit, one after the other, and decide on the others.

        Returns:
            What is not decided on, and the error: where a stage fails otherwise, or on the first row each time, so that it may fail on all.
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
        """Whether any row got through the stage that failed."""
        return error.run is None or any(
            run.index == error.run.index and run.error is None and run.rows_in for run in self._found.stages
        )

    def _any_passes(self, table: pa.Table, error: StageError) -> bool:
        """Whether one of a few units gets through by itself, or one of their rows: every unit may have a row that fails."""
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
        """Whether not each of the rows is asked about where some fail alone."""
        return self._retried and bool(table.num_rows > 2 * _PROBES)

    def _decide_parts(self, table: pa.Table, error: StageError) -> None:
        """Decide on the two halves of what failed, or on a unit without the rows that do it."""
        units = _units(table)
        if len(units) == 1:
            self._decide_unit(table, error)
        elif self._is_long(table) and not self._any_passes(table, error):
            self._set_aside(table, error)
        else:
            self._note(error)
            for half in np.array_split(units, 2):
                part = _of(table, half)
                failure = self._try(part)
                if failure is not None:
                    self._decide_parts(part, failure)

    def _decide_unit(self, table: pa.Table, error: StageError) -> None:
        """Decide on a unit that fails: without the rows that fail alone, or else not at all."""
        culprits = list(self._culprits(table, error)) if table.num_rows > 1 else []
        rest = _without(table, culprits)
        if rest.num_rows in (0, table.num_rows):
            self._set_aside(table, error)
            return
        failure = self._try(rest)
        if failure is not None:
            self._set_aside(rest, failure)
        for part, found in culprits:
            self._set_aside(part, found)

    def _decide_whole(self, table: pa.Table, error: StageError) -> None:
        """Decide on rows that are compared with one another, without those that fail alone.

        Raises:
            StageError: they fail without them, too.
        """
        culprits = list(self._culprits(table, error))
        for part, found in culprits:
            self._set_aside(part, found)
        rest = _without(table, culprits)
        failure = self._try(rest) if rest.num_rows else None
        if failure is not None:
            raise failure from failure.__cause__

    def _culprits(self, table: pa.Table, error: StageError) -> Iterator[tuple[pa.Table, StageError]]:
        """Rows on which a stage raises though there is no other, in parts with one error."""
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
    """The row at which a stage exceeded its time limit, where that is known."""
    limit = time_limit_behind(error)
    if limit is None or limit.subject is None:
        return None
    row: int = pc.index(table["experience_id"], pa.scalar(limit.subject, pa.int64())).as_py()
    return row if row >= 0 else None


def _units(table: pa.Table) -> Ints:
    """Ids of the units, ascending."""
    return np.unique(table["group_id"].to_numpy())


def _of(table: pa.Table, units: Ints | int) -> pa.Table:
    return table.filter(pc.is_in(table["group_id"], pa.array(np.atleast_1d(units), pa.int64()))).combine_chunks()


def _without(table: pa.Table, culprits: list[tuple[pa.Table, StageError]]) -> pa.Table:
    ids = pa.chunked_array([part["experience_id"].combine_chunks() for part, _ in culprits] or [[]], pa.int64())
    return table.filter(pc.invert(pc.is_in(table["experience_id"], ids.combine_chunks()))).combine_chunks()
