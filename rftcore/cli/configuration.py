"""The configuration that a command line names: a file or a stored run, with --set and --buffer applied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rftcore.cli.session import opened
from rftdata.errors import ConfigError
from rftdata.uri import is_server, redacted

if TYPE_CHECKING:
    from rftcore.config.run import RunConfig

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="a.b=VALUE",
        help="Change one setting of the file, in all of its stages (stages.NAME.a.b: in one); VALUE is read as YAML. Repeatable.",
    ),
]


def split_targets(targets: list[str], resume: bool) -> tuple[Path | None, str | None]:
    """Return CONFIG and RUN from the positional arguments."""
    rest = list(targets)
    file = None
    if rest and (not resume or Path(rest[0]).suffix in (".yaml", ".yml") or Path(rest[0]).is_file()):
        file = Path(rest.pop(0))
    name = rest.pop(0) if rest and resume else None
    if rest:
        raise ConfigError(
            "too many arguments", value=" ".join(targets), allowed="CONFIG, or --resume with [CONFIG] [RUN]"
        )
    if file is None and not resume:
        raise ConfigError(
            "no configuration file is given", todo="write `rft run CONFIG`, or `rft run --resume` to continue a run"
        )
    return file, name


def configuration(file: Path, overrides: list[str] | None, buffer_uri: str | None) -> RunConfig:
    """Return the configuration of a file with overrides applied.

    Raises:
        ConfigError: the file is invalid, or --buffer and --set name two buffers.
    """
    from rftcore.config.run import load_config

    return load_config(file, _with_buffer(overrides, buffer_uri))


def stage_configurations(
    file: Path, overrides: list[str] | None, buffer_uri: str | None, digest: str | None = None
) -> list[RunConfig]:
    """Return the configurations of a file's stages, with overrides applied to all; a file without stages is a single stage.

    Args:
        digest: SHA-256 of the file as it was checked.

    Raises:
        ConfigError: the file is invalid or has changed since, or --buffer and --set name two buffers.
    """
    from rftcore.config.run import load_stages

    return load_stages(file, _with_buffer(overrides, buffer_uri), digest)


def _with_buffer(overrides: list[str] | None, buffer_uri: str | None) -> list[str]:
    changes = list(overrides or [])
    if buffer_uri:
        _refuse_two_buffers(changes, buffer_uri)
        changes.append(f"buffer.uri={json.dumps(buffer_uri)}")
    return changes


def stored_configuration(
    name: str | None, overrides: list[str] | None, buffer_uri: str | None
) -> tuple[str, RunConfig]:
    """Return the name of a stored run and its configuration, with the buffer in which it was found."""
    from rftcore.cli.session import find_buffer
    from rftcore.config.overrides import apply_override
    from rftcore.config.run import parse_config
    from rftcore.launch.preparation import named_resumable

    uri = find_buffer(buffer_uri)
    _refuse_two_buffers(overrides or [], uri)
    with opened(uri, "rft run", schema="migrate") as buffer:
        run = named_resumable(buffer, name)
    raw = dict(run.config)
    base_dir = Path(raw.pop("base_dir", "."))
    for override in overrides or []:
        apply_override(raw, override)
    # The stored address lacks the password, and the folder may have moved since.
    raw["buffer"] = {**raw.get("buffer", {}), "uri": uri}
    return run.name, parse_config(raw, base_dir, f"the stored configuration of run {run.name!r}")


def _refuse_two_buffers(overrides: list[str], uri: str) -> None:
    """Refuse a --set that names another buffer than `uri`, because one of the two would be ignored."""
    from rftcore.config.overrides import apply_override

    changes: dict[str, Any] = {}
    for override in overrides:
        apply_override(changes, override)
    section = changes.get("buffer")
    asked = section.get("uri") if isinstance(section, dict) else None
    if asked is not None and _absolute(str(asked)) != _absolute(uri):
        raise ConfigError(
            "two buffers are named",
            value=[redacted(str(asked)), redacted(uri)],
            todo="omit --set buffer.uri or --buffer",
        )


def _absolute(uri: str) -> str:
    return uri if is_server(uri) else str(Path(uri).resolve())
