"""`rft db backup` and `rft db restore`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rftcore.cli.session import BufferOption, JsonOption, opened
from rftdata.errors import QueryError


def backup(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder to write to.")],
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the database and the arrays into a folder, both of one moment, while the buffer is in use."""
    from rftcore.cli.output import print_json
    from rftdata.maintenance.backup import back_up

    with opened(uri, "rft db backup", schema="any") as buffer:  # also before an upgrade
        manifest = back_up(buffer, folder)
    if as_json:
        print_json(asdict(manifest))
        return
    size = (manifest.dump_bytes + manifest.segment_bytes + manifest.archive_bytes) / 2**20
    print(f"{folder}: {manifest.num_experiences} experiences, {manifest.num_segments} segments, {size:.1f} MiB")


def restore(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder written by `rft db backup`.")],
    uri: BufferOption = None,
    segments: Annotated[
        Path | None, typer.Option("--segments", help="Folder for the arrays; required if --buffer is a server's URL.")
    ] = None,
) -> None:
    """Create a buffer from a backup: --buffer names a new folder, or the URL of an empty database."""
    from rftdata.config import BufferConfig
    from rftdata.maintenance.backup import restore as restored
    from rftdata.reports.inspection import counts

    if uri is None:
        raise QueryError(
            "no target of the restore is given",
            allowed="a new folder, or the URL of an empty database",
            todo="add --buffer",
        )
    target = BufferConfig(uri=uri, segments=None if segments is None else str(segments))
    with restored(folder, target) as buffer:
        num_experiences = counts(buffer.database).experiences
        print(f"{buffer.location}: {num_experiences} experiences, every segment matches its checksum")
