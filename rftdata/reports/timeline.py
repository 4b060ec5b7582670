"""The timeline of a run: how the seconds of each role divide into activities.

The activities of a role always add up to the seconds of the run. Where a role has several processes at a time, a second of each counts as the same
part of a second of the run. Three activities are not a process's own: `not started` (before the first process of the role), `no process` (between two of
them) and `ended` (after the last one). `not recorded` is time in which a process lived and reported nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rftdata.postgres.database import Row
from rftdata.run import Run

# In the order in which a row passes the roles, after `rft run` itself.
ROLES = ("supervisor", "explorer", "pipeline", "trainer")


@dataclass(frozen=True, kw_only=True)
class ActivityTime:
    """Seconds that a role spent on an activity.

    Attributes:
        detail: what it waited for, or which part of the activity this is; without numbers of steps.
        share: in the seconds of the run.
        step_seconds: mean seconds a step; None before the first step.
    """

    activity: str
    detail: str | None
    seconds: float
    share: float
    step_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class RoleTimeline:
    """The seconds of one role, the longest activity first.

    Attributes:
        num_processes: that the role has had in the whole run.
    """

    role: str
    num_processes: int
    activities: Sequence[ActivityTime]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The seconds of a run.

    Attributes:
        seconds: time with at least one process. Pauses between attempts do not count.
        num_steps: trainer steps of all attempts; a step made again after a crash counts again.
    """

    seconds: float
    num_steps: int
    roles: Sequence[RoleTimeline]


def timeline_of(run: Run) -> Timeline:
    """Return the timeline of a run; it has no roles before the run's first process has started."""
    rows = run.database.fetch("run_timeline", run_id=run.run_id)
    processes = {row["role"]: row["num_processes"] for row in run.database.fetch("run_processes", run_id=run.run_id)}
    num_steps = int(run.database.fetch("run_steps_made", run_id=run.run_id)[0]["num_steps"])
    by_role = {role: own for role in ROLES if (own := [row for row in rows if row["role"] == role])}
    seconds = sum(row["seconds"] for row in next(iter(by_role.values()), []))

    def activity(row: Row) -> ActivityTime:
        return ActivityTime(
            activity=row["activity"],
            detail=row["detail"],
            seconds=row["seconds"],
            share=row["seconds"] / seconds,
            step_seconds=row["seconds"] / num_steps if num_steps else None,
        )

    return Timeline(
        seconds=seconds,
        num_steps=num_steps,
        roles=[
            RoleTimeline(role=role, num_processes=processes[role], activities=[activity(row) for row in own])
            for role, own in by_role.items()
        ],
    )
