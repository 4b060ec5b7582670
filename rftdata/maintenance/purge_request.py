"""What `rft purge` was asked for, in one order: purge, vacuum, overwrite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rftdata.buffer import Buffer
from rftdata.errors import QueryError
from rftdata.maintenance.erasure import ErasureResult, erase, vacuum
from rftdata.maintenance.purge import PurgeResult, purge


@dataclass(frozen=True)
class PurgeRequest:
    """What to purge, and how thoroughly.

    Attributes:
        where: condition over `rft.v_experience`; None to overwrite only the bytes of earlier purges.
        reason, author: stored permanently.
        runs: the condition holds for these only; empty for all.
        tasks_too: also empty the tasks of these experiences.
        dry_run: change nothing.
        rewrite_tables: leave no byte of the texts in the files of the tables.
        erase_now: overwrite bytes at once, see `rftdata.maintenance.erasure.erase`.
    """

    where: str | None
    reason: str
    author: str
    runs: Sequence[str] = ()
    tasks_too: bool = False
    dry_run: bool = False
    rewrite_tables: bool = False
    erase_now: bool = False


@dataclass(frozen=True)
class PurgeSummary:
    """What a request did.

    Attributes:
        purged: None without a condition.
        erased: None of a dry run.
    """

    purged: PurgeResult | None
    num_tables_rewritten: int
    erased: ErasureResult | None


def check_options(where: str | None, reason: str | None, *, erase_only: bool) -> None:
    """Refuse a purge without a condition and a reason, and one with a condition that only overwrites earlier ones.

    Raises:
        QueryError: the options contradict each other.
    """
    if erase_only == (where is not None) or (where is not None and reason is None):
        raise QueryError("rft purge needs a condition and a reason", allowed="--where SQL --reason TEXT, or --erase")


def execute(buffer: Buffer, request: PurgeRequest) -> PurgeSummary:
    """Purge, vacuum the tables if a text was purged, and overwrite bytes of earlier purges that are due.

    Raises:
        RftError: see `purge` and `erase`.
    """
    purged = None
    if request.where is not None:
        purged = purge(
            buffer,
            request.where,
            reason=request.reason,
            author=request.author,
            runs=request.runs,
            tasks_too=request.tasks_too,
            dry_run=request.dry_run,
        )
    if request.dry_run:
        return PurgeSummary(purged, 0, None)
    num_rewritten = 0
    if request.rewrite_tables or (purged is not None and (purged.num_experiences or purged.num_unanswered_tasks)):
        num_rewritten = vacuum(buffer, rewrite=request.rewrite_tables)
    return PurgeSummary(purged, num_rewritten, erase(buffer, now=request.erase_now))
