"""The line of `rft status` about roles that wait: for what, and why.

A trainer waits for groups that explorers sample and the pipeline decides on; explorers wait for the policy that the rule of `sync` requires,
and so for the trainer. The line is computed from a snapshot and the run's stored configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rftdata.attempts.sampling import SamplingConfig
from rftdata.config import SyncConfig
from rftdata.planning.pacing import Pacing
from rftdata.reports.progress import Snapshot, WorkerState
from rftdata.workers.worker import describe_state

_ROLES = ("trainer", "explorer", "pipeline")
_SUPPLIERS = {"explorer": "rft explore CONFIG", "pipeline": "rft process CONFIG"}


def what_waits(snapshot: Snapshot, config: Mapping[str, Any]) -> str | None:
    """Return which roles wait, for what and why, or that none waits; None for a run that is not at work.

    Args:
        config: of the run, as it is stored.
    """
    alive = [worker for worker in snapshot.workers if worker.liveness == "alive" and worker.role in _ROLES]
    if snapshot.status not in ("created", "running") or not alive:
        return None
    by_role = {role: [worker for worker in alive if worker.role == role] for role in _ROLES}
    waiting = {role: [worker for worker in workers if worker.waiting_for] for role, workers in by_role.items()}
    clauses = []
    for role in _ROLES:
        if waiting[role]:
            who = _who(role, len(waiting[role]), len(by_role[role]))
            why = _why(role, waiting[role], snapshot, config, by_role)
            clauses.append(f"{who} for {waiting[role][0].waiting_for}{f' ({why})' if why else ''}")
    working = [
        f"{_who(role, 1, 1)} {_doing(by_role[role][0])}" for role in _ROLES if by_role[role] and not waiting[role]
    ]
    if not clauses:
        return f"nothing waits: {'; '.join(working)}"
    return "waits: " + "; ".join(clauses) + (f" | at work: {'; '.join(working)}" if working else "")


def _who(role: str, number: int, of: int) -> str:
    return f"the {role}" if of == 1 else f"{number} of {of} {role}s"


def _doing(worker: WorkerState) -> str:
    return describe_state(worker.state, worker.waiting_for)


def _why(
    role: str,
    waiting: list[WorkerState],
    snapshot: Snapshot,
    config: Mapping[str, Any],
    by_role: dict[str, list[WorkerState]],
) -> str:
    """Return why a role has to wait; empty if there is nothing to add."""
    what = waiting[0].waiting_for or ""
    if role == "trainer" and "groups for step" in what:
        queue = snapshot.queue
        later = f"{queue.ready_later} ready for later steps"
        if not config.get("sampling", {}).get("over_sampling"):
            later += ", which sampling.over_sampling would let it take"
        parts = [
            f"{queue.ready - queue.ready_later} ready for it",
            *([later] if queue.ready_later else []),
            f"{queue.claimed} being sampled",
            f"{queue.sealed} await verdicts",
            f"{queue.planned} planned",
        ]
        absent = [
            f"no {supplier} is at work: {command}"
            for supplier, command in _SUPPLIERS.items()
            if not by_role[supplier] and _needs(supplier, snapshot, config)
        ]
        return "; ".join([", ".join(parts), *absent])
    if role == "explorer" and what.startswith("the policy after"):
        return _pacing(waiting, config)
    return ""


def _needs(supplier: str, snapshot: Snapshot, config: Mapping[str, Any]) -> bool:
    """Return whether the trainer needs a role in order to continue."""
    if supplier == "pipeline":
        return snapshot.queue.sealed > 0 or snapshot.queue.ready == 0
    return bool(config.get("run", {}).get("mode", "both") == "both") and snapshot.queue.claimed == 0


def _pacing(waiting: list[WorkerState], config: Mapping[str, Any]) -> str:
    """Describe which explorer step may not start yet, and the policy that it needs."""
    steps = [step for worker in waiting if isinstance(step := worker.progress.get("policy_step"), int)]
    if not steps:
        return ""
    sync, sampling = (
        SyncConfig.model_validate(config.get("sync", {})),
        SamplingConfig.model_validate(config.get("sampling", {})),
    )
    pacing = Pacing(interval=sync.interval, offset=sync.offset, window=sampling.window)
    newest = max(steps)
    blocked = pacing.last_step(newest) + 1
    needed = pacing.needed_policy(blocked)
    rule = {(1, 0): "on-policy", (1, 1): "one step off"}.get(
        (sync.interval, sync.offset), f"sync.interval {sync.interval}, sync.offset {sync.offset}"
    )
    if blocked - needed >= pacing.window:
        rule = f"sampling.max_staleness {sampling.max_staleness}"
    if sampling.over_sampling:
        rule += f", sampling.over_sampling {sampling.over_sampling:g}"
    return f"explorer step {blocked} needs the policy of trainer step {needed}, and has that of step {newest}: {rule}"
