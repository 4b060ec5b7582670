"""`rft export`: writes experiences with everything they belong to into a file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rftcore.cli.session import BufferOption, JsonOption, opened


def export(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="NAME.parquet, NAME.jsonl, or a folder for the library datasets.")
    ],
    run: Annotated[
        list[str] | None, typer.Option("--run", metavar="RUN", help="Only this run; repeatable. All runs by default.")
    ] = None,
    where: Annotated[
        str | None,
        typer.Option("--where", metavar="SQL", help="Only experiences that meet this condition over rft.v_experience."),
    ] = None,
    whole_groups: Annotated[
        bool, typer.Option("--whole-groups", help="With --where: export the whole group of each chosen experience.")
    ] = False,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write experiences with tasks, rollouts, rewards, labels and token arrays to a file.

    `rft import` reads it back, into this buffer or another. Purged experiences are left out and counted.
    """
    from rftcore.cli.output import print_json
    from rftdata import exchange

    with opened(uri, "rft export") as buffer:
        done = exchange.export(buffer, file, runs=run or (), where=where, whole_groups=whole_groups)
    if as_json:
        print_json(asdict(done))
        return
    purged = f"; {done.num_purged} purged ones are left out" if done.num_purged else ""
    print(f"{file}: {done.num_experiences} experiences, {done.num_rollouts} rollouts, {done.num_groups} groups{purged}")
