"""The takeover of a run by a new attempt of its trainer.

Only one transaction starts an attempt, which continues from the last checkpoint of the previous one. The receipt of its process finds it again
if the answer of that transaction was lost. A run whose holder may still be alive is refused.
"""

from __future__ import annotations

import contextlib
import uuid

import psycopg
from psycopg.types.json import Jsonb

from rftdata.attempts import stored_selection
from rftdata.errors import RftError
from rftdata.holder import mark_unheld, refuse_if_held
from rftdata.postgres.database import Connection, Row, execute, fetch
from rftdata.processes import own_process
from rftdata.run import Run


def take(run: Run, receipt: uuid.UUID, lease_s: float, policy: Jsonb) -> tuple[int, Row | None]:
    """Start an attempt, or find the one that an earlier try has started; return its id and the checkpoint from which it continues.

    Raises:
        FencedError: another process trains the run.
    """
    run_id = run.run_id
    with run.database.transaction() as connection:
        execute(connection, "limit_idleness")
        locked = fetch(connection, "lock_run", run_id=run_id)[0]
        parent = locked["current_attempt_id"]
        checkpoint = None
        if parent is not None:
            holder = fetch(connection, "attempt_holder", attempt_id=parent)[0]
            if holder["receipt"] != receipt:
                refuse_if_held(connection, locked)
            checkpoints = fetch(connection, "last_checkpoint", attempt_id=parent, step=None)
            checkpoint = checkpoints[0] if checkpoints else None
            if holder["receipt"] == receipt:
                return int(parent), checkpoint
        stored_selection.verify(connection, locked)
        row = fetch(
            connection,
            "insert_attempt",
            run_id=run_id,
            parent_attempt_id=parent,
            from_checkpoint_id=checkpoint["checkpoint_id"] if checkpoint else None,
            lease_s=lease_s,
            receipt=receipt,
            **own_process(),
        )[0]
        execute(connection, "take_run", run_id=run_id, attempt_id=row["attempt_id"])
        changed = fetch(connection, "set_sampler", run_id=run_id, policy=policy)[0]["changed"]
        begin_history(connection, locked, row["attempt_id"], checkpoint, policy_changed=changed)
        return int(row["attempt_id"]), checkpoint


def begin_history(
    connection: Connection, run: Row, attempt_id: int, checkpoint: Row | None, *, policy_changed: bool = False
) -> None:
    """Set the run to a new attempt's history: its unused groups can be drawn, and unclaimed work can be claimed."""
    run_id = run["run_id"]
    execute(connection, "return_aged", run_id=run_id)
    execute(connection, "return_draws", run_id=run_id, attempt_id=attempt_id)
    if policy_changed:
        execute(connection, "place_all", run_id=run_id)
    start_step = checkpoint["trainer_step"] if checkpoint else 0
    execute(connection, "bound_policy_steps", run_id=run_id, start_step=start_step)
    execute(connection, "reopen_stale_groups", run_id=run_id)
    if run["source_kind"]:
        execute(connection, "restore_selection", run_id=run_id, attempt_id=attempt_id)
    fetch(connection, "release_lost_claims", run_id=run_id)
    execute(connection, "drop_lost_evaluations", run_id=run_id)


def give_up(run: Run, receipt: uuid.UUID) -> None:
    """End an attempt that may have been started but that no object holds; its lease would keep other processes from training the run."""
    mark_unheld(receipt)
    with contextlib.suppress(RftError, psycopg.Error), run.database.transaction() as connection:
        fetch(connection, "lock_run", run_id=run.run_id)  # waits for a start that is still being committed
        execute(connection, "end_attempt_of_receipt", run_id=run.run_id, receipt=receipt, outcome="it could not start")
