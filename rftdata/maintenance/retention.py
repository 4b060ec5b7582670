"""Retention: rules that limit how long experiences are kept.

Rules apply to whole groups, newest first. Groups older than an age, or beyond a number or a size, are purged (`rftdata.maintenance.purge`)
with the rule as the reason. Rules never purge groups that are labelled (unless the rule includes them), open, or may still be trained on: groups of a run
that has started and not finished, until a committed checkpoint contains them or they are dropped. Those groups count, but stay.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field

from rftdata.buffer import Buffer
from rftdata.config import RetentionConfig, RetentionRule
from rftdata.maintenance.erasure import ErasureResult, erase, vacuum
from rftdata.maintenance.purge import PurgeOrder, PurgeResult, purge_chosen
from rftdata.postgres.database import Connection, Row, fetch


@dataclass
class RetentionResult:
    """The result of the rules, or the expected one.

    Attributes:
        purged: purge results by the text of the rule.
        num_protected: experiences that a rule did not purge because they are labelled or still needed.
    """

    purged: dict[str, PurgeResult] = field(default_factory=dict)
    num_protected: int = 0

    @property
    def num_experiences(self) -> int:
        return sum(part.num_experiences for part in self.purged.values())


def apply(
    buffer: Buffer, rules: RetentionConfig, *, author: str, dry_run: bool = False, starting_run_id: int | None = None
) -> RetentionResult:
    """Purge what exceeds the rules.

    Args:
        starting_run_id: a run that is about to be trained for the first time.
    """
    done, chosen = RetentionResult(), set[int]()
    groups = _Groups(buffer, rules, starting_run_id)
    scopes: list[tuple[str | None, RetentionRule]] = [*sorted(rules.tasksets.items()), (None, rules)]
    for taskset, rule in scopes:
        scope = "" if taskset is None else f"taskset {taskset}: "
        for limit in _limits(rule):
            choice = _BeyondLimit(groups, rules, taskset, limit, frozenset(chosen))
            text = (
                f"{scope}{limit} {getattr(rule, limit):g}"
                if limit == "max_age_days"
                else f"{scope}{limit} {getattr(rule, limit)}"
            )
            order = PurgeOrder("retention", text, f"retention: {text}", author)
            purged = purge_chosen(buffer, choice, order, dry_run=dry_run)
            if choice.ids:
                done.purged[text] = purged
            chosen |= choice.groups
            done.num_protected += choice.num_protected
    return done


def enforce(
    buffer: Buffer, rules: RetentionConfig, *, author: str, starting_run_id: int | None = None
) -> tuple[RetentionResult, ErasureResult]:
    """Apply the rules, vacuum after a purge, and overwrite ranges of earlier purges that are due."""
    done = apply(buffer, rules, author=author, starting_run_id=starting_run_id)
    if done.purged:
        vacuum(buffer, rewrite=False)
    return done, erase(buffer)


def _limits(rule: RetentionRule) -> list[str]:
    """Return the names of the limits that a rule sets."""
    return [name for name in ("max_age_days", "max_experiences", "max_bytes") if getattr(rule, name) is not None]


class _Groups:
    """The groups of a buffer with the facts that rules read, newest first."""

    def __init__(self, buffer: Buffer, rules: RetentionConfig, starting_run_id: int | None) -> None:
        self._buffer = buffer
        self._facts = {"keep_labelled": rules.keep_labelled, "starting_run_id": starting_run_id}
        self._kept: list[Row] | None = None

    def at_first(self) -> list[Row]:
        """Return the groups as of now or of an earlier limit, since which there was neither a wait nor a purge."""
        if self._kept is None:
            self._kept = self._buffer.database.fetch("retention_groups", experience_ids=None, **self._facts)
        return self._kept

    def again(self) -> list[Row]:
        """Return the groups as of now, before a purge."""
        self._kept = None
        return self._buffer.database.fetch("retention_groups", experience_ids=None, **self._facts)

    def of(self, connection: Connection, ids: Sequence[int]) -> list[Row]:
        """Return the groups of some experiences, as a transaction sees them."""
        return fetch(connection, "retention_groups", experience_ids=list(ids), **self._facts)


class _BeyondLimit:
    """The experiences beyond one limit, in groups that no rule protects.

    Args:
        taskset: the only taskset that the limit is for; None for all.
        limit: name of the limit.
        before: groups that other limits have chosen.

    Attributes:
        ids, groups, num_protected: of the last choice: the experiences to purge, the groups beyond the limit, and the number of experiences that
            are protected.
    """

    def __init__(
        self, all_groups: _Groups, rules: RetentionConfig, taskset: str | None, limit: str, before: frozenset[int]
    ) -> None:
        self._all, self._before = all_groups, before
        self._has_chosen = False
        self._taskset, self._limit = taskset, limit
        self._rule = rules if taskset is None else rules.tasksets[taskset]
        self.ids: list[int] = []
        self.groups: set[int] = set()
        self.num_protected = 0

    def choose(self) -> list[int]:
        rows = self._all.again() if self._has_chosen else self._all.at_first()
        self._has_chosen = True
        over = _over(
            self._rule, self._limit, [row for row in rows if self._taskset is None or row["taskset"] == self._taskset]
        )
        self.num_protected = sum(row["num_experiences"] for row in over if row["protected"])
        free = [row for row in over if not row["protected"] and row["group_id"] not in self._before]
        self.ids = [i for row in free for i in row["experience_ids"]]
        self.groups = {row["group_id"] for row in over}
        return self.ids

    def confirm(self, connection: Connection, ids: Sequence[int], changed: Sequence[int]) -> list[int]:
        # A label or a pair protects the whole group, and a run all its groups, without a change of their rows.
        rows = self._all.of(connection, ids)
        free = {i for row in rows if not row["protected"] for i in row["experience_ids"]}
        return [i for i in ids if i in free]


def _over(rule: RetentionRule, limit: str, groups: list[Row]) -> list[Row]:
    """Return the groups beyond a limit; `groups` are newest first."""
    if limit == "max_age_days":
        cut = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=rule.max_age_days or 0.0)
        return [row for row in groups if row["created_at"] < cut]
    if limit == "max_experiences":
        return _beyond(groups, "num_experiences", rule.max_experiences or 0)
    return _beyond(groups, "num_bytes", rule.max_bytes or 0)


def _beyond(groups: list[Row], name: str, limit: int) -> list[Row]:
    """Return the groups from the first one at which the sum exceeds a limit."""
    total = 0
    for i, row in enumerate(groups):
        total += int(row[name])
        if total > limit:
            return groups[i:]
    return []
