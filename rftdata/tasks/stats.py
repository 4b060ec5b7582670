"""A run's statistics of tasks, folded from their outcomes: reading, checking and rebuilding them."""

from __future__ import annotations

from collections.abc import Sequence

from rftdata.postgres.database import Row, fetch
from rftdata.run import Run

STAT_COLUMNS: Sequence[str] = (
    "taskset",
    "task_key",
    "task_id",
    "status",
    "pass_rate",
    "alpha",
    "beta",
    "attempts",
    "mean_reward",
    "last_selected_at",
)
DIFFERENCE_COLUMNS: Sequence[str] = (
    "taskset",
    "task_key",
    "task_id",
    "alpha",
    "alpha_of_fold",
    "beta",
    "beta_of_fold",
    "attempts",
    "attempts_of_fold",
)


def task_stats(run: Run, *, taskset: str | None = None, limit: int | None = None) -> list[Row]:
    """Return rows of `rft.v_task_stat`, the last selected tasks first.

    Args:
        taskset: only this set.
        limit: maximum number of rows; None for all.
    """
    return run.database.fetch("task_stats", run_id=run.run_id, taskset=taskset, limit=limit)


def check_task_stats(run: Run) -> list[Row]:
    """Return the tasks whose statistics differ from the fold of their outcomes, with both; empty if there are none."""
    return run.database.fetch("check_task_stat", run_id=run.run_id)


def rebuild_task_stats(run: Run) -> int:
    """Fold the outcomes of a run again; return the number of tasks written."""
    with run.database.transaction() as connection:
        return int(fetch(connection, "rebuild_task_stat", run_id=run.run_id)[0]["tasks"])
