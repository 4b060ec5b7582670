"""A port of Ray that stops answering counts as lost at once, or after a time in which it may return."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import pytest

from rftcore.launch.ray_cluster.watch import STOP_S, WatchedPort, patience_s
from tests.support.ports import closed_port


@pytest.fixture
def number() -> Iterator[int]:
    with closed_port() as port:
        yield port


def listening(number: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", number))


def let_pass(seconds: float, port: WatchedPort) -> None:
    """Date its first failed connection back instead of waiting."""
    assert port.away_since is not None
    port.away_since -= seconds


def test_the_head_of_a_local_cluster_is_lost_with_the_first_refused_connection(number: int) -> None:
    port = WatchedPort("head", "127.0.0.1", number, patience_s=0)
    with listening(number):
        assert port.lost() is None
    assert port.lost() == f"was lost: its head at 127.0.0.1:{number} does not answer (Connection refused)"


def test_a_head_that_is_started_again_in_time_is_not_lost(number: int) -> None:
    port = WatchedPort("head", "127.0.0.1", number, patience_s=2000)
    assert port.lost() is None
    let_pass(1200, port)
    assert port.lost() is None
    with listening(number):
        assert port.lost() is None and port.away_since is None
    assert port.lost() is None
    let_pass(1200, port)
    assert port.lost() is None  # its time has begun anew
    let_pass(1000, port)
    sentence = rf"was lost: its head at 127\.0\.0\.1:{number} does not answer for 2[2-9]\d\d s \(Connection refused\)"
    assert re.fullmatch(sentence, port.lost() or "")


def test_roles_have_time_to_stop_before_ray_ends_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "RAY_gcs_rpc_server_reconnect_timeout_s"
    monkeypatch.delenv(name, raising=False)
    assert patience_s() == 15 and patience_s() + STOP_S < 60
    monkeypatch.setenv(name, "300")
    assert patience_s() == 255
    monkeypatch.setenv(name, "20")
    assert patience_s() == 0
