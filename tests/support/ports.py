"""Ports of this machine that are a test's own."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A port that refuses connections, and that no other process gets meanwhile: it is bound, and nothing listens.

    The test itself may listen on it with `SO_REUSEADDR`, as `socket.create_server` does.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
