"""`rft retention`: permanent removal of texts and arrays by age, number and size."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rftcore.cli.session import BufferOption, JsonOption, author, opened
from rftdata.errors import ConfigError

if TYPE_CHECKING:
    from rftdata.buffer import Buffer
    from rftdata.config import RetentionConfig


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
        str | None, typer.Option("--taskset", metavar="NAME", help="Apply the limits given here only to this taskset.")
    ] = None,
    labelled_too: Annotated[bool, typer.Option("--labelled-too", help="Also purge labelled groups.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be purged, and purge nothing.")] = False,
    buffer: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove texts and arrays permanently by age, number and size; `rft purge` does so by a condition.

    Bytes of earlier purges that are due are overwritten too.
    The rules are those given here, else those of --config, else buffer.retention of the newest run. Groups that are labelled or may
    still be trained on are kept.
    """
    from rftcore.cli.output import print_json
    from rftdata.maintenance import retention as rules

    given = {"max_age_days": max_age_days, "max_experiences": max_experiences, "max_bytes": max_bytes}
    with opened(buffer, "rft retention", schema="check" if dry_run else "migrate") as found:
        wanted = _rules(found, config, {k: v for k, v in given.items() if v is not None}, taskset, labelled_too)
        if dry_run:
            done, erased = rules.apply(found, wanted, author=author(), dry_run=True), None
        else:
            done, erased = rules.enforce(found, wanted, author=author())
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


def _rules(
    buffer: Buffer, config: Path | None, limits: dict[str, float], taskset: str | None, labelled_too: bool
) -> RetentionConfig:
    from rftdata.config import RetentionConfig
    from rftdata.config_errors import parse_section

    if limits:
        values: dict[str, Any] = {"tasksets": {taskset: limits}} if taskset else dict(limits)
    elif config is not None:
        from rftcore.config.run import load_config

        found = load_config(config).buffer.retention
        values = {} if found is None else found.model_dump()
    else:
        values = (buffer.find_run().config.get("buffer") or {}).get("retention") or {}
    if labelled_too:
        values["keep_labelled"] = False
    rules = parse_section(RetentionConfig, values, "the retention rules")
    if not rules.has_limits:
        raise ConfigError(
            "there is no retention rule",
            todo="give --max-age-days, --max-experiences or --max-bytes, or set buffer.retention",
        )
    return rules
