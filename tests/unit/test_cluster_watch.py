"""A port of Ray that does not answer any more: lost at once, or after some time in which it may come back."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from rftcore.launch.cluster_watch import STOP_S, WatchedPort, patience_s


@contextlib.contextmanager
def listening(port: int = 0) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", port)) as server:
        yield server.getsockname()[1]


def test_a_head_that_nothing_starts_again_is_lost_with_the_first_refused_connection() -> None:
    with listening() as number:
        port = WatchedPort("head", "127.0.0.1", number, patience_s=0)
        assert port.lost() is None
    assert port.lost() == f"was lost: its head at 127.0.0.1:{number} does not answer (Connection refused)"


def test_a_head_that_is_started_again_in_time_is_not_lost() -> None:
    with listening() as number:
        port = WatchedPort("head", "127.0.0.1", number, patience_s=1)
    assert port.lost() is None and port.away_since is not None
    time.sleep(0.6)
    with listening(number):
        assert port.lost() is None and port.away_since is None
    assert port.lost() is None  # its time begins anew
    time.sleep(1.1)
    assert port.lost() == f"was lost: its head at 127.0.0.1:{number} does not answer for 1 s (Connection refused)"


def test_roles_have_time_to_stop_before_ray_ends_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "RAY_gcs_rpc_server_reconnect_timeout_s"
    monkeypatch.delenv(name, raising=False)
    assert patience_s() == 15 and patience_s() + STOP_S < 60
    monkeypatch.setenv(name, "300")
    assert patience_s() == 255
    monkeypatch.setenv(name, "20")
    assert patience_s() == 0
