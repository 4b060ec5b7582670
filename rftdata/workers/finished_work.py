"""The work that the processes of a run have finished, and why pipeline workers ended early."""

from __future__ import annotations

from rftdata.run import Run


def pipeline_errors(run: Run) -> list[str]:
    """Return why pipeline workers of a run ended early, the newest first."""
    return [row["error"] for row in run.database.fetch("ends_of_pipeline_workers", run_id=run.run_id)]


def num_finished(run: Run, role: str) -> int:
    """Count the work that the explorers, pipeline workers or trainers of a run have finished, including work set aside."""
    return int(run.database.fetch("finished_work", run_id=run.run_id)[0][role])


def num_finished_by(run: Run, host: str, pid: int, pid_space: str) -> int:
    """Count the groups and evaluations that a process of a run has finished; 0 for a process that never joined it."""
    rows = run.database.fetch("work_of_process", run_id=run.run_id, host=host, pid=pid, pid_space=pid_space)
    return int(rows[0]["num"]) if rows else 0


def num_succeeded(run: Run) -> int:
    """Count the rollouts and evaluations of a run that succeeded."""
    return int(run.database.fetch("succeeded_rollouts", run_id=run.run_id)[0]["num"])
