"""Leases of claims: how long the groups, evaluations and queue items that a worker claimed stay its own, and where a lease ends.

Every heartbeat of a worker renews the leases of all its claims. A lease ends when its worker has stopped, or was silent for longer than the
lease. Any other worker of the run then releases the claim, also on another machine, and its work can be claimed again. A higher claim token
fences the old holder, so it cannot write what it still holds (`release_lost_claims` in sql/queries/workers.sql). Who trains a run has a
lease of its own (`rftdata.attempts.hold`).
"""

from __future__ import annotations

from rftdata.postgres import notify
from rftdata.run import Run


def renew_claims(run: Run, worker_id: int, lease_s: float) -> None:
    """Extend the claims of a live worker; after a pause longer than the lease they are still valid unless another worker took them."""
    run.database.run("renew_claims", worker_id=worker_id, run_id=run.run_id, lease_s=lease_s)


def release_lost_claims(run: Run) -> int:
    """Release the claims of workers that left or were silent for longer than their lease; return the number of claims."""
    released = int(run.database.fetch("release_lost_claims", run_id=run.run_id)[0]["released"])
    if released:
        notify.notify(run.database, notify.PLANNED, notify.SEALED, notify.RUN)
    return released
