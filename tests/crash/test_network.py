"""Machines whose host names are of no use to the others still find each other, and neither a client nor the server waits long for a lost one."""

from __future__ import annotations

import os
import re
import select
import socket
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import rftdata
from rftcore.sync.addresses import address_towards, own_address
from rftdata.config import BufferConfig
from rftdata.postgres.database import Database
from rftdata.postgres.embedded import EmbeddedServer
from rftdata.postgres.lost_peers import LIMIT_S
from tests.support.network import Machine, Network, unavailable
from tests.support.waiting import PATIENCE_S

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
    assert address_towards("127.0.0.1") == "127.0.0.1"


@needs_network
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_client_and_server_give_up_a_cut_connection(network: Network, server_folders: Path) -> None:
    """The client's statement fails, and the lock of its session is free again, although the link stays down."""
    server = EmbeddedServer(server_folders / "cut", listen=f"{network.address}:5498")
    rftdata.open(BufferConfig(uri=str(server.folder), listen=server.listen)).close()
    with open(server.data / "pg_hba.conf", "a", encoding="utf-8") as file:
        file.write(f"host all all {network.address}/24 scram-sha-256\n")
    url = f"postgresql://rft_owner:{server.password_file.read_text().strip()}@{network.address}:5498/rft"
    try:
        with psycopg.connect(server.uri, autocommit=True) as here:
            here.execute("SELECT pg_reload_conf()")
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                _hold_a_lock(network.machines["one"], url, writing)
            os.close(writing)
            with open(reading) as file:
                assert file.readline() == "locked\n"
                network.machines["one"].cut()
                # The system alone would give the connection up after a quarter of an hour, and an idle one after two hours.
                assert LIMIT_S < PATIENCE_S / 4
                here.execute(f"SET lock_timeout = '{PATIENCE_S:.0f} s'")
                here.execute("SELECT pg_advisory_lock(1)")
                assert select.select([file], [], [], PATIENCE_S)[0]
                assert file.readline() == "failed\n"
            os.waitpid(pid, 0)
    finally:
        server.stop()


def _hold_a_lock(machine: Machine, url: str, answers: int) -> None:
    """Take a lock on the server, then ask it something again and again; report both, and end the process."""
    try:
        machine.enter()
        connection = Database(url).dedicated()
        connection.execute("SELECT pg_advisory_lock(1)")
        os.write(answers, b"locked\n")
        while True:
            connection.execute("SELECT 1")
            time.sleep(0.1)
    except psycopg.OperationalError:
        os.write(answers, b"failed\n")
    finally:
        os._exit(0)
