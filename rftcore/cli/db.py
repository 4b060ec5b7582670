"""`rft db …`: buffers and their embedded servers; schema, segment files, roles and backup of any buffer."""

from __future__ import annotations

from typing import Annotated

import typer

from rftcore.cli import backup
from rftcore.cli.session import BufferOption, JsonOption, find_buffer, opened
from rftdata.errors import BufferUnavailableError, ConfigError
from rftdata.uri import is_server, place_name

app = typer.Typer(
    help="The PostgreSQL of a buffer: the embedded server, segment files, roles, backup.",
    no_args_is_help=True,
)


@app.command("create")
def create(
    buffer: BufferOption = None,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST:PORT", help="Also accept TCP there (embedded server).")
    ] = None,
) -> None:
    """Create an empty buffer: --buffer names a new folder, or the URL of an empty database; ./buffer by default.

    The embedded server of the folder is started. On a server, the schema `rft` is created in the database; the arrays are in
    the folder that `buffer.segments` or RFT_SEGMENTS names.
    """
    import rftdata
    from rftdata.config import BufferConfig

    uri = buffer or "./buffer"
    if is_server(uri) and listen:
        raise ConfigError("--listen is for the embedded server of a folder", value=listen, todo="omit it")
    rftdata.create(BufferConfig(uri=uri, listen=listen))
    print(f"created the buffer {place_name(uri)}")


@app.command("migrate")
def migrate(buffer: BufferOption = None) -> None:
    """Migrate the schema of a buffer to this release. Commands that write also do this; those that only read refuse an older schema."""
    from rftdata.config import BufferConfig
    from rftdata.connection import upgrade

    uri = find_buffer(buffer)
    before, now = upgrade(BufferConfig(uri=uri), "rft db")
    change = f"is already at version {now}" if before == now else f"was migrated from version {before} to {now}"
    print(f"the schema of the buffer {place_name(uri)} {change}")


@app.command("start")
def start(
    buffer: BufferOption = None,
    listen: Annotated[str | None, typer.Option("--listen", metavar="HOST:PORT", help="Also accept TCP there.")] = None,
) -> None:
    """Start the server; it then runs until `rft db stop`, used or not."""
    from rftdata.connection import embedded_server

    server = embedded_server(find_buffer(buffer), listen)
    was_running = server.is_running()
    if was_running and listen:
        raise BufferUnavailableError(
            "the server is already running without this address", value=listen, todo="`rft db stop` it first"
        )
    server.start(until_stopped=True)
    print(
        f"the server of {server.folder} {'is already running' if was_running else 'is started'}; it runs until `rft db stop`"
    )


@app.command("stop")
def stop(
    buffer: BufferOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also end open sessions; they lose uncommitted changes.")
    ] = False,
) -> None:
    """Stop the server, unless sessions are open. Without this command it stops after `buffer.idle_stop_s` unused seconds (60)."""
    from rftdata.connection import embedded_server

    server = embedded_server(find_buffer(buffer))
    if not server.is_running():
        print(f"the server of {server.folder} is not running")
        return
    sessions = [] if force else server.sessions()
    if sessions:
        names = ", ".join(sorted({str(session["application_name"] or "unnamed") for session in sessions}))
        raise BufferUnavailableError(
            f"the server of {server.folder} is in use by {len(sessions)} session(s): {names}",
            todo="wait until they have finished (`rft status` shows running processes), or add --force",
        )
    server.stop()
    print(f"the server of {server.folder} is stopped")


@app.command("status")
def status(buffer: BufferOption = None, as_json: JsonOption = False) -> None:
    """Show whether the server is running, and which sessions use it."""
    from rftcore.cli.output import print_json, print_rows
    from rftdata.connection import embedded_server

    server = embedded_server(find_buffer(buffer))
    running = server.is_running()
    sessions = server.sessions() if running else []
    limit_s = server.idle.limit_s
    if as_json:
        idle_stop_s = limit_s if running and limit_s else None
        print_json({"folder": str(server.folder), "running": running, "idle_stop_s": idle_stop_s, "sessions": sessions})
        return
    print(f"{server.folder}: {'running' if running else 'stopped'}")
    if running:
        print(f"it stops {limit_s:g} s after its last use" if limit_s else "it runs until `rft db stop`")
    if sessions:
        print_rows(sessions)


@app.command("uri")
def uri(buffer: BufferOption = None) -> None:
    """Print the connection string for other SQL clients; the server then runs until `rft db stop`, since they cannot start it.

    The string contains the password, so do not paste it into a log.
    """
    from rftdata.connection import embedded_server

    print(embedded_server(find_buffer(buffer)).start(until_stopped=True))


@app.command("compact")
def compact(
    uri: BufferOption = None,
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace",
            min=0,
            metavar="SECONDS",
            help="Skip files written or moved within this time; buffer.compaction_grace_s, an hour, by default.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Merge small segment files of ended writers, and remove unreferenced files. Safe during runs."""
    from dataclasses import asdict

    from rftcore.cli.output import print_json
    from rftdata.segments.compaction import Compactor

    with opened(uri, "rft db compact", schema="migrate") as buffer:
        grace_s = buffer.config.compaction_grace_s if grace is None else grace
        report = Compactor(buffer.database, buffer.segments, grace_s=grace_s).run()
    if report is None:
        raise BufferUnavailableError("another process is compacting this buffer", todo="wait until it has finished")
    if as_json:
        print_json(asdict(report))
    else:
        print(
            f"{report.files_merged} files merged ({report.segments_moved} segments, {report.bytes_moved} bytes moved), "
            f"{report.files_cut} cut, {report.orphans_removed} orphans and {report.files_removed} retired files removed: "
            f"{report.bytes_freed} bytes freed; {report.files_waiting} retired files stay for their grace period of {grace_s:g} s"
        )
        for problem in report.damaged:
            print(f"WRONG  {problem}")
    raise typer.Exit(1 if report.damaged else 0)


@app.command("roles")
def roles(uri: BufferOption = None, as_json: JsonOption = False) -> None:
    """Create the roles rft_reader, rft_labeler and rft_worker if they are missing, and grant each exactly its rights.

    Also works on a server's URL. Requires the owner of the schema; creating roles requires CREATEROLE. Then, in `rft sql`:
    CREATE ROLE ada LOGIN IN ROLE rft_labeler, and \\password ada.
    """
    from rftcore.cli.output import print_json, warn
    from rftdata.maintenance.roles import grant_roles

    with opened(uri, "rft db", schema="migrate") as buffer:
        made, held = grant_roles(buffer.database)
    missing = [name for name in ("rft_reader", "rft_labeler", "rft_worker") if name not in held]
    if as_json:
        print_json({"made": made, "granted": held, "missing": missing})
    else:
        print(f"created: {', '.join(made) or 'none'}; granted: {', '.join(held) or 'none'}")
    if missing:
        warn(
            f"this account may not create {', '.join(missing)}; run `rft db roles` with an account that has CREATEROLE"
        )
        raise typer.Exit(1)


app.command("backup")(backup.backup)
app.command("restore")(backup.restore)
