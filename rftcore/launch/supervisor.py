"""`rft run`: prepares the run, starts its roles, shows its progress, and reports how it ended.

It does none of the run's work: it reads the buffer for its display, and watches the processes. It restarts explorers and pipeline workers that
are killed or crash, roles that a user's function blocked (`restarts`), and the embedded database (`database_restarts`). If the trainer ends before
its work is done, or another role or the launcher fails for good, the others are asked to stop, and the exit code reports the failure. The buffer
keeps everything, and `--resume` continues. A signal stops the run in good order (`signals`). Roles that do not stop in time are killed, which does
not count as their failure. Once the run has finished, its results are complete: a role that fails after that causes a warning, and the exit code
stays 0.
"""

from __future__ import annotations

import contextlib
import threading
import time

import rftdata
from rftcore.checks.run import check_start
from rftcore.config.run import RunConfig
from rftcore.findings import Findings
from rftcore.launch.automatic_resume import report_run
from rftcore.launch.conclusion import conclude, record_failure
from rftcore.launch.database_restarts import DatabaseRestarts
from rftcore.launch.launcher import Launcher, reachable
from rftcore.launch.preparation import (
    Beginning,
    GoBack,
    find_resumable,
    has_finished,
    prepare_at_step,
    prepare_run,
)
from rftcore.launch.restarts import Restarts
from rftcore.launch.roles import Roles
from rftcore.launch.signals import StartInterrupted, StopSignals
from rftcore.launch.start_phases import StartPhases
from rftcore.launch.terminal.open_reviews import OpenReviews
from rftcore.launch.terminal.placement_plan import placed, without_sharing
from rftcore.launch.terminal.summary import show_results
from rftcore.launch.terminal.views import View
from rftcore.launch.threads import divide_threads
from rftcore.resolved import ResolvedRun
from rftcore.run.commands import buffer_option, resume_command
from rftcore.run.defaults import with_defaults
from rftcore.run.earlier import earlier_run
from rftcore.run.placement import place_run
from rftcore.run.stacks import answer_requests
from rftdata.buffer import Buffer
from rftdata.config import RetentionConfig
from rftdata.errors import (
    BufferUnavailableError,
    DiskFullError,
    FencedError,
    RftError,
)
from rftdata.maintenance import retention
from rftdata.reports.progress import Progress, steps_to_repeat
from rftdata.run import Run
from rftdata.user_code import held_lock
from rftdata.workers.live_workers import live_workers, record_exited_workers
from rftdata.workers.worker import Worker

_CHECKS = "the configuration is checked"
_REFRESH_S = 1.0
_DISPLAY_SHARE = 0.05
_EARLIER_PROCESSES_S = 45.0
# Roles wait longer for an unavailable database; this process must check the roles again soon.
_PATIENCE_S = 4.0


def run(
    config: RunConfig,
    launcher: Launcher,
    *,
    resume: bool = False,
    name: str | None = None,
    go_back: GoBack | None = None,
    parent: Run | None = None,
    view: View,
    signals: StopSignals | None = None,
    phases: StartPhases | None = None,
) -> int:
    """Run a configuration to its end.

    Args:
        launcher: starts the roles.
        resume: continue a stored run. If it has finished its steps (its roles may have outlived a killed `rft run`), only its results are
            shown.
        name: the run to resume; None for the newest of the configuration's name.
        go_back: resume from an earlier step, or in a new run.
        parent: the run from whose checkpoint a new run starts.
        view: receives progress and messages.
        signals: receives the signals of several runs in a row; None for this run alone.
        phases: of the start until now; None if it begins now.

    Returns:
        0 if finished, even if a role failed afterwards; 128 + its number if a signal stopped the run.

    Raises:
        RoleFailedError: a role ended early, with its error.
        RftError: the run could not be started.
    """
    with contextlib.nullcontext(signals) if signals is not None else StopSignals() as received:
        try:
            beginning = Beginning(resume, name, go_back, parent)
            return _run(config, launcher, beginning, view, received, phases or StartPhases(_CHECKS))
        except StartInterrupted:
            view.message(f"{received.reason} before the run began")
            return received.exit_code


