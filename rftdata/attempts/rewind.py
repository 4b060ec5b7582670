"""Rewinding a run to an earlier step, and forking a new run from one (contract C3).

The state of a run at trainer step N consists of the checkpoint of N, every group planned while the policy was at a step before N, except
those that steps up to N drew, and what selectors and task statistics had learned from these groups. Groups planned later stay stored
and are marked as left. If they are kept, only the draws after N are undone. Labels are current opinions and are never rolled back.

Going back is itself an attempt, which ends at once. It fences any process that still holds the run, and is part of the history of the
next attempt.
"""

from __future__ import annotations

from typing import Any

from psycopg.types.json import Jsonb

from rftdata.attempts.takeover import begin_history
from rftdata.errors import ConfigError
from rftdata.holder import refuse_if_held
from rftdata.pipeline.verdicts import ready_groups
from rftdata.postgres import notify
from rftdata.postgres.database import Connection, Row, execute, fetch
from rftdata.processes import own_process
from rftdata.run import NO_PIPELINE, NewRun, Run, refuse_archived
from rftdata.workers.live_workers import record_exited_workers

_NO_FORK = "it cannot be forked"


def rewind(run: Run, step: int, *, keep_rollouts: bool = False) -> None:
    """Take a run back: see `Buffer.rewind`."""
    run_id = run.run_id
    record_exited_workers(run)
    with run.database.transaction() as connection:
        locked = fetch(connection, "lock_run", run_id=run_id)[0]
        parent = locked["current_attempt_id"]
        if parent is not None:
            refuse_if_held(connection, locked)
        checkpoint = _checkpoint(connection, run.name, parent, step)
        attempt_id = _insert_ended_attempt(connection, run_id, parent, checkpoint, f"the run went back to step {step}")
        if not keep_rollouts:
            fetch(connection, "lock_groups_to_leave", run_id=run_id, step=step)
            execute(connection, "leave_groups", run_id=run_id, step=step, attempt_id=attempt_id)
            execute(connection, "cut_partial_tokens", run_id=run_id, step=step)
            snapshots = fetch(connection, "snapshot_from_step", run_id=run_id, step=step)
            if snapshots:
                states = Jsonb(snapshots[0]["states"])
                execute(
                    connection,
                    "restore_selectors",
                    run_id=run_id,
                    snapshot_id=snapshots[0]["snapshot_id"],
                    states=states,
                )
                execute(connection, "forget_selectors", run_id=run_id, states=states)
            fetch(connection, "rebuild_task_stat", run_id=run_id)
        execute(connection, "take_run", run_id=run_id, attempt_id=attempt_id)
        begin_history(connection, locked, attempt_id, checkpoint)
    notify.notify(run.database, notify.RUN)


def fork(parent: Run, new: NewRun, step: int | None, *, keep_rollouts: bool = False) -> Row:
    """Fork a run (see `Buffer.fork`) and return the new run's row."""
    if parent.source_kind:
        raise ConfigError(
            f"the run {parent.name!r} trains on a stored selection and cannot be forked",
            todo="start a new run with the checkpoint as model.path and a separate selection (sampling.source)",
        )
    with parent.database.transaction() as connection:
        refuse_archived(connection, parent.run_id, _NO_FORK)
        if step is None:
            step = _kept_steps(connection, parent.current_attempt_id)[-1]
        checkpoint = _checkpoint(connection, parent.name, parent.current_attempt_id, step)
        run = new.insert(connection, parent_run_id=parent.run_id)
        parent_id, run_id = parent.run_id, run["run_id"]
        outcome = f"forked from {parent.name} at step {step}"
        attempt_id = _insert_ended_attempt(connection, run_id, parent.current_attempt_id, checkpoint, outcome)
        snapshots = [] if keep_rollouts else fetch(connection, "snapshot_from_step", run_id=parent_id, step=step)
        snapshot = snapshots[0] if snapshots else {"snapshot_id": None, "states": None}
        which: dict[str, Any] = {
            "run_id": run_id,
            "parent_run_id": parent_id,
            "attempt_id": attempt_id,
            "step": step,
            "keep_rollouts": keep_rollouts,
        }
        states = None if snapshot["states"] is None else Jsonb(snapshot["states"])
        execute(connection, "copy_selectors", run_id=run_id, parent_run_id=parent_id, states=states)
        execute(connection, "copy_observations", snapshot_id=snapshot["snapshot_id"], **which)
        fetch(connection, "rebuild_task_stat", run_id=run_id)
        execute(connection, "take_run", run_id=run_id, attempt_id=attempt_id)
        execute(connection, "copy_sampler", run_id=run_id, parent_run_id=parent_id)
        copied = fetch(connection, "copy_groups", **which)
        group_ids = [row["group_id"] for row in copied]
        execute(connection, "copy_turn_rewards", group_ids=group_ids)
        execute(connection, "copy_annotations", group_ids=group_ids)
        execute(connection, "copy_scores", group_ids=group_ids)
        execute(connection, "copy_reviews", group_ids=group_ids)
        direct = [
            row["group_id"] for row in copied if run["pipeline_version"] == NO_PIPELINE and row["status"] == "ready"
        ]
        execute(
            connection,
            "seal_groups",
            group_ids=[row["group_id"] for row in copied if row["group_id"] not in set(direct)],
        )
        ready_groups(connection, dict.fromkeys(direct, 0.0))
        # Again: archiving locks the same groups, and may have moved their texts while the copying waited for it.
        refuse_archived(connection, parent_id, _NO_FORK)
        return run


def _insert_ended_attempt(
    connection: Connection, run_id: int, parent: int | None, checkpoint: Row | None, outcome: str
) -> int:
    row = fetch(
        connection,
        "insert_attempt",
        run_id=run_id,
        parent_attempt_id=parent,
        from_checkpoint_id=checkpoint["checkpoint_id"] if checkpoint else None,
        lease_s=0.0,
        receipt=None,
        **own_process(),
    )[0]
    execute(connection, "end_attempt", attempt_id=row["attempt_id"], outcome=outcome)
    return int(row["attempt_id"])


def _checkpoint(connection: Connection, run: str, attempt_id: int | None, step: int) -> Row | None:
    """Return the checkpoint of a step on the history of a run's attempt; None for step 0, the initial weights.

    Raises:
        ConfigError: there is none, or its files were removed.
    """
    if step == 0:
        return None
    checkpoints = fetch(connection, "last_checkpoint", attempt_id=attempt_id, step=step)
    if not checkpoints:
        raise ConfigError(
            f"the run {run!r} has no checkpoint of step {step}",
            value=step,
            allowed=", ".join(map(str, _kept_steps(connection, attempt_id))),
            todo="choose one of these; trainer.keep_checkpoints is the number that a run keeps",
        )
    return checkpoints[0]


def _kept_steps(connection: Connection, attempt_id: int | None) -> list[int]:
    return [0] + [row["trainer_step"] for row in fetch(connection, "kept_steps", attempt_id=attempt_id)]
