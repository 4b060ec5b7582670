"""The roles of a run while it is supervised: which of them run, are restarted, or have failed.

An explorer or pipeline worker that was killed or crashed is restarted (`restarts`) while the other roles continue.

If the launcher is lost (the fork server, or Ray's head or the raylet of this machine), no role can be started or watched any more. The run
then fails, and roles that still run are asked to stop in good order.

A role that fails after a signal has asked the run to stop does not make the run fail: signals to all processes of a machine
or a job end roles and their launcher too. The run is interrupted and can be resumed, and the role's error is shown as a warning.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rftcore.launch.exits import RoleExitError
from rftcore.launch.launcher import Launcher, RoleProcess
from rftcore.launch.restarts import Restarts
from rftcore.launch.signals import StopSignals
from rftcore.launch.terminal.views import View
from rftdata.errors import BufferUnavailableError, EngineStoppedError, RftError

# A signal that ended a role or the launcher may also be on its way to this process: wait so long for it.
_SIGNAL_S = 0.3


class Roles:
    """The roles of a run.

    Attributes:
        running: roles that have not ended.
        failed: errors of roles and of the launcher, by name; those after a stop signal do not count.
        has_lost_launcher: whether no process can be started any more.
    """

    def __init__(
        self,
        running: Sequence[RoleProcess],
        restarts: Restarts,
        view: View,
        signals: StopSignals,
        launcher: Launcher,
    ) -> None:
        self.running = list(running)
        self.failed: dict[str, BaseException] = {}
        self.has_lost_launcher = False
        self._launcher = launcher
        self._restarts, self._view, self._signals = restarts, view, signals
        self._killed = False
        self._paused: list[tuple[float, RoleProcess]] = []  # ended processes, and when their roles are started again

    def watch(self, timeout_s: float) -> None:
        """Wait a short time for roles that end, handle their ends, and restart roles whose pause is over."""
        self._start_again()
        self.running, ended = self._launcher.ended_roles(self.running, timeout_s=timeout_s)
        self._check_launcher()  # first, because its loss may have ended the roles
        if self.has_lost_launcher:
            self._launcher.kill([process for process, _ in ended])  # the idle process of a role that has stopped
        for process, why in ended:
            if self._killed and isinstance(why, RoleExitError):
                self._restarts.record(process, RoleExitError("did not stop and was killed"))
            elif why is not None:
                self._handle_end(process, why)
            elif self._has_exited_too_early():
                self._handle_end(process, RoleExitError("ended with exit code 0 before the run had ended"))

    def kill(self, why: str) -> None:
        """Kill the roles that still run; this does not count as their failure."""
        if self._killed or not self.running:
            return
        self._killed = True
        self._view.message(f"{', '.join(sorted(process.name for process in self.running))} {why}: killed")
        self._launcher.kill(self.running)
        if not self.has_lost_launcher:
            return
        for process in self.running:  # a lost launcher may never report their end
            self._restarts.record(process, RoleExitError("did not stop and was killed"))
        self.running = []

    def _has_exited_too_early(self) -> bool:
        """Return whether a role that has just exited should still work, because nothing has ended the run or asked it to stop."""
        return not (self._signals.stop or self.failed or self._restarts.may_roles_leave())

    def _check_launcher(self) -> None:
        """Record the failure of the run if its launcher is lost."""
        if self.has_lost_launcher or (lost := self._launcher.lost()) is None:
            return
        self.has_lost_launcher = True
        self._view.message(f"the {self._launcher.name} {lost}")
        if not self._signals.stop:
            time.sleep(_SIGNAL_S)
        if not self.failed and not self._signals.stop:  # else the run is ending anyway
            self.failed[self._launcher.name] = RoleExitError(lost)

    def _start_again(self) -> None:
        """Start roles whose pause is over, as long as the run continues."""
        if self.failed or self._signals.stop or not any(process.role == "trainer" for process in self.running):
            self._paused.clear()
        due = [entry for entry in self._paused if entry[0] <= time.monotonic()]
        for entry in due:
            self._paused.remove(entry)
            self.running.append(entry[1].start())

    def _handle_end(self, process: RoleProcess, error: BaseException) -> None:
        """Restart a role whose process ended with an error, or let the run fail."""
        sentence = None
        if isinstance(error, RoleExitError):
            sentence = self._restarts.record(process, error)
            if sentence is None and not self._signals.stop:
                time.sleep(_SIGNAL_S)
        if self._signals.stop:
            self._view.message(f"warning: the {process.name} {failure(error)}")
        elif sentence is not None:
            self._handle_blocked(process, sentence)
        elif self._may_continue(process, error):
            self._restart_later(process, error)
        else:
            self.failed[process.name] = error

    def _handle_blocked(self, process: RoleProcess, sentence: str) -> None:
        """Restart a role that a user's function blocked, or let the run fail if that happens too often."""
        if self.failed:  # the run is ending
            self._view.message(f"{sentence}; the {process.name} is not started again: the run ends")
        elif self._restarts.allows(process):
            self._view.message(f"{sentence}; the {process.name} is started again ({self._restarts.count(process)})")
            self.running.append(process.start())
        else:
            times = self._restarts.count(process)
            self.failed[process.name] = RoleExitError(f"was blocked again after {times} restarts: {sentence}")

    def _may_continue(self, process: RoleProcess, error: BaseException) -> bool:
        """Return whether another process can continue the work of one that ended.

        An error of the configuration, or at the start of the work, would come again.
        """
        if process.role == "trainer" or self.failed or self._restarts.has_run_ended():
            return False
        if isinstance(error, RoleExitError | EngineStoppedError | BufferUnavailableError):
            return True  # the database may be out of reach for one machine only
        return not isinstance(error, RftError) and self._restarts.has_worked(process)

    def _restart_later(self, process: RoleProcess, error: BaseException) -> None:
        """Restart a role after a pause. If its processes end too often, other processes of the role continue without it, or the run ends."""
        why = failure(error)
        pause_s = self._restarts.pause_s(process)
        if pause_s is not None:
            times = self._restarts.count(process)
            self._view.message(f"the {process.name} {why}; it is started again in {pause_s:.0f} s ({times})")
            self._paused.append((time.monotonic() + pause_s, process))
            return
        why = f"{why}; {self._restarts.exit_counts(process)}"
        if process.watch is not None and (tail := process.watch.log_tail()):
            self._view.message(f"the {process.name}: {tail}")
        left = [other for other in (*self.running, *(entry[1] for entry in self._paused)) if other.role == process.role]
        if left:
            names = ", ".join(sorted(other.name for other in left))
            self._view.message(
                f"warning: the {process.name} {why}; it is not started again, and the run continues with {names}"
            )
        else:
            self.failed[process.name] = RoleExitError(why)


def failure(error: BaseException) -> str:
    """Return why a role failed, to follow its name in a sentence."""
    if isinstance(error, RoleExitError):
        return str(error)
    if isinstance(error, RftError):
        return f"ended before its work was done: {str(error).rstrip('.')}"
    why = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}".rstrip(".")
    return "; ".join([f"ended before its work was done: {why}", *getattr(error, "__notes__", [])])
