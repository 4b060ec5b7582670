"""`rft import`: experiences from a file that `rft export` wrote."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rftcore.cli.session import BufferOption, JsonOption, opened


def import_(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="NAME.parquet, NAME.jsonl, or a folder of the library datasets.")
    ],
    run: Annotated[
        str | None,
        typer.Option(
            "--run", metavar="RUN", help="Into this run, made if need be; by default, a run for each in the file."
        ),
    ] = None,
    taskset_prefix: Annotated[
        str,
        typer.Option(
            "--taskset-prefix", metavar="TEXT", help="Put before the names of tasksets that clash with others."
        ),
    ] = "",
    buffer: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Import what `rft export` wrote, labels and arrays included; what is there already is passed over.

    `rft lineage EXPERIENCE` names the buffer, run and experience that an imported one comes from.
    """
    from rftcore.cli.output import print_json
    from rftdata import exchange

    with opened(buffer, "rft import") as found:
        done = exchange.load(found, file, run=run, taskset_prefix=taskset_prefix)
    if as_json:
        print_json(asdict(done))
        return
    present = f"; {done.num_present} groups were there already" if done.num_present else ""
    print(
        f"{done.num_experiences} experiences in {done.num_groups} groups imported into {', '.join(done.runs)}{present}"
    )
