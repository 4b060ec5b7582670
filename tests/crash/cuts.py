"""Cuts of the network between roles and database, and between trainer and engines, for a while."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tests.support.network import Machine

# Short ones, one longer than an explorer's lease in `config.yaml`, and one after which both ends of a connection have given it up.
SECONDS = (0.3, 1.0, 2.0, 6.0, 18.0)
_APART = "trainer and engines"


@dataclass
class Cut:
    """A machine that cannot be reached, in seconds since the epoch; `until` is when it is to be reachable again."""

    machine: str
    since: float
    until: float


class Cuts:
    """What is cut now, and what was.

    Args:
        machines: by name; none if there is no network.

    Attributes:
        past: the cuts that are over.
    """

    def __init__(self, machines: dict[str, Machine]) -> None:
        self.machines = machines
        self.past: list[Cut] = []
        self._now: dict[str, Cut] = {}

    def cut(self, machine: str, seconds: float) -> None:
        """Cut a machine off. One that is cut already stays so for the longer time."""
        now = time.time()
        if machine in self._now:
            self._now[machine].until = max(self._now[machine].until, now + seconds)
            return
        self.machines[machine].cut()
        self._now[machine] = Cut(machine, now, now + seconds)

    def keep_apart(self, seconds: float) -> None:
        """Let no machine reach another one; all still reach the database."""
        now = time.time()
        for machine in self.machines.values():
            machine.part(apart=True)
        since = self._now[_APART].since if _APART in self._now else now
        self._now[_APART] = Cut(_APART, since, now + seconds)

    def restore(self, name: str) -> None:
        """End a cut, if there is one."""
        cut = self._now.pop(name, None)
        if cut is None:
            return
        if name == _APART:
            for machine in self.machines.values():
                machine.part(apart=False)
        else:
            self.machines[name].restore()
        cut.until = time.time()
        self.past.append(cut)

    def restore_due(self, *, all_of_them: bool = False) -> None:
        """End the cuts whose time is over."""
        for name, cut in list(self._now.items()):
            if all_of_them or time.time() >= cut.until:
                self.restore(name)

    def touched(self, machine: str, since: float, until: float) -> bool:
        """Return whether a machine was cut off during a time."""
        return any(cut.machine == machine and cut.since < until and since < cut.until for cut in self.past)
