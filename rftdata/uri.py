"""The URI of a buffer: the folder of an embedded server, or the URL of a database."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from rftdata.errors import BufferUnavailableError, ConfigError

# The name of the key may have escapes: `pass%77ord`.
_IN_QUERY = re.compile(f"({''.join(f'(?:{each}|%{ord(each):02x})' for each in 'password')}=)[^&\\s]*", re.IGNORECASE)
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


def redacted(text: str) -> str:
    """Return a connection string, or a text with one, without its passwords."""
    return _IN_QUERY.sub(r"\1…", re.sub(r"(//[^:/@\s]*):[^\s?\"']*@", r"\1:…@", text))


def split_password(uri: str) -> tuple[str, str | None]:
    """Return a buffer without its password, which a command line would show to all accounts of the machine, and the password; None if it has none.

    Raises:
        ConfigError: it has another secret, or its password cannot be separated.
    """
    if not is_server(uri):
        return uri, None
    from psycopg.conninfo import conninfo_to_dict

    values = conninfo_to_dict(uri)
    password = values.pop("password", None)
    address, _, query = re.sub(r"(?<=//)([^:/@]*):[^@/]*@", r"\1@", uri).partition("?")
    kept = "&".join(each for each in query.split("&") if unquote(each.partition("=")[0]) != "password")
    bare = f"{address}?{kept}" if kept else address
    ports = str(values.get("port", "")).replace(",", "")
    if "sslpassword" in values or conninfo_to_dict(bare) != values or (ports and not ports.isdigit()):
        raise ConfigError(
            "the URL of the buffer has a secret that would be visible to other users of this machine",
            value=place_name(uri),
            allowed="one password, and no sslpassword",
            todo="write it as postgresql://USER:PASSWORD@HOST:PORT/DATABASE, with a key of TLS that needs no password",
        )
    return bare, None if password is None else str(password)
