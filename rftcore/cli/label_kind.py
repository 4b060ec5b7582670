"""`rft label kind define|list|show|retire`: kinds of labels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rftcore.cli.session import AuthorOption, BufferOption, JsonOption, author, opened

if TYPE_CHECKING:
    from rftdata.annotations.config import LabelsConfig

app = typer.Typer(
    help="Kinds of labels: what people can say about an experience, a rollout, a group or a task.", no_args_is_help=True
)

KindArgument = Annotated[str, typer.Argument(metavar="KIND", help="Name of the kind.")]


@app.command("define")
def define(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="YAML with a section `labels`, such as the configuration of a run.")
    ],
    by: AuthorOption = None,
    uri: BufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Define the kinds of a file, all or none. A changed kind becomes a new version; one that is stored already stays as it is."""
    from rftcore.cli.output import print_json
    from rftdata.annotations import define_kinds

    kinds = [kind.definition for kind in _section(file).kinds]
    with opened(uri, "rft label", schema="migrate") as buffer:
        made = {kind.kind: kind.version for kind in define_kinds(buffer, kinds, author=by or author())}
    if as_json:
        print_json({"defined": made, "unchanged": [kind.kind for kind in kinds if kind.kind not in made]})
        return
    for kind in kinds:
        print(f"{kind.kind}: " + (f"version {made[kind.kind]}" if kind.kind in made else "unchanged"))


@app.command("list")
def list_kinds(uri: BufferOption = None, as_json: JsonOption = False) -> None:
    """List the kinds to label with."""
    from dataclasses import asdict

    from rftcore.cli.output import print_rows
    from rftdata.annotations import kinds

    with opened(uri, "rft label") as buffer:
        rows = [asdict(kind) for kind in kinds(buffer)]
    if not rows and not as_json:
        print("no kind of label is defined: rft label kind define FILE")
        return
    print_rows(rows, ("kind", "version", "type", "target", "spec", "blind", "reopens", "instruction"), as_json=as_json)


@app.command("show")
def show(kind: KindArgument, uri: BufferOption = None, as_json: JsonOption = False) -> None:
    """Show all versions of a kind, newest first."""
    from rftcore.cli.output import print_rows
    from rftdata.annotations.kinds import kind_versions

    with opened(uri, "rft label") as buffer:
        rows = kind_versions(buffer, kind)
    print_rows(rows, as_json=as_json)


@app.command("retire")
def retire(kind: KindArgument, uri: BufferOption = None, as_json: JsonOption = False) -> None:
    """Retire a kind: nothing can be labelled with it any more. What was labelled stays."""
    from rftcore.cli.output import print_json
    from rftdata.annotations import retire_kind

    with opened(uri, "rft label", schema="migrate") as buffer:
        retired = retire_kind(buffer, kind)
    if as_json:
        print_json({"kind": kind, "versions_retired": retired})
    else:
        print(f"{kind}: retired" if retired else f"{kind} was retired already")


def _section(file: Path) -> LabelsConfig:
    """Return the section `labels` of a YAML file; other sections are not looked at.

    Raises:
        ConfigError: the file cannot be read, has no such section, or the section is wrong.
    """
    import yaml

    from rftdata.annotations.config import LabelsConfig
    from rftdata.config_errors import parse_section
    from rftdata.errors import ConfigError
    from rftdata.yaml_text import read_yaml

    try:
        values: Any = read_yaml(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{file} cannot be read: {' '.join(str(error).split())}", todo="correct the path or the file"
        ) from error
    section = values.get("labels") if isinstance(values, dict) else None
    if not isinstance(section, dict):
        raise ConfigError(
            f"{file} has no section labels",
            allowed="labels: {kinds: [{kind: helpful, type: bool}]}",
            todo="`rft docs label` has an example",
        )
    return parse_section(LabelsConfig, section, str(file), within="labels")
