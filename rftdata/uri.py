"""The URI of a buffer: the folder of an embedded server, or the URL of a database."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from rftdata.errors import BufferUnavailableError

_SERVER_SCHEMES = ("postgresql://", "postgres://")


def is_server(uri: str) -> bool:
    """Return whether a buffer is in a database of a server, not in a folder.

    Raises:
        BufferUnavailableError: it is named neither by a URL of PostgreSQL nor by a folder, but by another kind of connection string. The
            message does not contain it, because it may have a password.
    """
    if uri.startswith(_SERVER_SCHEMES):
        return True
    if "://" in uri or _is_conninfo(uri):
        scheme, separator, _ = uri.partition("://")
        raise BufferUnavailableError(
            "a buffer cannot be named by this kind of connection string",
            value=f"{scheme}://…" if separator else "KEY=VALUE …",
            allowed="a folder, or a URL that begins with postgresql://",
            todo="write it as postgresql://USER:PASSWORD@HOST:PORT/DATABASE",
        )
    return False


def _is_conninfo(text: str) -> bool:
    """Return whether libpq would read a text as `host=… user=…`."""
    if "=" not in text:
        return False
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict

    try:
        return bool(conninfo_to_dict(text))
    except ProgrammingError:
        return False


def place_name(uri: str) -> str:
    """Return a buffer as shown in messages: the absolute path of a folder, or a URL without its password.

    Raises:
        BufferUnavailableError: see `is_server`.
    """
    return redacted(uri) if is_server(uri) else str(Path(uri).resolve())


def redacted(uri: str) -> str:
    """Return a connection string without its password."""
    return re.sub(r"(password=)[^&\s]*", r"\1…", re.sub(r"(//[^:/@]*):[^@/]*@", r"\1:…@", uri))


def split_password(uri: str) -> tuple[str, str | None]:
    """Return a buffer without its password, which a command line would show to all accounts of the machine, and the password; None if it has none."""
    in_address = re.search(r"(?<=//)([^:/@]*):([^@/]*)@", uri)
    if in_address:
        return f"{uri[: in_address.start()]}{in_address[1]}@{uri[in_address.end() :]}", unquote(in_address[2])
    in_query = re.search(r"(?<=[?&])password=([^&]*)&?", uri)
    if in_query:
        return (uri[: in_query.start()] + uri[in_query.end() :]).rstrip("?&"), unquote(in_query[1])
    return uri, None
