"""How verbs find the buffer and a run: the options they share."""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rftdata.errors import BufferUnavailableError, QueryError

if TYPE_CHECKING:
    from rftdata.buffer import Buffer
    from rftdata.config import BufferConfig
    from rftdata.connection import SchemaMode

BufferOption = Annotated[
    str | None,
    typer.Option(
        "--buffer", envvar="RFT_BUFFER", help="Folder of the buffer or postgresql:// URL; ./buffer by default."
    ),
]
# Verbs that read a configuration work on its buffer, whatever the environment says.
ConfigBufferOption = Annotated[str | None, typer.Option("--buffer", help="Another buffer than the configuration's.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunArgument = Annotated[str | None, typer.Argument(metavar="RUN", help="Name or id of a run; the newest by default.")]


def find_buffer(uri: str | None) -> str:
    """The buffer a verb works on: what was given (option or RFT_BUFFER), else ./buffer.

    Raises:
        BufferUnavailableError: nothing given and no buffer in the current folder.
    """
    uri = uri or os.environ.get("RFT_BUFFER")
    if uri:
        return uri
    if (Path("buffer") / "postgres").is_dir():
        return "./buffer"
    raise BufferUnavailableError(
        f"no buffer is named and {Path.cwd()} has none in ./buffer",
        todo="name one with --buffer or the environment variable RFT_BUFFER, or make one with `rft db create`",
    )


def place_name(uri: str) -> str:
    """A buffer as messages name it: the whole path of a folder, or a URL without its password."""
    from rftdata.uri import redacted

    return redacted(uri) if "://" in uri else str(Path(uri).resolve())


@contextmanager
def opened(uri: str | None, application: str, *, schema: SchemaMode = "check") -> Iterator[Buffer]:
    """The existing buffer that `find_buffer` finds, closed at the end.

    Args:
        schema: `check` for a command that only reads: an earlier release's schema is refused. `migrate` for one that writes: it is
            brought up to date, and stderr says so.
    """
    import rftdata
    from rftcore.cli.output import warn

    config = _config(find_buffer(uri), application)
    buffer = rftdata.open(config, create=False, schema=schema, application=application, report=warn)
    try:
        yield buffer
    finally:
        buffer.close()


def _config(uri: str, application: str) -> BufferConfig:
    """A server's URL does not say where the arrays are: RFT_SEGMENTS does, else the newest run's configuration."""
    from rftdata.config import BufferConfig
    from rftdata.connection import stored_segments

    if "://" not in uri:
        return BufferConfig(uri=uri)
    return BufferConfig(uri=uri, segments=os.environ.get("RFT_SEGMENTS") or stored_segments(uri, application))


def check_experience(buffer: Buffer, experience: int) -> None:
    """Refuse an id that no experience has.

    Raises:
        QueryError: there is none.
    """
    from rftdata.inspection import has_experience

    if not has_experience(buffer.database, experience):
        raise QueryError(
            "there is no such experience",
            value=experience,
            todo='`rft sql "select * from v_experience limit 5"` shows some',
        )


def author() -> str:
    """Who is at the keyboard: RFT_AUTHOR, else the login name."""
    return os.environ.get("RFT_AUTHOR") or getpass.getuser()
