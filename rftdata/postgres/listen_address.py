"""Check of the address on which an embedded server is to listen, before anything is created for it."""

from __future__ import annotations

import errno
import socket

from rftdata.errors import BufferUnavailableError


def check_address(address: str) -> None:
    """Check that a server could listen on HOST:PORT.

    Raises:
        BufferUnavailableError: another program listens there, or the host is not this machine.
    """
    host, _, port = address.rpartition(":")
    failed, num_free = [], 0
    try:
        places = socket.getaddrinfo(
            None if host == "*" else host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        places, failed = [], [error]
    for family, kind, protocol, _, place in places:
        try:
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as PostgreSQL does
                if family == socket.AF_INET6:
                    trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                trial.bind(place)
            num_free += 1
        except OSError as error:
            failed.append(error)
    # A name may also stand for an address that this machine lacks (IPv6). PostgreSQL then takes the others.
    refused = [error for error in failed if error.errno in (errno.EADDRINUSE, errno.EACCES)]
    if refused or not num_free:
        cause = (refused or failed)[0]
        raise BufferUnavailableError(
            f"the embedded server cannot listen on the address buffer.listen: {cause.strerror or cause}",
            value=address,
            todo="choose another port, or end the program that listens there (`ss -ltnp` lists them); the host is a name or an address of this machine",
        ) from cause
