"""The buffer and the run of a verb, and the options that verbs share."""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rftdata.errors import BufferUnavailableError, QueryError
from rftdata.uri import is_server

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
# Verbs that read a configuration use its buffer, regardless of RFT_BUFFER.
ConfigBufferOption = Annotated[
    str | None, typer.Option("--buffer", help="Use this buffer instead of the configuration's.")
]
AuthorOption = Annotated[
    str | None, typer.Option("--author", envvar="RFT_AUTHOR", help="Author of the label; your login name by default.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunArgument = Annotated[str | None, typer.Argument(metavar="RUN", help="Name or id of a run; the newest by default.")]


def find_buffer(uri: str | None) -> str:
    """Return the buffer for a verb: that of the option, else of RFT_BUFFER, else ./buffer.

    Raises:
        BufferUnavailableError: no buffer is named, and the current folder has none.
    """
    uri = uri or os.environ.get("RFT_BUFFER")
    if uri:
        return uri
    if (Path("buffer") / "postgres").is_dir():
        return "./buffer"
    raise BufferUnavailableError(
        f"no buffer is named and {Path.cwd()} has none in ./buffer",
        todo="name one with --buffer or the environment variable RFT_BUFFER, or create one with `rft db create`",
    )


@contextmanager
def opened(uri: str | None, application: str, *, schema: SchemaMode = "check") -> Iterator[Buffer]:
    """Open the existing buffer that `find_buffer` finds, and close it at the end.

    Args:
        schema: `check` for a command that only reads, which refuses an earlier release's schema. `migrate` for one that writes, which
            migrates it with a message on stderr.
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
    """Return the buffer's configuration. For a server, the arrays' folder is RFT_SEGMENTS, else that of the newest run."""
    from rftdata.config import BufferConfig
    from rftdata.connection import stored_segments

    if not is_server(uri):
        return BufferConfig(uri=uri)
    return BufferConfig(uri=uri, segments=os.environ.get("RFT_SEGMENTS") or stored_segments(uri, application))


def check_experience(buffer: Buffer, experience: int) -> None:
    """Refuse an id without an experience.

    Raises:
        QueryError: the experience does not exist.
    """
    from rftdata.reports.inspection import has_experience

    if not has_experience(buffer.database, experience):
        raise QueryError(
            "unknown experience",
            value=experience,
            todo='`rft sql "select * from v_experience limit 5"` shows some',
        )


def author() -> str:
    """Return the author of changes: RFT_AUTHOR, else the login name."""
    return os.environ.get("RFT_AUTHOR") or getpass.getuser()
