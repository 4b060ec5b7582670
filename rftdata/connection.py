"""Creation, opening and migration of buffers.

A buffer is embedded in a folder or in a database of a server; one function opens both. Only callers that write migrate an
older schema: processes of the earlier release may still use it, so reading never changes it. If `create` fails, it leaves nothing
behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import quote, urlsplit, urlunsplit

from rftdata.buffer import Buffer
from rftdata.config import BufferConfig
from rftdata.errors import BufferUnavailableError, ConfigError, QueryError, RftError, TimeLimitError
from rftdata.limits import check_text
from rftdata.postgres.database import Database
from rftdata.postgres.embedded import EmbeddedServer, check_folder
from rftdata.postgres.listen_address import check_address
from rftdata.postgres.migrations import check_schema, migrate, newest_version, schema_version
from rftdata.postgres.retry import ride_out
from rftdata.segments.posix import PosixSegmentStore
from rftdata.uri import is_server, place_name, redacted
from rftdata.user_code.blocked_process import print_blocked
from rftdata.user_code.time_limits import when_blocked

# Of a buffer that `open_as` has opened: its pool has at most so many connections, and closes one after each such time without use.
CONNECTIONS_OF_ACCOUNT = 2
_UNUSED_S = 15.0

SchemaMode = Literal["migrate", "check", "any"]


def exists(config: BufferConfig) -> bool:
    """Return whether the folder contains a buffer; for a server always true, without a connection."""
    return is_server(config.uri) or EmbeddedServer(Path(config.uri)).exists()


def with_segments(config: BufferConfig) -> BufferConfig:
    """Return the configuration with the folder of the arrays from RFT_SEGMENTS, if the buffer is on a server and the configuration names none."""
    if config.segments is None and is_server(config.uri):
        return config.model_copy(update={"segments": os.environ.get("RFT_SEGMENTS") or None})
    return config


def check_segments(config: BufferConfig) -> None:
    """Refuse a buffer on a server without a folder for its arrays.

    Raises:
        BufferUnavailableError: neither the configuration nor RFT_SEGMENTS names one.
    """
    if is_server(config.uri) and with_segments(config).segments is None:
        raise BufferUnavailableError(
            "a buffer on a server needs a folder for its arrays",
            allowed="a folder that all processes can access",
            todo="set buffer.segments in the configuration, or for a command without one: export RFT_SEGMENTS=FOLDER",
        )


def check_new_folder(config: BufferConfig) -> Path:
    """Refuse a folder in which no buffer can be created; return its absolute path.

    Raises:
        BufferUnavailableError: the buffer cannot be created there, or its server could not listen on `listen`.
    """
    folder = Path(config.uri).resolve()
    check_folder(folder)
    if config.listen is not None:
        check_address(config.listen)
    return folder


def open(
    uri: str | BufferConfig = "./buffer",
    *,
    create: bool = True,
    schema: SchemaMode = "migrate",
    application: str = "rft",
    patience_s: float | None = None,
    idle_s: float | None = None,
    report: Callable[[str], None] | None = None,
    waits: bool = False,
) -> Buffer:
    """Open a buffer, and start its embedded server if needed.

    Args:
        uri: folder of an embedded buffer, a postgresql:// URL, or a whole configuration.
        create: create a missing buffer; otherwise it is an error.
        schema: what to do with a schema of an earlier release: `migrate` it, `check` and refuse it, or accept `any`.
        application: name shown in `pg_stat_activity`.
        patience_s: how long read-only queries are repeated while the database is unavailable; `RIDE_OUT_S` by default.
        idle_s: seconds of inactivity after which the server aborts a transaction, with its locks, because this process may be suspended;
            None for no limit.
        report: receives a sentence before an earlier schema is migrated.
        waits: try again for `patience_s` while the database is unavailable; otherwise that is an error at once.

    Raises:
        BufferUnavailableError, SchemaVersionError, DiskFullError: see their descriptions.
    """
    if waits:
        again = partial(
            open,
            uri,
            create=create,
            schema=schema,
            application=application,
            patience_s=patience_s,
            idle_s=idle_s,
            report=report,
        )
        return ride_out(again, limit_s=patience_s)
    config = with_segments(_configuration(uri))
    check_segments(config)
    server = None if is_server(config.uri) else _started(config, create=create)
    address = config.uri if server is None else server.uri
    database = Database(address, application=application, patience_s=patience_s, idle_s=idle_s)
    try:
        # An embedded database belongs to the buffer, so one whose creation was interrupted is completed.
        _settle_schema(database, schema, place_name(config.uri), report, may_create=create or server is not None)
        owner = database.fetch("buffer_id")[0]["buffer_id"].hex[:12]
    except BaseException:
        database.close()
        if server is not None:
            server.release()
        raise
    # Absolute, because a process with another working directory (a Ray actor) must find the same files.
    folder = (Path(config.segments) if config.segments else Path(config.uri) / "segments").resolve()
    return Buffer(config, database, server, PosixSegmentStore(folder, config.min_free_bytes, owner))


def open_again(buffer: Buffer, *, application: str, patience_s: float, max_connections: int) -> Buffer:
    """Open a buffer a second time, with connections of its own. Its server runs while `buffer` is open."""
    database = Database(
        buffer.database.uri, max_connections=max_connections, application=application, patience_s=patience_s
    )
    return buffer.with_database(database)


def open_as(buffer: Buffer, account: str, password: str, *, application: str, patience_s: float) -> Buffer:
    """Open a buffer a second time, with another account of its database, and few connections that are open only while they are used.

    Raises:
        BufferUnavailableError: the database refuses the account, does not check its password, or does not answer.
    """
    # Without a password libpq would look for one in the environment and the files of this process.
    if not account or not password:
        raise BufferUnavailableError("an account needs a name and a password")
    address = urlsplit(buffer.database.uri)
    place = address.netloc.rpartition("@")[2]
    user = f"{quote(account, safe='')}:{quote(password, safe='')}"
    uri = urlunsplit(address._replace(netloc=f"{user}@{place}"))
    database = Database(
        uri, max_connections=CONNECTIONS_OF_ACCOUNT, application=application, patience_s=patience_s, unused_s=_UNUSED_S
    )
    try:
        with database.connection() as connection:
            is_checked = connection.pgconn.used_password
    except BaseException:
        database.close()
        raise
    if not is_checked:
        database.close()
        raise BufferUnavailableError(
            "the database admits this account without its password",
            todo="let pg_hba.conf ask for it (scram-sha-256) where the studio connects",
        )
    return buffer.with_database(database)


def _configuration(uri: str | BufferConfig) -> BufferConfig:
    if isinstance(uri, BufferConfig):
        return uri
    check_text("the place of a buffer", uri)
    return BufferConfig(uri=uri)


def _started(config: BufferConfig, *, create: bool) -> EmbeddedServer:
    """Start the server of a folder, and create it if it may."""
    server = _embedded(config)
    if not create and not server.exists():
        raise BufferUnavailableError(
            "there is no buffer here",
            value=str(server.folder),
            todo="name one with --buffer or RFT_BUFFER, create one with `rft db create`, or start a run: `rft run CONFIG`",
        )
    if config.listen is not None and not server.exists():
        check_address(config.listen)  # before anything is created
    server.start()
    return server


def _settle_schema(
    database: Database, mode: SchemaMode, location: str, report: Callable[[str], None] | None, *, may_create: bool
) -> None:
    before, newest = schema_version(database), newest_version()
    if before == newest:
        return
    if before is None and not (may_create and mode == "migrate"):
        raise no_buffer(location)
    if mode == "check":
        check_schema(before, location)
    elif mode == "migrate":
        if before is not None and before < newest and report is not None:
            report(f"migrating the schema of the buffer {location} from version {before} to {newest}")
        migrate(database)


def create(uri: str | BufferConfig, *, exist_ok: bool = False) -> bool:
    """Create a buffer: in a folder, with its own server, or in an empty database of a server.

    Args:
        exist_ok: accept an existing buffer and leave it unchanged.

    Returns:
        Whether it was created.

    Raises:
        QueryError: the buffer already exists.
        BufferUnavailableError, DiskFullError: it cannot be created; nothing is left of it.
    """
    config = _configuration(uri)
    if is_server(config.uri):
        is_new = _migrate_if_empty(Database(config.uri))
    else:
        is_new = _create_in_folder(_embedded(config))
    if not is_new and not exist_ok:
        raise QueryError(
            "the buffer already exists",
            value=place_name(config.uri),
            todo="use it, or choose another folder or an empty database",
        )
    return is_new


def _migrate_if_empty(database: Database) -> bool:
    with contextlib.closing(database):
        if schema_version(database) is not None:
            return False
        migrate(database)
        return True


def _create_in_folder(server: EmbeddedServer) -> bool:
    """Create a buffer in a folder, or complete one whose creation was interrupted; on an error, remove what was created."""
    with removed_if_it_fails(server):
        return _migrate_if_empty(Database(server.start()))


@contextlib.contextmanager
def removed_if_it_fails(server: EmbeddedServer) -> Iterator[None]:
    """Remove a server and its folder if the block fails, unless the folder had contents before.

    Another process may be creating the same buffer. Whether it is, and whether the buffer is complete, is decided while no process can start the
    server (`EmbeddedServer.remove_incomplete`).
    """
    folders = [server.folder, *server.folder.parents]
    missing = [folder for folder in folders if not folder.exists()]
    is_empty = bool(missing) or (server.folder.is_dir() and not any(server.folder.iterdir()))
    try:
        yield
    except BaseException:
        if is_empty:
            with contextlib.suppress(RftError, OSError):
                server.remove_incomplete(_is_complete)
                for folder in missing:
                    folder.rmdir()  # fails if another process has written into it
        raise


def _is_complete(uri: str) -> bool:
    with contextlib.closing(Database(uri)) as database:
        return schema_version(database) is not None


def stored_segments(uri: str, application: str) -> str | None:
    """Return the arrays' folder of a buffer on a server from the configuration of its newest run; None if that has none.

    Raises:
        BufferUnavailableError: the database contains no buffer.
    """
    with contextlib.closing(Database(uri, application=application)) as database:
        if schema_version(database) is None:
            raise no_buffer(redacted(uri))
        newest = database.fetch("runs", name=None, imported=True, at_work=False, limit=1)
    segments: str | None = newest[0]["config"].get("buffer", {}).get("segments") if newest else None
    return segments


@contextlib.contextmanager
def temporary(application: str) -> Iterator[Buffer]:
    """Open an empty buffer in a temporary folder; afterwards remove the folder and its server."""
    with tempfile.TemporaryDirectory(prefix="rft-temporary-") as folder:
        server = EmbeddedServer(Path(folder))

        def end(error: TimeLimitError) -> None:
            """Remove both; the caller ends the process."""
            server.stop()
            shutil.rmtree(folder, ignore_errors=True)
            print_blocked(error)

        try:
            with (
                when_blocked(end),
                open(BufferConfig(uri=folder, min_free_bytes=0), application=application) as buffer,
            ):
                yield buffer
        finally:
            server.stop()


def upgrade(config: BufferConfig, application: str) -> tuple[str, str]:
    """Migrate the schema of a buffer to this release; return the versions before and after.

    Raises:
        BufferUnavailableError: there is no buffer.
        SchemaVersionError: the schema is newer than this program, or this account may not change it.
    """
    if not exists(config):
        raise BufferUnavailableError(
            "there is no buffer here", value=place_name(config.uri), todo="name one with --buffer"
        )
    server = None if is_server(config.uri) else _embedded(config)
    uri = config.uri if server is None else server.start()
    with contextlib.closing(Database(uri, application=application)) as database:
        before = schema_version(database)
        if before is None:
            raise no_buffer(place_name(config.uri))
        return before, migrate(database)


def embedded_server(uri: str, listen: str | None = None) -> EmbeddedServer:
    """Return the server of a folder with a buffer, running or not.

    Raises:
        ConfigError: the buffer is in a database of a server.
        BufferUnavailableError: there is no buffer.
    """
    if is_server(uri):
        raise ConfigError(
            "this command is for embedded servers only",
            value=uri.split("://")[0] + "://…",
            allowed="the folder of a buffer",
        )
    server = EmbeddedServer(Path(uri), listen)
    if not server.exists():
        raise BufferUnavailableError(
            "there is no buffer here",
            value=str(server.folder),
            todo="name one with --buffer or RFT_BUFFER, or create one: `rft db create`",
        )
    return server


def no_buffer(location: str) -> BufferUnavailableError:
    """Return the error for a database without the schema of a buffer."""
    return BufferUnavailableError(
        "the database contains no buffer", value=location, todo=f"create one with `rft db create --buffer {location}`"
    )


def _embedded(config: BufferConfig) -> EmbeddedServer:
    """Return the server of a folder; a configuration without idle_stop_s leaves that setting unchanged."""
    is_set = "idle_stop_s" in config.model_fields_set
    return EmbeddedServer(Path(config.uri), config.listen, (config.idle_stop_s or 0.0) if is_set else None)
