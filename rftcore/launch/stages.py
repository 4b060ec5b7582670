"""`rft run` of a file with stages: one run after the other, each from the checkpoint that the one before ended with.

Every stage is a run of its own, with its own name, report and checkpoints; `rft.run.parent_run_id` names the run before it. A stage
that does not finish ends the chain, and `rft run FILE --resume` goes on in that stage: the runs that finished are left as they are.
All stages are checked before the first one starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import rftdata
from rftcore.config import RunConfig
from rftcore.launch import supervisor
from rftcore.launch.views import View
from rftcore.reporting.report import build_report
from rftcore.resolved import ResolvedRun
from rftcore.run.prepare import check_run, has_finished
from rftdata.buffer import Buffer
from rftdata.errors import ModelError
from rftdata.run import Run


def run_stages(stages: Sequence[RunConfig], *, resume: bool = False, view: View) -> int:
    """Run the stages in order.

    Args:
        resume: go on with the newest chain of these names, in the first stage that has not finished.
        view: where progress and messages go.

    Returns:
        0 when all stages finished; else what `supervisor.run` returned for the stage that did not.

    Raises:
        RftError: a stage could not be started or failed; the stages after it were not started.
    """
    for config in stages:
        check_run(ResolvedRun(config))
    parent: Run | None = None
    for number, config in enumerate(stages, start=1):
        stored = _stored(config, parent) if resume else None
        if stored is None or not has_finished(config, stored):
            view.message(f"stage {number} of {len(stages)}: {config.run.name}")
            started = config if parent is None else _from_checkpoint(config, parent)
            code = supervisor.run(
                started, resume=stored is not None, name=stored.name if stored else None, parent=parent, view=view
            )
            if code:
                return code
        else:
            view.message(f"stage {number} of {len(stages)}: {stored.name} has finished")
        parent = _stored(config, parent)
    return 0


def _stored(config: RunConfig, parent: Run | None) -> Run | None:
    """The newest run of a stage that followed `parent`; None where there is none."""
    with rftdata.open(config.buffer, application="rft run") as buffer:
        runs = buffer.runs_of_name(config.run.name)
    wanted = parent.run_id if parent else None
    return next((run for run in runs if run.parent_run_id == wanted), None)


def _from_checkpoint(config: RunConfig, parent: Run) -> RunConfig:
    """The configuration of a stage, with the model that the stage before ended with: its best checkpoint, else its last."""
    with rftdata.open(config.buffer, application="rft run") as buffer:
        folder = _checkpoint(buffer, buffer.find_run(parent.run_id))
    if not folder.is_dir():
        raise ModelError(
            f"the checkpoint of the run {parent.name!r}, from which {config.run.name!r} starts, is not on this host", value=str(folder),
            todo="run the chain on the host that has the folder, or run the stages from separate files with model.path",
        )  # fmt: skip
    changed = config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})
    changed._base_dir = config.base_dir
    return changed


def _checkpoint(buffer: Buffer, run: Run) -> Path:
    report = build_report(buffer, run)
    found = report.best_checkpoint or report.last_checkpoint
    if found is None:
        raise ModelError(f"the run {run.name!r} has no checkpoint to start the next stage from")
    return Path(found.uri)
