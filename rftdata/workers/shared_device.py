"""A device that several processes of a run use alternately (`explorer.sleep`): one row per device, with one holder at a time.

A worker asks for the device, and the holder gives it when it can. A holder loses the device only once it is recorded as stopped, which may be
an error, for example after it was suspended. So it checks before it uses the device again, and asks if another worker has it. Holder
and asker are on one machine. A process that has exited is therefore noticed at once, and one that only sends no heartbeats keeps the device,
because its memory is still there.
"""

from __future__ import annotations

from collections.abc import Callable

from rftdata import processes
from rftdata.postgres import notify
from rftdata.postgres.retry import ride_out
from rftdata.run import Run
from rftdata.workers.live_workers import record_exited_workers


class SharedDevice:
    """The hold of one worker on one device; for one thread at a time, except `wait`.

    Args:
        device: `cpu`, or the id of the GPU.
        check: see `rftdata.postgres.notify.Listener`.
    """

    def __init__(self, run: Run, worker_id: int, device: str, check: Callable[[], None] | None = None) -> None:
        self._run = run
        # A GPU has one id in all containers of its machine, whatever they are named.
        machine = processes.pid_space() if device == "cpu" else processes.machine()
        self._key = {"run_id": run.run_id, "machine": machine, "device": device, "worker_id": worker_id}
        self._listener = notify.Listener(run.database, notify.SHARED_DEVICE, check=check)
        self._has_asked = False

    def take(self) -> bool:
        """Take the device, or ask for it; return whether this worker has it now."""
        # A holder that has exited is found in between.
        if ride_out(self._take) or (record_exited_workers(self._run) and ride_out(self._take)):
            self._has_asked = False
            return True
        if not self._has_asked:
            self._has_asked = True
            notify.notify(self._run.database, notify.SHARED_DEVICE)
        return False

    def is_wanted(self) -> bool:
        """Return whether another live worker has asked for the device."""
        return bool(self._run.database.fetch("is_shared_device_wanted", **self._key)[0]["wanted"])

    def is_mine(self) -> bool:
        """Return whether this worker has the device, which it loses once it is recorded as stopped, even by mistake."""
        return bool(ride_out(lambda: self._run.database.fetch("has_shared_device", **self._key))[0]["mine"])

    def lasts(self) -> bool:
        """Return whether this worker has the device and no other live worker has asked for it."""
        return bool(self._run.database.fetch("keeps_shared_device", **self._key)[0]["lasts"])

    def give(self) -> None:
        """Give the device, if this worker has it."""
        ride_out(lambda: self._run.database.run("give_shared_device", **self._key))
        notify.notify(self._run.database, notify.SHARED_DEVICE)

    def waive(self) -> None:
        """Withdraw the request for the device."""
        self._has_asked = False
        ride_out(lambda: self._run.database.run("waive_shared_device", **self._key))

    def wait(self, timeout_s: float) -> None:
        """Wait until a worker asks for the device or gives it, or until the timeout."""
        self._listener.wait(timeout_s)

    def leave(self) -> None:
        """Give the device, and close the connection that listens."""
        self.give()
        self.waive()
        self._listener.close()

    def _take(self) -> bool:
        return bool(self._run.database.fetch("take_shared_device", **self._key)[0]["mine"])
