"""`rft config` and `rft schema`: the keys of a configuration file, for people and for editors."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rftcore.cli.session import JsonOption

if TYPE_CHECKING:
    from rftcore.config_reference import Key

_WIDTH = 100
_SCHEMA_BEGINS = '{\n "$schema":'  # of any version, so that an older one is replaced


def config(
    key: Annotated[
        str | None,
        typer.Argument(metavar="KEY", help="A key or a section, as trainer.learning_rate; omit it for the sections."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a key of a configuration means: its type, its default, and the keys below it. `rft docs config` shows all on one page."""
    from rftcore.cli.output import print_json
    from rftcore.config_reference import find_keys, sections

    keys = sections() if key is None else find_keys(key)
    if as_json:
        print_json([asdict(one) for one in keys])
        return
    for one in keys:
        _show(one)
    if key is None:
        print("rft config SECTION shows the keys of a section, rft docs config all of them with examples.")


def schema(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Where to write it; omit it to print it.")] = None,
) -> None:
    """Write the JSON Schema of configuration files, with which editors complete and check keys.

    Editors with the YAML language server read it where the first line of a file is `# yaml-language-server: $schema=FILE`.
    """
    from rftcore.installation.pages import config_schema
    from rftdata.errors import ConfigError
    from rftdata.files.durable import write_whole

    if file is None:
        print(config_schema(), end="")
        return
    try:
        if file.exists() and not file.read_text(errors="replace").startswith(_SCHEMA_BEGINS):
            raise ConfigError(
                "the file for the schema holds something else",
                value=str(file),
                todo="name a new file (`rft check` checks a configuration); nothing was written",
            )
        write_whole(file, config_schema())
    except OSError as error:
        raise ConfigError(
            f"the schema cannot be written: {error.strerror}", value=str(file), todo="name another file"
        ) from error
    print(f"written to {file}; begin a configuration with: # yaml-language-server: $schema={file}")


def _show(key: Key) -> None:
    import textwrap

    default = (
        f", default {key.default}" if key.default and key.default != "needed" else ", needed" if key.default else ""
    )
    of = f" ({key.plugin})" if key.plugin else ""
    print(f"{key.name}{of}: {key.type.replace('`', '')}{default}")
    print(textwrap.fill(key.meaning, _WIDTH, initial_indent="    ", subsequent_indent="    "))
