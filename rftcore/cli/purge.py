"""`rft purge`: permanent removal of texts and arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from rftcore.cli.session import BufferOption, JsonOption, author, opened

if TYPE_CHECKING:
    from rftdata.maintenance.erasure import ErasureResult
    from rftdata.maintenance.purge import PurgeResult
    from rftdata.maintenance.purge_request import PurgeSummary


def purge(
    where: Annotated[
        str | None,
        typer.Option(
            "--where", metavar="SQL", help="Purge experiences that meet this condition over rft.v_experience."
        ),
    ] = None,
    reason: Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Reason, stored permanently.")] = None,
    run: Annotated[list[str] | None, typer.Option("--run", metavar="RUN", help="Only this run; repeatable.")] = None,
    with_tasks: Annotated[
        bool, typer.Option("--with-tasks", help="Also empty their tasks and the answers to these in evaluations.")
    ] = False,
    erase: Annotated[
        bool, typer.Option("--erase", help="Purge nothing; only overwrite bytes of earlier purges that are due.")
    ] = False,
    now: Annotated[
        bool,
        typer.Option("--now", help="Overwrite the old bytes at once; refused while other sessions use the buffer."),
    ] = False,
    rewrite_tables: Annotated[
        bool,
        typer.Option("--rewrite-tables", help="Leave no byte of the texts in the tables' files; locks them meanwhile."),
    ] = False,
    by: Annotated[
        str | None,
        typer.Option("--author", envvar="RFT_AUTHOR", help="Author of the purge; your login name by default."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be purged, and purge nothing.")] = False,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove texts and arrays of experiences permanently, by a condition; `rft retention` does so by age, number and size.

    Ids, counts, rewards and lineage stay, with a record of the author and the reason.
    Queries, batches and exports no longer see the texts and arrays, and their groups are never drawn again. The bytes of the arrays are
    overwritten an hour later, when no reader can map them, by the next rft purge or rft retention; --now does not wait.
    Backups and the write-ahead log keep their contents until they are replaced.
    """
    from rftcore.cli.output import print_json
    from rftdata.maintenance import purge_request

    purge_request.check_options(where, reason, erase_only=erase)
    request = purge_request.PurgeRequest(
        where,
        reason or "",
        by or author(),
        runs=run or (),
        tasks_too=with_tasks,
        dry_run=dry_run,
        rewrite_tables=rewrite_tables,
        erase_now=now,
    )
    with opened(uri, "rft purge", schema="check" if dry_run else "migrate") as buffer:
        done = purge_request.execute(buffer, request)
    if as_json:
        purged, erased = done.purged and asdict(done.purged), done.erased and asdict(done.erased)
        print_json({"purge": purged, "erased": erased, "num_tables_rewritten": done.num_tables_rewritten})
    else:
        _print_summary(done, dry_run)


def _print_summary(done: PurgeSummary, dry_run: bool) -> None:
    if done.purged is not None:
        _print_purged(done.purged, dry_run)
    if done.num_tables_rewritten:
        rewritten = f"{done.num_tables_rewritten} tables with texts were rewritten"
        print(f"{rewritten}: no byte of purged texts is left in their files")
    if done.erased is not None:
        _print_erased(done.erased)


def _print_purged(done: PurgeResult, dry_run: bool) -> None:
    before = f", {done.num_purged_before} were purged before" if done.num_purged_before else ""
    which = f" (purge {done.purge_id})" if done.purge_id is not None else ""
    print(f"{done.num_experiences} experiences {'would be ' if dry_run else ''}purged{before}{which}")
    if done.num_unanswered_tasks:
        print(f"{done.num_unanswered_tasks} tasks without an experience {'would be' if dry_run else 'were'} purged too")
    if done.num_tasks:
        print(f"{done.num_tasks} of their tasks still have a prompt: --with-tasks also empties those")
    if done.made_experiences:
        print(f"experiences created from them keep their texts: {_first_ids(done.made_experiences)}")
    if done.made_tasks:
        print(f"tasks created from them keep their texts: {_first_ids(done.made_tasks)}")


def _first_ids(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids[:20])) + (f" and {len(ids) - 20} more" if len(ids) > 20 else "")


def _print_erased(erased: ErasureResult) -> None:
    if erased.num_ranges:
        print(f"{erased.num_bytes} bytes of purged arrays are overwritten")
    if erased.num_ranges_left:
        print(
            f"{erased.num_bytes_left} bytes of purged arrays wait until no reader can map them:"
            " `rft purge --erase` in an hour, or with --now when no other session uses the buffer"
        )
