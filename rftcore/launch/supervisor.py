"""`rft run`: prepares the run, places its roles, shows its progress, and reports how it ended.

It takes no part in the work: it reads the buffer for what it shows, and watches the processes. When one ends before its work
did, the others are asked to stop, and the exit code says so; what is in the buffer stays, and `--resume` goes on. Roles that do
not stop in time are killed, which is no failure of theirs. Once the run has finished its results are complete: a role that
fails after that is told of, and the exit code stays 0.

The embedded database is started again when it was killed: roles ride that out (`rftdata.outage`), and the run goes on. One that
somebody stopped, and did not start again soon, ends the run.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from pathlib import Path
from types import FrameType

import rftdata
from rftcore.config import RunConfig
from rftcore.launch import cluster
from rftcore.launch.closing import buffer_option, show_results
from rftcore.launch.people import People
from rftcore.launch.prepare import GoBack, check_run, find_resumable, has_finished, model_folder, prepare_run, take_back
from rftcore.launch.processors import divide_threads
from rftcore.launch.progress import Progress, View
from rftcore.launch.stacks import answer_requests
from rftdata import retention, wake
from rftdata.buffer import Buffer
from rftdata.config import RetentionConfig
from rftdata.database import Row
from rftdata.errors import BufferUnavailableError, DiskFullError, FencedError, RftError, RoleFailedError
from rftdata.worker import Worker, mark_dead_workers

_STOP_GRACE_S = 60.0
_REFRESH_S = 1.0
_DEPARTURE_S = 45.0
# Roles wait for a database that is away; whoever watches them looks at the roles again soon.
_PATIENCE_S = 4.0
_MAX_REVIVALS = 10
_STOPPED_S = 10.0


def run(
    config: RunConfig, *, resume: bool = False, name: str | None = None, go_back: GoBack | None = None, view: View
) -> int:
    """Run a configuration to its end.

    Args:
        resume: go on with a stored run. One that has done its steps (its roles may have outlived a killed `rft run`) is only
            reported.
        name: the run to resume; by default the newest of the configuration's name.
        go_back: resume from an earlier step, or in a new run.
        view: where progress and messages go.

    Returns:
        0 finished, even when a role failed afterwards; 130 stopped by a person.

    Raises:
        RoleFailedError: a role ended early; what it said.
        RftError: the run could not be started.
    """
    started = time.monotonic()
    config = _reachable(config)
    check_run(config)  # before a buffer is made: a mistake leaves none behind
    with rftdata.open(config.buffer, application="rft run", patience_s=_PATIENCE_S) as buffer:
        stored = None
        if resume:
            stored = find_resumable(config, buffer, name)
            if go_back is None or go_back.fork is None:
                await_departure(buffer, stored, view)
            stored = buffer.find_run(stored["run_id"])
            if go_back is not None:
                config, stored = take_back(config, buffer, stored, go_back)
                view.message(f"{stored['name']} begins {_begins(go_back)}")
            elif has_finished(config, stored):
                view.message(
                    f"the run {stored['name']} has finished its {stored['planned_steps']} steps: nothing is left to do "
                    f"(to train on, raise steps: --set steps={2 * stored['planned_steps']})"
                )
                show_results(buffer, stored, view)
                return 0
        row = prepare_run(config, buffer, resumed=stored)
        answer_requests(buffer.run_folder(row))
        view.message(f"run {row['name']} in the buffer {buffer.location}" + (" (resumed)" if resume else ""))
        apply_retention(config.buffer.retention, buffer, row, view)
        view.message(f"model {config.model.path}: {model_folder(config)}")
        threads = divide_threads()
        view.message(threads.sentence)
        view.message(f"{cluster.start_cluster()} places {_roles(config)}; they load what they need now")
        try:
            stopped = _supervise(config, buffer, row, view)
        except DiskFullError as error:  # it was here that the full disk was met first, and not in a role
            todo = f"{error.todo}; then go on with rft run --resume {row['name']}"
            raise DiskFullError(error.what, value=error.value, allowed=error.allowed, todo=todo) from error
        finally:
            cluster.stop_cluster()
        return _conclude(buffer, row, view, stopped, time.monotonic() - started)


def apply_retention(rules: RetentionConfig | None, buffer: Buffer, row: Row, view: View) -> None:
    """Purge what buffer.retention no longer keeps, nothing of the run that starts; it goes on where that cannot be done."""
    if rules is None or not rules.has_limits:
        return
    try:
        done, _ = retention.enforce(buffer, rules, author="buffer.retention", starting_run_id=row["run_id"])
    except RftError as error:
        view.message(f"warning: buffer.retention is not applied: {error}")
        return
    if done.num_experiences:
        view.message(f"buffer.retention: {done.num_experiences} experiences purged; rft.v_purged lists them")


def _begins(go_back: GoBack) -> str:
    kept = "; the groups of later steps are used" if go_back.keep_rollouts else ""
    return ("at the newest checkpoint" if go_back.step is None else f"at step {go_back.step}") + kept


def _roles(config: RunConfig) -> str:
    if config.sampling.source is None:
        return "explorer, pipeline and trainer" if config.has_explorer else "pipeline and trainer"
    return "explorer (for evaluations) and trainer" if config.has_explorer else "the trainer"


def await_departure(buffer: Buffer, row: Row, view: View) -> None:
    """Let the processes of an earlier life of the run end: after a kill of its supervisor they take a few seconds.

    Raises:
        FencedError: they live on.
    """
    deadline = time.monotonic() + _DEPARTURE_S
    told = False
    while True:
        mark_dead_workers(buffer.database, row["run_id"])
        workers = buffer.database.fetch("live_workers", run_id=row["run_id"])
        alive = [worker for worker in workers if worker["beats"] and worker["role"] != "replay"]
        if not alive:
            return
        who = ", ".join(f"{worker['role']} {worker['pid']} on {worker['host']}" for worker in alive)
        if time.monotonic() > deadline:
            raise FencedError(
                f"the run {row['name']!r} is still being worked on by {who}",
                todo="stop it first (Ctrl-C in its terminal), then resume",
            )
        if not told:
            view.message(f"waits up to {_DEPARTURE_S:.0f} s for {who} to end")
            told = True
        time.sleep(_REFRESH_S)


def _supervise(config: RunConfig, buffer: Buffer, row: Row, view: View) -> bool:
    """Watch the roles until the run ends; whether a person stopped it."""
    stop = threading.Event()
    with _Interrupts(stop), Worker(buffer.database, row["run_id"], "supervisor") as worker:
        worker.says("watches")
        processes = cluster.start_roles(config, row["name"], divide_threads())
        progress, people = Progress(buffer, row["run_id"]), People(view, buffer_option(buffer.location))
        failed: dict[str, BaseException] = {}
        killed: set[str] = set()
        asked_at: float | None = None
        revive = _Reviver(buffer, row, view)
        while processes:
            processes, newly_failed = cluster.failures(processes, timeout_s=_REFRESH_S)
            failed |= {name: error for name, error in newly_failed.items() if name not in killed}
            revive()
            if (stop.is_set() or failed) and asked_at is None:
                asked_at = time.monotonic()
                _ask_to_stop(buffer, row, view, failed)
            if processes and not killed and asked_at is not None and time.monotonic() - asked_at > _STOP_GRACE_S:
                killed = {process.name for process in processes}
                view.message(f"{', '.join(sorted(killed))} did not stop within {_STOP_GRACE_S:.0f} s: killed")
                cluster.kill(processes)
            _show(progress, view, people)
    if failed:
        _fail(buffer, row, failed, view)
    return stop.is_set()


class _Reviver:
    """Starts the embedded database again when it was killed; not for ever.

    Raises:
        BufferUnavailableError: somebody stopped it.
    """

    def __init__(self, buffer: Buffer, row: Row, view: View) -> None:
        self._buffer, self._row, self._view = buffer, row, view
        self._left = _MAX_REVIVALS
        self._away_since: float | None = None

    def __call__(self) -> None:
        server = self._buffer.server
        if server is None or server.lives():
            self._away_since = None
            return
        now = time.monotonic()
        self._away_since = self._away_since or now
        killed = server.was_killed()
        if not killed or not self._left:
            if now - self._away_since > _STOPPED_S:
                why = "was killed again and again, or does not start" if killed else "is stopped"
                raise BufferUnavailableError(
                    f"the database of the buffer {self._buffer.location} {why}: the run ends",
                    todo=f"go on from the last checkpoint: rft run --resume {self._row['name']} starts it again",
                )
            return
        self._left -= 1
        self._view.message("the database was killed: it is started again")
        try:
            server.start()
        except RftError as error:
            self._left = 0
            self._view.message(f"warning: the database does not start: {error}")


def _ask_to_stop(buffer: Buffer, row: Row, view: View, failed: dict[str, BaseException]) -> None:
    why = f"{', '.join(failed)} ended with an error" if failed else "interrupted"
    view.message(f"{why}: the other processes are asked to stop (up to {_STOP_GRACE_S:.0f} s)")
    try:
        mark_dead_workers(buffer.database, row["run_id"])
        buffer.database.run("request_stop", run_id=row["run_id"])
        wake.notify(buffer.database, wake.RUN)
    except BufferUnavailableError:
        return  # the database itself is what failed; roles notice by themselves


def _show(progress: Progress, view: View, people: People) -> None:
    try:
        snapshot = progress.snapshot()
        view.update(snapshot)
        people.update(snapshot)
    except BufferUnavailableError:
        view.message("the database does not answer")


def _fail(buffer: Buffer, row: Row, failed: dict[str, BaseException], view: View) -> None:
    """Note why the run ended and raise it; a warning when it had finished already."""
    name, error = next(iter(failed.items()))
    why = str(error) if isinstance(error, RftError) else f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
    with contextlib.suppress(BufferUnavailableError):  # its status stays `running`; a resume finds that nobody holds it
        if not buffer.database.run("finish_run", run_id=row["run_id"], status="failed", outcome=f"{name}: {why}"):
            view.message(
                f"warning: the run had finished when the {name} failed: {why.rstrip('.')}; its results are complete"
            )
            return
    raise RoleFailedError(
        f"the {name} of the run {row['name']!r} ended before its work did: {why.rstrip('.')}",
        todo=f"mend that if it is yours to mend, then go on from the last checkpoint: rft run --resume {row['name']}",
    ) from error


def _conclude(buffer: Buffer, row: Row, view: View, stopped: bool, seconds: float) -> int:
    state = buffer.find_run(row["run_id"])
    if state["status"] != "finished":
        outcome = "stopped by a person" if stopped else "its roles ended without finishing"
        buffer.database.run("finish_run", run_id=row["run_id"], status="interrupted", outcome=outcome)
        view.message(f"{outcome}; go on with: rft run --resume {row['name']}")
        return 130 if stopped else 1
    view.message(f"finished in {seconds / 60:.1f} minutes: {state['outcome']}")
    show_results(buffer, row, view)
    return 0


def _reachable(config: RunConfig) -> RunConfig:
    """The configuration with places of the buffer that processes started elsewhere can use too."""
    places = {"uri": config.buffer.uri, "segments": config.buffer.segments}
    absolute = {
        key: place if place is None or "://" in place else str(Path(place).resolve()) for key, place in places.items()
    }
    copy = config.model_copy(update={"buffer": config.buffer.model_copy(update=absolute)})
    copy._base_dir = config.base_dir
    return copy


class _Interrupts:
    """Ctrl-C and SIGTERM set an event; a second one ends the process as usual."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._before: dict[int, object] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._stop.is_set():
            raise KeyboardInterrupt
        self._stop.set()
