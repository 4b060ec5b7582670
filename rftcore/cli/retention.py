"""`rft retention`: permanent removal of texts and arrays by age, number and size."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rftcore.cli.session import BufferOption, JsonOption, author, opened


def retention(
    config: Annotated[
        Path | None, typer.Option("--config", metavar="CONFIG", help="Use buffer.retention of this configuration file.")
    ] = None,
    max_age_days: Annotated[
        float | None, typer.Option("--max-age-days", help="Purge experiences older than this.")
    ] = None,
    max_experiences: Annotated[
        int | None, typer.Option("--max-experiences", help="Keep this many of the newest.")
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option("--max-bytes", help="Keep the newest that fit into this size.")
    ] = None,
    taskset: Annotated[
        str | None, typer.Option("--taskset", metavar="NAME", help="Apply these limits only to this taskset.")
    ] = None,
    labelled_too: Annotated[bool, typer.Option("--labelled-too", help="Also purge labelled groups.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be purged, and purge nothing.")] = False,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove texts and arrays permanently by age, number and size; `rft purge` does so by a condition.

    Bytes of earlier purges that are due are overwritten too.
    The rules are the limits of the command line, else those of --config, else buffer.retention of the newest run. Groups that are labelled or may
    still be trained on are kept.
    """
    from rftcore.cli.output import print_json
    from rftcore.run.retention_rules import RetentionLimits, retention_rules
    from rftdata.maintenance.retention import apply, enforce

    limits = RetentionLimits(max_age_days, max_experiences, max_bytes, taskset, labelled_too)
    with opened(uri, "rft retention", schema="check" if dry_run else "migrate") as buffer:
        rules = retention_rules(buffer, config, limits)
        if dry_run:
            done, erased = apply(buffer, rules, author=author(), dry_run=True), None
        else:
            done, erased = enforce(buffer, rules, author=author())
    if as_json:
        print_json(
            {
                "purged": {text: asdict(part) for text, part in done.purged.items()},
                "num_protected": done.num_protected,
                "erased": erased and asdict(erased),
            }
        )
        return
    for text, part in done.purged.items():
        print(f"{text}: {part.num_experiences} experiences {'would be ' if dry_run else ''}purged")
    if not done.purged:
        print("no experience exceeds the limits")
    if done.num_protected:
        print(f"{done.num_protected} exceed the limits but stay, because they are labelled or may still be trained on")
