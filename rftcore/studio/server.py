"""The server of the studio: it holds the buffer open, listens, and says where.

While it runs, an embedded server of the buffer does not stop (docs/decisions/0027). Its log has neither addresses with tokens nor passwords: requests
are not logged.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import uvicorn

from rftcore.studio.app import Studio, build_studio
from rftcore.studio.connections import ConnectionOfProxy, LimitedConnection
from rftcore.studio.live import LiveHints
from rftcore.studio.sessions import PATIENCE_S, Sessions
from rftcore.studio.settings import StudioSettings
from rftdata.buffer import Buffer
from rftdata.connection import open_again
from rftdata.errors import RftError

_STOP_S = 2


class StudioServer:
    """A studio on a socket.

    Args:
        buffer: open, and open until `serve` has returned.

    Raises:
        RftError: the address is in use, or not one of this machine.
    """

    def __init__(self, buffer: Buffer, settings: StudioSettings) -> None:
        self._settings = settings
        self._socket = _listening(settings)
        self.port: int = self._socket.getsockname()[1]
        self._buffer = open_again(buffer, application="rft studio", patience_s=PATIENCE_S, max_connections=16)
        self._live = LiveHints(self._buffer)
        sessions = Sessions(self._buffer, settings.author, is_personal=settings.is_personal)
        self.studio: Studio = build_studio(settings, sessions, self._live, self.port)
        config = uvicorn.Config(
            self.studio.app,
            http=ConnectionOfProxy if settings.behind_proxy else LimitedConnection,
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_STOP_S,
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
            ws="none",
        )
        self._server = _Server(config, self._live)

    def address(self) -> str:
        """Return where the studio is; of a personal one with a new one-time token."""
        token = self.studio.sessions.one_time_token()
        origin = self._settings.origin(self.port)
        return f"{origin}/" if token is None else f"{origin}/?token={token}"

    def serve(self) -> None:
        """Serve until `stop`, or until a signal that the caller has turned into an exception."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._live.stop()
            self.studio.sessions.close()
            self._buffer.close()
            self._socket.close()

    def stop(self) -> None:
        """Let `serve` return."""
        self._server.should_exit = True

    def stop_with_input(self) -> None:
        """Let `serve` return when the standard input ends, which is a pipe of the process that started this one."""

        def wait() -> None:
            sys.stdin.read()
            self.stop()

        threading.Thread(target=wait, name="studio-end", daemon=True).start()

    @contextlib.contextmanager
    def in_thread(self) -> Iterator[StudioServer]:
        """Serve in a thread while the block runs."""
        thread = threading.Thread(target=self.serve, name="studio", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.stop()
            thread.join()


class _Server(uvicorn.Server):
    """Ends event streams before it waits for open requests."""

    def __init__(self, config: uvicorn.Config, live: LiveHints) -> None:
        super().__init__(config)
        self._live = live

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._live.stop()
        await super().shutdown(sockets)


def _listening(settings: StudioSettings) -> socket.socket:
    host = "127.0.0.1" if settings.host == "localhost" else settings.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, settings.port))
        listener.listen(128)
    except (OSError, OverflowError) as error:
        listener.close()
        raise RftError(
            f"the studio cannot listen there: {error}",
            value=f"{settings.host}:{settings.port}",
            todo="choose another --port, or 0 for any free one",
        ) from error
    return listener


def print_addresses(server: StudioServer, report: Callable[[str], None]) -> None:
    """Report where the studio is, and a new one-time address for each line on the standard input of a terminal."""
    report(f"the studio is at {server.address()}")
    if not server.studio.settings.is_personal or not sys.stdin.isatty():
        return
    report("the address signs you in once; press Enter for another one, Ctrl-C to stop")

    def again() -> None:
        for _ in sys.stdin:
            report(f"the studio is at {server.address()}")

    threading.Thread(target=again, name="studio-addresses", daemon=True).start()
