"""Pickled messages between a process and another one that it started."""

from __future__ import annotations

import pickle
import select
import socket
import struct

_LENGTH = struct.Struct("!Q")
_READ_BYTES = 1 << 18


class Messages:
    """Pickled messages over a socket, for one thread at a time.

    Args:
        pidfd: of the process on the other side, if its end ends the messages.
    """

    def __init__(self, connection: socket.socket, pidfd: int | None = None) -> None:
        self._socket = connection
        self._read = bytearray()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        if pidfd is not None:
            self._poll.register(pidfd, select.POLLIN)

    def send(self, message: object) -> None:
        data = pickle.dumps(message)
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def wait(self, patience_s: float | None) -> bool:
        """Wait for a message, or for the end of the other side; return whether there is one of them."""
        return bool(self._read) or bool(self._poll.poll(_milliseconds(patience_s)))

    def receive(self, patience_s: float | None, most: int) -> list[bytes]:
        """Return the pickled messages that have come, at least one and at most so many.

        Raises:
            TimeoutError: none has come.
            EOFError: the other side has closed.
        """
        found: list[bytes] = []
        while not found:
            while len(found) < most and (data := self._take()) is not None:
                found.append(data)
            if not found:
                ready = self._poll.poll(_milliseconds(patience_s))
                if not ready:
                    raise TimeoutError
                read = self._socket.recv(_READ_BYTES) if self._socket.fileno() in dict(ready) else b""
                if not read:
                    raise EOFError
                self._read += read
        return found

    def _take(self) -> bytes | None:
        """Remove a whole message from what was read, and return it."""
        if len(self._read) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._read)[0]
        if len(self._read) < end:
            return None
        data = bytes(self._read[_LENGTH.size : end])
        del self._read[:end]
        return data

    def close(self) -> None:
        self._socket.close()


def _milliseconds(seconds: float | None) -> float | None:
    """Return a time for `poll`, which waits for 24 days at most."""
    return None if seconds is None else min(1000 * seconds, 2**31 - 1)
