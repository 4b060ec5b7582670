"""`rft archive` and `rft restore-run`: finished runs in Parquet files."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from rftcore.cli.session import BufferOption, JsonOption, author, opened

_MIB = 2**20


def archive(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or id of a run that has ended.")],
    rewrite_tables: Annotated[
        bool,
        typer.Option(
            "--rewrite-tables",
            help="Give the freed space of the tables back to the disk; locks them meanwhile. Otherwise new rows use it.",
        ),
    ] = False,
    by: Annotated[
        str | None,
        typer.Option("--author", envvar="RFT_AUTHOR", help="Author of the archive; your login name by default."),
    ] = None,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move the texts, arrays and scores of a run that has ended to Parquet files, which DuckDB, Spark and Hugging Face datasets read.

    Ids, counts, rewards, verdicts, labels, lineage and training records stay. `rft query` reads the database and the files as one; in
    `rft sql` the texts of the run are '[archived: …]'. The run cannot be changed, resumed, forked or trained on until `rft restore-run`
    brings it back, exactly as it was. The files are in `archives` in the folder of the buffer, or beside the segments of one on a server.
    """
    from rftcore.cli.output import print_json
    from rftdata.maintenance.archive import archive as archived

    with opened(uri, "rft archive", schema="migrate") as buffer:
        done = archived(buffer, run, author=by or author(), rewrite_tables=rewrite_tables)
    if as_json:
        print_json(asdict(done))
        return
    print(
        f"{done.run}: {done.num_experiences} experiences of {done.num_groups} groups are in {done.num_files} files in {done.folder}"
        f" ({done.file_bytes / _MIB:.1f} MiB)"
    )
    size = f"{done.array_bytes / _MIB:.1f} MiB of segments"
    print(
        f"{size} are removed by the next compaction in an hour, when no reader can map them: `rft db compact`, or any run"
    )


def restore_run(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or id of an archived run.")],
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring an archived run back, exactly as it was, and remove its files. Also clears up after `rft archive` that was killed."""
    from rftcore.cli.output import print_json
    from rftdata.maintenance.restore_run import restore_run as restored

    with opened(uri, "rft restore-run", schema="migrate") as buffer:
        done = restored(buffer, run)
    if as_json:
        print_json(asdict(done))
    elif done.num_experiences:
        size = f"{done.num_segments} segments, {done.array_bytes / _MIB:.1f} MiB"
        print(f"{done.run}: {done.num_experiences} experiences are in the database again ({size})")
    else:
        print(f"{done.run}: the run was whole; leftovers of its archive are removed")
