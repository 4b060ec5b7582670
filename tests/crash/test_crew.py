"""While a storm waits for the end of one role, the network and the other roles recover."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.crew import Crew, Life
from tests.crash.cuts import Cuts
from tests.support.network import Network, unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")

_UNAVAILABLE, _FENCED = 75, 76


class Pair(Crew):
    """A crew without a run: `slow` ends as soon as a `trainer` has reached this machine from its own; one that cannot reach it ends."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.folder, self.lives, self.cuts = folder, {}, Cuts(network.machines)
        self._listening = socket.create_server((network.address, 0))
        self._address = self._listening.getsockname()
        self._machine_of_trainer = network.machines["trainer"]

    def start(self, role: str, failpoint: str | None = None, *, num_ranks: int = 1) -> Life:
        pid = os.fork()
        if pid == 0:
            code = _UNAVAILABLE
            try:
                code = self._take_over() if role == "trainer" else self._wait_for_another()
            finally:
                os._exit(code)
        self.lives[role] = Life(role, pid)
        return self.lives[role]

    def _take_over(self) -> int:
        self._machine_of_trainer.enter()
        with socket.create_connection(self._address, timeout=0.5):
            while True:
                time.sleep(0.1)

    def _wait_for_another(self) -> int:
        self._listening.accept()
        return _FENCED

    def close(self) -> None:
        for role in list(self.lives):
            self.kill(role)
        self._listening.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with Network("trainer") as network:
        made = Pair(tmp_path, network)
        yield made
        made.close()


def test_a_cut_ends_and_a_role_is_started_again_during_the_wait_for_another(pair: Pair) -> None:
    """A suspended trainer on a machine that is cut ends once another has taken its place, which the cut prevents."""
    pair.cuts.cut("trainer", seconds=0)
    unreachable = pair.start("trainer")
    os.waitid(os.P_PID, unreachable.pid, os.WEXITED | os.WNOWAIT)
    assert pair.wait_for_end(pair.start("slow")) == "fenced"
    assert [cut.machine for cut in pair.cuts.past] == ["trainer"]
    assert [*pair.lives] == ["trainer"] and pair.lives["trainer"] is not unreachable
