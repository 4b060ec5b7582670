"""Claims of groups by explorers: rows leased with SKIP LOCKED, and kept alive by the worker's heartbeat."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from rftdata.failpoints import failpoint
from rftdata.postgres.database import Row, records
from rftdata.postgres.retry import ride_out
from rftdata.run import Run


@dataclass(frozen=True, kw_only=True)
class ClaimedGroup:
    """A group to roll out, and its task.

    Attributes:
        is_begun: whether an earlier claim kept parts of answers; see `rftdata.planning.partial`.
    """

    group_id: int
    claim_token: int
    explore_step: int
    ordinal: int
    group_size: int
    task_id: int
    taskset: str
    task_key: str
    payload: dict[str, Any]
    is_begun: bool = False


def claim_groups(
    run: Run,
    worker_id: int,
    *,
    policy_step: int,
    last_step: int,
    count: int,
    lease_s: float,
    held: Collection[int] | None = None,
) -> list[ClaimedGroup]:
    """Claim up to `count` planned groups of explorer steps up to `last_step`, in planning order.

    Args:
        policy_step: trainer step of the policy that will sample them.
        held: all groups this worker works on. With it, a claim is retried across a restart of the database: groups from a claim
            whose answer was lost are released. None raises instead.
    """

    def claim() -> list[Row]:
        return run.database.fetch(
            "claim_groups",
            run_id=run.run_id,
            worker_id=worker_id,
            policy_step=policy_step,
            last_step=last_step,
            count=count,
            lease_s=lease_s,
        )

    def release_others() -> None:
        run.database.run("release_groups_but", worker_id=worker_id, held=list(held or ()))

    rows = claim() if held is None else ride_out(claim, between=release_others)
    if rows:
        failpoint("explorer.claimed")
    return sorted(records(ClaimedGroup, rows), key=lambda g: (g.explore_step, g.ordinal))


def release_groups(run: Run, worker_id: int, *, but: Collection[int] = ()) -> int:
    """Release the groups this worker holds, but those that it names; return their number."""
    return ride_out(lambda: run.database.run("release_groups_but", worker_id=worker_id, held=list(but)))


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """Outcomes of an explorer step's rollouts, counting groups sealed since the run's current attempt began."""

    explore_step: int
    num_groups: int
    num_good: int
    num_failed: int
    first_error: str | None


def has_succeeded(run: Run) -> bool:
    """Return whether a rollout, or an answer of an evaluation, of the run has succeeded, in any attempt."""
    return bool(run.database.fetch("has_succeeded", run_id=run.run_id)[0]["has_succeeded"])


def step_outcomes(run: Run, explore_steps: Collection[int]) -> list[StepOutcome]:
    """Return the outcomes of explorer steps, in step order; steps without a sealed group are missing."""
    rows = run.database.fetch("step_outcomes", run_id=run.run_id, explore_steps=list(explore_steps))
    return records(StepOutcome, rows)
