"""Whose turn it is on a device that the processes of a run share (`explorer.sleep`): one row, with one holder at a time.

A worker asks, and the holder gives when it can; only a worker that has stopped loses its turn, or one of which that was recorded by mistake. So a
holder that was suspended looks before it uses the device again, and asks if the turn is another's. Holder and asker are on one machine, so a process that has
exited is noticed at once, and one that only sends no heartbeats still has its memory on the device and keeps its turn.
"""

from __future__ import annotations

from collections.abc import Callable

from rftdata import processes
from rftdata.postgres import notify
from rftdata.postgres.retry import ride_out
from rftdata.run import Run
from rftdata.workers.live_workers import mark_dead_workers


class GpuTurn:
    """The turns of one worker on one device; for one thread at a time, but for `wait`.

    Args:
        device: `cpu`, or the id of the GPU.
        check: see `rftdata.postgres.notify.Listener`.
    """

    def __init__(self, run: Run, worker_id: int, device: str, check: Callable[[], None] | None = None) -> None:
        self._run = run
        # A GPU has one id in all containers of its machine, whatever they are named.
        machine = processes.pid_space() if device == "cpu" else processes.machine()
        self._key = {"run_id": run.run_id, "machine": machine, "device": device, "worker_id": worker_id}
        self._listener = notify.Listener(run.database, notify.TURN, check=check)
        self._has_asked = False

    def take(self) -> bool:
        """Take the turn, or ask for it; return whether it is this worker's now."""
        # A holder that has exited is found in between.
        if ride_out(self._take) or (mark_dead_workers(self._run) and ride_out(self._take)):
            self._has_asked = False
            return True
        if not self._has_asked:
            self._has_asked = True
            notify.notify(self._run.database, notify.TURN)
        return False

    def is_wanted(self) -> bool:
        """Return whether another live worker has asked for the turn."""
        return bool(self._run.database.fetch("is_turn_wanted", **self._key)[0]["wanted"])

    def is_mine(self) -> bool:
        """Return whether this worker has the turn. It loses it to another if it was recorded to be gone, also if that was wrong."""
        return bool(ride_out(lambda: self._run.database.fetch("has_turn", **self._key))[0]["mine"])

    def lasts(self) -> bool:
        """Return whether this worker has the turn and no other live worker has asked for it."""
        return bool(self._run.database.fetch("turn_lasts", **self._key)[0]["lasts"])

    def give(self) -> None:
        """End this worker's turn, if it has it."""
        ride_out(lambda: self._run.database.run("give_turn", **self._key))
        notify.notify(self._run.database, notify.TURN)

    def waive(self) -> None:
        """Ask no longer."""
        self._has_asked = False
        ride_out(lambda: self._run.database.run("waive_turn", **self._key))

    def wait(self, timeout_s: float) -> None:
        """Wait until a worker asks or gives, or the time is over."""
        self._listener.wait(timeout_s)

    def leave(self) -> None:
        """Give the turn, and close the connection that listens."""
        self.give()
        self.waive()
        self._listener.close()

    def _take(self) -> bool:
        return bool(self._run.database.fetch("take_turn", **self._key)[0]["mine"])
