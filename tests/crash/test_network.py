"""Machines whose host names are of no use to the others still find each other."""

from __future__ import annotations

import os
import re
import socket
import traceback
from collections.abc import Iterator

import pytest

from rftcore.sync.addresses import own_address, towards
from tests.support.network import Network, unavailable

needs_network = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")


@pytest.fixture
def network() -> Iterator[Network]:
    with Network("one", "two") as made:
        yield made


def said_on(network: Network, machine: str, server: str | None) -> str:
    """What a process of a machine takes for its own address, or its error."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            network.machines[machine].enter()
            try:
                said = own_address(server)
            except OSError as error:
                said = str(error)
            os.write(writing, f"{socket.gethostname()}: {said}".encode())
        except BaseException:  # noqa: BLE001 - the end of the process
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with open(reading) as file:
        return file.read()


@needs_network
def test_a_machine_offers_the_address_from_which_it_reaches_the_database(network: Network) -> None:
    for name, machine in network.machines.items():
        assert said_on(network, name, network.address) == f"{name}: {machine.address}"


@needs_network
def test_a_name_that_is_unknown_or_of_the_loopback_interface_is_not_offered(network: Network) -> None:
    """Without a database on another machine there is the name alone, which nothing resolves here."""
    for server in (None, "127.0.0.1"):
        assert re.fullmatch(r"one: .*(not known|resolution|loopback).*", said_on(network, "one", server))


def test_the_loopback_interface_reaches_itself() -> None:
    assert towards("127.0.0.1") == "127.0.0.1"