def _run(
    config: RunConfig,
    launcher: Launcher,
    beginning: Beginning,
    view: View,
    signals: StopSignals,
    phases: StartPhases,
) -> int:
    go_back = beginning.go_back
    phases.begin(_CHECKS)
    launcher.prepare(config)
    config, findings = reachable(config), Findings()
    config, chosen = findings.value(with_defaults, config) or (config, None)
    resolved = ResolvedRun(config)
    check_start(resolved, findings)  # before a buffer is created, so that a mistake leaves none behind
    findings.refuse()
    phases.begin("the buffer is opened")
    with rftdata.open(config.buffer, application="rft run", patience_s=_PATIENCE_S, report=view.message) as buffer:
        stored = None
        phases.begin("the run is prepared")
        if beginning.resume:
            stored = find_resumable(config, buffer, beginning.name)
            if go_back is None or go_back.fork is None:
                await_earlier_processes(stored, view)
            stored = stored.refreshed()
            if go_back is None and has_finished(config, stored):
                view.message(_nothing_left(stored))
                show_results(buffer, stored, view)
                return 0
        if stored is None and (sentence := earlier_run(config, buffer)) is not None:
            view.message(sentence)
        with held_lock.printed():  # the block calls sources and stages of the user

            def begin_storing() -> None:
                launcher.refuse_lost()
                # A stored run must end with a status, so from here on a signal stops the roles, or keeps them from starting.
                signals.defer()

            if stored is not None and go_back is not None:
                resolved, run = prepare_at_step(
                    resolved, buffer, stored, go_back, before_storing=begin_storing, report=view.message
                )
                view.message(f"{run.name} begins {_begins(go_back)}")
            else:
                run = prepare_run(
                    resolved,
                    buffer,
                    resumed=stored,
                    parent=beginning.parent,
                    before_storing=begin_storing,
                    report=view.message,
                )
        report_run(run.name)
        if chosen is not None:
            view.message(chosen)
        return _work(resolved, launcher, buffer, run, view, signals, phases, is_resumed=beginning.resume)


def _work(
    resolved: ResolvedRun,
    launcher: Launcher,
    buffer: Buffer,
    run: Run,
    view: View,
    signals: StopSignals,
    phases: StartPhases,
    *,
    is_resumed: bool,
) -> int:
    """Start the roles of a stored run and watch them until they end."""
    config = resolved.config
    started = time.monotonic()
    answer_requests(run.folder)
    view.message(f"run {run.name} in the buffer {buffer.location}{_resume_note(run) if is_resumed else ''}")
    apply_retention(config.buffer.retention, buffer, run, view)
    view.message(f"model {config.model.path}: {resolved.model_folder}")
    threads = divide_threads()
    view.message(threads.sentence)
    phases.begin("roles are started")
    if not signals.stop:
        try:
            with signals.kept():
                view.message(f"{launcher.start()} runs {_roles(config)}; they load what they need now")
            if not signals.stop:
                _supervise(resolved, launcher, buffer, run, view, signals, phases, is_resumed=is_resumed)
        except DiskFullError as error:  # this process found the full disk, before any role
            todo = f"{error.todo}; then continue with {resume_command(buffer.location, run)}"
            raise DiskFullError(error.what, value=error.value, allowed=error.allowed, todo=todo) from error
        finally:
            launcher.stop()
    return conclude(buffer, run, view, signals, time.monotonic() - started)


def apply_retention(rules: RetentionConfig | None, buffer: Buffer, run: Run, view: View) -> None:
    """Purge what exceeds buffer.retention, except from the run that starts; a failure is only a warning."""
    if rules is None or not rules.has_limits:
        return
    try:
        done, _ = retention.enforce(buffer, rules, author="buffer.retention", starting_run_id=run.run_id)
    except RftError as error:
        view.message(f"warning: buffer.retention is not applied: {error}")
        return
    if done.num_experiences:
        view.message(f"buffer.retention: {done.num_experiences} experiences purged; rft.v_purged lists them")


def _begins(go_back: GoBack) -> str:
    kept = "; the groups of later steps are used" if go_back.keep_rollouts else ""
    return ("at the newest checkpoint" if go_back.step is None else f"at step {go_back.step}") + kept


def _nothing_left(run: Run) -> str:
    if run.mode == "eval":
        return f"all evaluations of the run {run.name} are answered: nothing is left to do"
    return (
        f"the run {run.name} has finished its {run.planned_steps} steps: nothing is left to do "
        f"(to train further, raise steps: --set steps={2 * run.planned_steps})"
    )


def _roles(config: RunConfig) -> str:
    if config.only_evaluates:
        return "the evaluations"
    if config.sampling.source is None:
        return "explorer, pipeline and trainer" if config.has_explorer else "pipeline and trainer"
    return "explorer (for evaluations) and trainer" if config.has_explorer else "the trainer"


