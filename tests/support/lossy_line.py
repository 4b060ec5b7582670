"""A line between clients and a PostgreSQL server that loses the answers of transactions.

The server carries a transaction out, and the line is cut instead of bringing the answer back: the client cannot know whether it was committed.
The line reads the protocol (PostgreSQL manual, "Frontend/Backend Protocol") to know which statements a transaction consists of, and where it
ends.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import quote

from psycopg.conninfo import conninfo_to_dict

from tests.support.waiting import PATIENCE_S

# The texts of a transaction's statements, in order; of an explicit one, BEGIN and COMMIT or ROLLBACK as well.
Statements = tuple[str, ...]
Chooses = Callable[[Statements], bool]


@dataclass
class _Session:
    """What passes between a client and the server."""

    client: socket.socket
    server: socket.socket
    prepared: dict[str, str] = field(default_factory=dict)
    statements: list[str] = field(default_factory=list)
    has_failed: bool = False

    def end(self) -> None:
        for side in (self.client, self.server):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)  # the other thread waits on it, so closing alone would not end it
            side.close()


class LossyLine:
    """Passes bytes between clients and the server's unix socket; a context.

    Attributes:
        uri: for clients.
        carried: the statements of every transaction that has ended without an error, in order.
        num_lost: how many of their answers were lost.
        is_down: whether new connections are closed at once.
    """

    def __init__(self, server_uri: str) -> None:
        place = conninfo_to_dict(server_uri)
        self._server = f"{place['host']}/.s.PGSQL.{place['port']}"
        self._listening = socket.create_server(("127.0.0.1", 0))
        port = self._listening.getsockname()[1]
        account = f"{place['user']}:{quote(str(place['password']))}"
        self.uri = f"postgresql://{account}@127.0.0.1:{port}/{place['dbname']}?sslmode=disable&gssencmode=disable"
        self.carried: list[Statements] = []
        self.num_lost = 0
        self.is_down = False
        self._lock = threading.Lock()
        self._loses: Chooses | None = None
        self._holds: Chooses | None = None
        self._held = threading.Event()
        self._let_through = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> LossyLine:
        return self

    def __exit__(self, *_: object) -> None:
        self._let_through.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    @contextlib.contextmanager
    def losing(self, chooses: Chooses) -> Iterator[None]:
        """Lose the answers of the chosen transactions within the block."""
        self._loses = chooses
        try:
            yield
        finally:
            self._loses = None

    @contextlib.contextmanager
    def losing_one(self, text: str) -> Iterator[None]:
        """Lose the answer of the first transaction with a text in its statements; it must come within the block."""
        before = self.num_lost
        with self.losing(lambda statements: self.num_lost == before and any(text in s for s in statements)):
            yield
        assert self.num_lost == before + 1, f"no transaction with {text!r} was carried out"

    @contextlib.contextmanager
    def holding(self, text: str) -> Iterator[threading.Event]:
        """Hold the first statement with a text back until the block ends; the event is set once it is held."""
        self._held.clear()
        self._let_through.clear()
        self._holds = lambda statements: text in statements[-1]
        try:
            yield self._held
        finally:
            self._holds = None
            self._let_through.set()

    def _accept(self) -> None:
        while True:
            try:
                client = self._listening.accept()[0]
            except OSError:
                return
            if self.is_down:
                client.close()
                continue
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._server)
            session = _Session(client, server)
            for carry in (self._carry_up, self._carry_down):
                threading.Thread(target=carry, args=[session], daemon=True).start()

    def _carry_up(self, session: _Session) -> None:
        buffered, begun = b"", False
        with contextlib.suppress(OSError):
            while data := session.client.recv(65536):
                messages, buffered = _messages(buffered + data, begun)
                begun = begun or bool(messages)
                for message in messages:
                    self._note(session, message)
                    session.server.sendall(message)
        session.end()

    def _note(self, session: _Session, message: bytes) -> None:
        """Keep what a client's message carries out."""
        kind, parts = message[:1], message[5:].split(b"\0")
        if kind == b"P":
            session.prepared[parts[0].decode()] = parts[1].decode()
            return
        if kind == b"Q":
            text = parts[0].decode()
        elif kind == b"B":
            text = session.prepared[parts[1].decode()]
        else:
            return
        if not text:  # the pool asks whether the server answers
            return
        session.statements.append(text)
        if self._holds is not None and self._holds(tuple(session.statements)):
            self._holds = None
            self._held.set()
            self._let_through.wait(PATIENCE_S)

    def _carry_down(self, session: _Session) -> None:
        buffered = b""
        with contextlib.suppress(OSError):
            while data := session.server.recv(65536):
                messages, buffered = _messages(buffered + data, True)
                lost = [self._is_lost(session, message) for message in messages]
                if any(lost):
                    break
                session.client.sendall(b"".join(messages))
        session.end()

    def _is_lost(self, session: _Session, message: bytes) -> bool:
        """Return whether a server's message ends a transaction whose answer is to be lost."""
        session.has_failed |= message[:1] == b"E"
        if message[:1] != b"Z" or message[5:] != b"I":
            return False
        statements, failed = tuple(session.statements), session.has_failed
        session.statements, session.has_failed = [], False
        if failed or not statements:
            return False
        with self._lock:
            self.carried.append(statements)
            lost = self._loses is not None and self._loses(statements)
            self.num_lost += lost
        return lost


def _messages(data: bytes, begun: bool) -> tuple[list[bytes], bytes]:
    """Return the whole messages at the beginning of what was received, and the rest. The first of a client has no type."""
    found = []
    while len(data) >= (5 if begun else 4):
        length = struct.unpack_from(">i", data, 1)[0] + 1 if begun else struct.unpack_from(">i", data)[0]
        if len(data) < length:
            break
        found.append(data[:length])
        data, begun = data[length:], True
    return found, data
