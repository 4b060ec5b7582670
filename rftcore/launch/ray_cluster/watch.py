"""A watch over the processes of Ray that a run depends on: the cluster's head (`gcs_server`) and the raylet of this machine.

Ray reports neither in time. A process that has lost the head is ended by Ray's library after 60 s (`RAY_gcs_rpc_server_reconnect_timeout_s`), without
a Python exception, and the roles with it. Roles need Ray only to start and to be watched. For some of these seconds they can still be asked,
through the database, to stop in good order. `ClusterWatch` therefore connects to both ports each time it is asked. The port of a process that was
killed refuses a connection at once.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

import ray

from rftcore.launch.ray_cluster import internals

_CONNECT_S = 1.0
# Of `internals.RECONNECT_S`, roles may take `STOP_S` to stop, and Ray's own end takes some seconds.
STOP_S = 35.0
_LEAVE_S = 10.0


def patience_s() -> float:
    """Return for how long the head of a given cluster may be away. One that keeps its state elsewhere (GCS fault tolerance) is started again."""
    wait_s = float(os.environ.get(internals.RECONNECT_VARIABLE, internals.RECONNECT_S))
    return max(0.0, wait_s - STOP_S - _LEAVE_S)


@dataclass
class WatchedPort:
    """An address on which a process of Ray listens.

    Attributes:
        patience_s: how long it may be unreachable before it counts as lost.
        away_since: the first failed connection since the last successful one (monotonic seconds); None while it answers.
    """

    name: str
    host: str
    port: int
    patience_s: float
    away_since: float | None = None

    def lost(self) -> str | None:
        """Try to connect; return a sentence if it has not answered for too long."""
        now = time.monotonic()
        try:
            socket.create_connection((self.host, self.port), timeout=_CONNECT_S).close()
        except OSError as error:
            self.away_since = self.away_since or now
            away_s = now - self.away_since
            if away_s < self.patience_s:
                return None
            how_long = f" for {away_s:.0f} s" if away_s >= 1 else ""
            return f"was lost: its {self.name} at {self.host}:{self.port} does not answer{how_long} ({error.strerror or error})"
        self.away_since = None
        return None


class ClusterWatch:
    """Observes the cluster that this process is connected to.

    Args:
        is_local: whether this process started the cluster. Then nothing starts its head again.
    """

    def __init__(self, *, is_local: bool) -> None:
        context = ray.get_runtime_context()
        host, _, port = context.gcs_address.rpartition(":")
        here = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        self._ports = [
            WatchedPort("head process (gcs_server)", host.strip("[]"), int(port), 0.0 if is_local else patience_s()),
            WatchedPort("raylet", here["NodeManagerAddress"], here["NodeManagerPort"], 0.0),
        ]

    def lost(self) -> str | None:
        """Return a sentence about the cluster, to follow its name, if it is lost; None while it answers."""
        return next((sentence for port in self._ports if (sentence := port.lost()) is not None), None)
