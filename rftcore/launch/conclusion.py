"""The end of a supervised run: its status is recorded in the buffer, and its results, or how it continues, are reported."""

from __future__ import annotations

import contextlib

from rftcore.launch.exits import RoleExitError
from rftcore.launch.roles import failure
from rftcore.launch.signals import StopSignals
from rftcore.launch.terminal.summary import show_results
from rftcore.launch.terminal.views import View
from rftcore.run.commands import resume_command
from rftdata.buffer import Buffer
from rftdata.errors import BufferUnavailableError, RoleFailedError, RolloutsFailedError
from rftdata.run import Run


def record_failure(buffer: Buffer, run: Run, failed: dict[str, BaseException], view: View) -> None:
    """Record why the run failed, and raise the error; only warn if the run had already finished.

    Args:
        failed: the roles that failed, the first of them first, with their errors.

    Raises:
        RoleFailedError: the first failure.
    """
    name, error = next(iter(failed.items()))
    why = failure(error).rstrip(".")
    with contextlib.suppress(
        BufferUnavailableError
    ):  # its status stays `running`, and a resume finds that no process holds it
        ended = run.end("failed", f"the {name} {why}")
        # If no rollout succeeded, a trainer that meanwhile skipped all its steps has finished nothing.
        if not ended and not isinstance(error, RolloutsFailedError):
            view.message(f"warning: the run had finished when the {name} failed: it {why}; its results are complete")
            return
    if isinstance(error, RolloutsFailedError) and error.stack:
        view.message(error.stack)
    fix = "" if isinstance(error, RoleExitError | RolloutsFailedError) else "correct the cause if you can, then "
    raise RoleFailedError(
        f"the {name} of the run {run.name!r} {why}",
        todo=f"{fix}continue from the last checkpoint: {resume_command(buffer.location, run)}",
    ) from error


def conclude(buffer: Buffer, run: Run, view: View, signals: StopSignals, seconds: float) -> int:
    """Report the results of a finished run, or record that it was interrupted; return the exit code.

    Args:
        seconds: from the start of its roles until they ended.
    """
    try:
        state = run.refreshed()
        if state.status != "finished":
            outcome = signals.reason if signals.stop else "its roles ended without finishing"
            run.end("interrupted", outcome)
            view.message(f"{outcome}; continue with: {resume_command(buffer.location, run)}")
            return signals.exit_code if signals.stop else 1
    except BufferUnavailableError:
        if not signals.stop:
            raise
        # The signal stopped the database too; a resume finds that no process holds the run.
        view.message(
            f"{signals.reason}, and so was the database; continue with: {resume_command(buffer.location, run)}"
        )
        return signals.exit_code
    view.message(f"finished in {seconds / 60:.1f} minutes: {state.outcome}")
    show_results(buffer, run, view)
    return 0
