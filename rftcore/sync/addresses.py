"""Addresses of this machine, as other machines reach it.

The address of the host's own name is of no use: on many machines it belongs to the loopback interface (127.0.1.1 on Debian), or there is none. The kernel
knows from which of its addresses it reaches another machine, and that machine answers to the same address.

Importing this module does not import torch.
"""

from __future__ import annotations

import ipaddress
import socket

LOOPBACK = "127.0.0.1"
_ANY_PORT = 9  # nothing is sent


def is_loopback(address: str) -> bool:
    """Return whether an address, without a name, is reached on its own machine only."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def address_towards(host: str) -> str:
    """Return the address of this machine from which it reaches `host`.

    Raises:
        OSError: this machine does not reach it.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def own_address(server: str | None) -> str:
    """Return the address at which other machines of a run reach this one: the one from which it reaches their database, else that of its name.

    Args:
        server: address of the database; None if that runs on this machine.

    Raises:
        OSError: there is none but the loopback interface's.
    """
    if server is not None and not is_loopback(address := address_towards(server)):
        return address
    address = socket.gethostbyname(socket.gethostname())
    if is_loopback(address):
        raise OSError(f"the name {socket.gethostname()} of this machine is that of its loopback interface")
    return address
