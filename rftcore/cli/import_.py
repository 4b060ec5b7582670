"""`rft import`: reads experiences from a file that `rft export` wrote."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rftcore.cli.session import BufferOption, JsonOption, find_buffer, opened
from rftdata.uri import place_name


def import_(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="NAME.parquet, NAME.jsonl, or a folder of the library datasets.")
    ],
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="RUN",
            help="Import into this run, created if needed; by default, into a separate run for each in the file.",
        ),
    ] = None,
    taskset_prefix: Annotated[
        str,
        typer.Option(
            "--taskset-prefix", metavar="TEXT", help="Prefix for the names of all tasksets, to avoid clashes."
        ),
    ] = "",
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Import a file that `rft export` wrote, with labels and arrays. Groups that are already imported are skipped.

    If the buffer named by --buffer does not exist, it is created after the file has been checked.
    `rft lineage EXPERIENCE` names the buffer, run and experience that an imported one comes from.
    """
    import rftdata
    from rftcore.cli.output import print_json, warn
    from rftdata import exchange

    place = find_buffer(uri)
    contents = exchange.check(file, taskset_prefix=taskset_prefix)
    made = rftdata.create(place, exist_ok=True)
    if made:
        warn(f"created the buffer {place_name(place)}")
    try:
        with opened(place, "rft import", schema="migrate") as buffer:
            done = exchange.load(buffer, contents, run=run)
    except BaseException:
        if made:
            warn(
                f"the new buffer {place_name(place)} stays, with everything imported so far; repeat the command to continue"
            )
        raise
    if as_json:
        print_json(asdict(done))
        return
    present = f"; {done.num_present} groups were already present" if done.num_present else ""
    print(
        f"{done.num_experiences} experiences in {done.num_groups} groups imported into {', '.join(done.runs)}{present}"
    )
