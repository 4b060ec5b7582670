"""Policy versions: the weights that a run's trainers have published."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from rftdata.postgres.database import records
from rftdata.run import Run

FOLDER = "folder"
"""The method of weights with which engines begin, in a run that only evaluates."""


@dataclass(frozen=True, kw_only=True)
class PolicyVersion:
    """Published weights; its fields are columns of `rft.policy_version`."""

    policy_version_id: int
    attempt_id: int
    trainer_step: int
    method: str
    uri: str
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process of an attempt; `alive` is true while its lease is valid, which a killed process no longer renews."""

    host: str
    pid: int
    alive: bool
    lease_until: datetime


def newest_policy(run: Run) -> PolicyVersion | None:
    """Return the newest weights that the current attempt of a run has published."""
    return next(iter(records(PolicyVersion, run.database.fetch("newest_policy", run_id=run.run_id))), None)


def first_policy(run: Run, attempt_id: int) -> PolicyVersion | None:
    """Return the version published before the first step of an attempt's history."""
    rows = run.database.fetch("first_policy", run_id=run.run_id, attempt_id=attempt_id)
    return next(iter(records(PolicyVersion, rows)), None)


def publisher(run: Run, policy: PolicyVersion) -> Holder:
    """Return the trainer that published a version."""
    return records(Holder, run.database.fetch("attempt_holder", attempt_id=policy.attempt_id))[0]
