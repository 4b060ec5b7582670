"""`rft run` of a file with stages: one run after the other, each from the checkpoint with which the previous one ended.

Every stage is a separate run with its own name, report and checkpoints; `rft.run.parent_run_id` is the run before it. A stage
that does not finish ends the sequence. `rft run FILE --resume` continues in that stage and does not change finished runs.
All stages are checked before the first one starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import rftdata
from rftcore.checks.models import check_stages
from rftcore.checks.run import check_start
from rftcore.config.run import RunConfig
from rftcore.findings import Findings
from rftcore.launch import supervisor
from rftcore.launch.launcher import Launcher
from rftcore.launch.preparation import has_finished
from rftcore.launch.signals import StartInterrupted, StopSignals
from rftcore.launch.terminal.views import View
from rftcore.reporting.report import build_report
from rftcore.resolved import ResolvedRun
from rftcore.task_pipeline.sources import check_tasks
from rftdata.buffer import Buffer
from rftdata.connection import exists
from rftdata.errors import ModelError
from rftdata.run import Run


def run_stages(stages: Sequence[RunConfig], launcher: Launcher, *, resume: bool = False, view: View) -> int:
    """Run the stages in order.

    Args:
        launcher: starts the roles of all stages.
        resume: continue the newest runs of these names, in the first stage that has not finished.
        view: receives progress and messages.

    Returns:
        0 if all stages finished; otherwise the result of `supervisor.run` for the stage that did not.

    Raises:
        RftError: a stage could not be started, or failed; later stages were not started.
    """
    resolved, findings = [ResolvedRun(config) for config in stages], Findings()
    for each in resolved:
        check_start(each, findings)
    findings.passes(check_stages, resolved)
    if not findings.errors and exists(stages[0].buffer):
        # What the buffer has already is not read again; the sources of a later stage may be missing all the same.
        with rftdata.open(stages[0].buffer, application="rft run") as buffer:
            for each in resolved:
                findings.passes(check_tasks, each, buffer)
    findings.refuse()
    with StopSignals() as signals:
        try:
            return _run_each(stages, launcher, resume, view, signals)
        except StartInterrupted:
            view.message(f"{signals.reason} before the first stage began")
            return signals.exit_code


def _run_each(stages: Sequence[RunConfig], launcher: Launcher, resume: bool, view: View, signals: StopSignals) -> int:
    """Run the stages in order; after a signal, start no further one."""
    parent: Run | None = None
    for number, config in enumerate(stages, start=1):
        if signals.stop:
            view.message(f"{signals.reason} before stage {number} of {len(stages)}; --resume continues there")
            return signals.exit_code
        stored = _stored(config, parent) if resume else None
        if stored is None or not has_finished(config, stored):
            view.message(f"stage {number} of {len(stages)}: {config.run.name}")
            code = supervisor.run(
                config if parent is None else _from_checkpoint(config, parent),
                launcher,
                resume=stored is not None,
                name=stored.name if stored else None,
                parent=parent,
                view=view,
                signals=signals,
            )
            if code:
                return code
        else:
            view.message(f"stage {number} of {len(stages)}: {stored.name} has finished")
        parent = _stored(config, parent)
    return 0


def _stored(config: RunConfig, parent: Run | None) -> Run | None:
    """Return the newest run of a stage that followed `parent`; None if there is none."""
    with rftdata.open(config.buffer, application="rft run") as buffer:
        runs = buffer.runs(config.run.name, imported=False)
    wanted = parent.run_id if parent else None
    return next((run for run in runs if run.parent_run_id == wanted), None)


def _from_checkpoint(config: RunConfig, parent: Run) -> RunConfig:
    """Return the configuration of a stage, starting from the previous stage's best checkpoint, else its last."""
    with rftdata.open(config.buffer, application="rft run") as buffer:
        folder = _checkpoint(buffer, buffer.find_run(parent.run_id))
    if not folder.is_dir():
        raise ModelError(
            f"the checkpoint of the run {parent.name!r}, from which {config.run.name!r} starts, is not on this host",
            value=str(folder),
            todo="run the chain on the host that has the folder, or run the stages from separate files with model.path",
        )
    changed = config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})
    changed._base_dir = config.base_dir
    return changed


def _checkpoint(buffer: Buffer, run: Run) -> Path:
    report = build_report(buffer, run)
    checkpoint = report.best_checkpoint or report.last_checkpoint
    if checkpoint is None:
        raise ModelError(f"the run {run.name!r} has no checkpoint to start the next stage from")
    return Path(checkpoint.uri)