def await_earlier_processes(run: Run, view: View) -> None:
    """Wait until the processes of an earlier start of the run have ended, which takes some seconds after their supervisor was killed.

    Raises:
        FencedError: they are still running.
    """
    deadline = time.monotonic() + _EARLIER_PROCESSES_S
    reported = False
    while True:
        record_exited_workers(run)
        alive = [worker for worker in live_workers(run) if worker.beats and worker.role != "replay"]
        names = {f"{worker.role} {worker.pid} on {worker.host}" for worker in alive}
        who = ", ".join(sorted(names | {name for name in [run.trainer_at_work()] if name is not None}))
        if not who:
            return
        if time.monotonic() > deadline:
            raise FencedError(
                f"the run {run.name!r} still has running processes: {who}",
                todo="stop it first (Ctrl-C in its terminal), then resume",
            )
        if not reported:
            view.message(f"waiting up to {_EARLIER_PROCESSES_S:.0f} s for {who} to end")
            reported = True
        time.sleep(_REFRESH_S)


def _resume_note(run: Run) -> str:
    begins, done = steps_to_repeat(run)
    lost = f"step {done}" if done == begins + 1 else f"steps {begins + 1} to {done}"
    again = f"; {lost} came after the newest checkpoint, and will be trained again" if done > begins else ""
    return f" (resumed at step {begins}{again})"


def _supervise(
    resolved: ResolvedRun,
    launcher: Launcher,
    buffer: Buffer,
    run: Run,
    view: View,
    signals: StopSignals,
    phases: StartPhases,
    *,
    is_resumed: bool,
) -> None:
    """Watch the roles until the run ends.

    Raises:
        RoleFailedError: a role failed before anything asked the run to stop.
    """
    with Worker(run, "supervisor", phases=phases.begun()) as worker:
        placement = place_run(resolved, launcher.machines())
        if (sentence := placed(placement)) is not None:
            view.message(sentence)
        if (reason := without_sharing(resolved.config, placement)) is not None:
            view.message(f"warning: {reason}")
        started = launcher.start_roles(resolved, run, divide_threads(), placement)
        worker.set_state("watches", activity="watching")
        roles = Roles(started, Restarts(run), view, signals, launcher)
        progress = Progress(run, resumes=is_resumed)
        show = _Display(progress, view, OpenReviews(view, buffer_option(buffer.location)))
        asked_at: float | None = None
        grace_s = resolved.config.run.stop_grace_s
        restart_database = DatabaseRestarts(buffer, run, view)
        request_stop = _StopRequest(run)
        while roles.running:
            roles.watch(_REFRESH_S)
            restart_database()
            if roles.has_lost_launcher:
                grace_s = min(grace_s, launcher.stop_s)
            if signals.stop or roles.failed:
                if asked_at is None:
                    asked_at = time.monotonic()
                    if roles.running:
                        _report_stop(view, roles.failed, grace_s)
                # Repeated, because a trainer that begins its attempt now would take an earlier request for an old one.
                request_stop()
            if asked_at is not None and (signals.urgent or time.monotonic() - asked_at > grace_s):
                roles.kill("did not stop yet" if signals.urgent else f"did not stop within {grace_s:.0f} s")
            show()
    if roles.failed:
        record_failure(buffer, run, roles.failed, view)


def _report_stop(view: View, failed: dict[str, BaseException], grace_s: float) -> None:
    why = f"{', '.join(failed)} ended with an error" if failed else "interrupted"
    view.message(f"{why}: the other processes are asked to stop (up to {grace_s:.0f} s)")


class _StopRequest:
    """Asks the roles of a run to stop, in a thread, because a role that was stopped within a transaction may hold a lock until it is killed."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._thread: threading.Thread | None = None

    def __call__(self) -> None:
        """Ask, unless the last request is still waiting."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._ask, name="stop-request", daemon=True)
            self._thread.start()

    def _ask(self) -> None:
        # Roles notice themselves that the database has failed. After a conflict, the next call asks again.
        with contextlib.suppress(RftError):
            record_exited_workers(self._run)
            self._run.request_stop()


class _Display:
    """Shows the progress of a run. The longer this takes, the less often it happens, so that runs of many steps do not pay for it."""

    def __init__(self, progress: Progress, view: View, open_reviews: OpenReviews) -> None:
        self._progress, self._view, self._open_reviews = progress, view, open_reviews
        self._next = 0.0

    def __call__(self) -> None:
        """Show the progress, unless it was shown a moment ago."""
        started = time.monotonic()
        if started < self._next:
            return
        try:
            snapshot = self._progress.snapshot()
            self._view.update(snapshot)
            self._open_reviews.update(snapshot)
        except BufferUnavailableError:
            self._view.message("the database does not answer")
        now = time.monotonic()
        self._next = now + (now - started) / _DISPLAY_SHARE
