"""Retention: which experiences have been kept long enough.

Rules speak of whole groups, newest first: what is older than an age, or beyond a number or a size, is purged (`rftdata.maintenance.purge`), with its
rule as the reason. Rules never touch what is labelled (unless told to), open, or may still be trained on: groups of a run that has been
started and has not finished, until a committed checkpoint holds them or they are dropped. Those count, but stay.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass, field

from rftdata.buffer import Buffer
from rftdata.config import RetentionConfig, RetentionRule
from rftdata.maintenance.purge import Erased, Purged, erase, purge_experiences, vacuum
from rftdata.postgres.database import Row


@dataclass
class Retained:
    """What the rules did, or would do.

    Attributes:
        purged: what each rule purged, by its text.
        num_protected: experiences that a rule would have purged, were they not labelled or still needed.
    """

    purged: dict[str, Purged] = field(default_factory=dict)
    num_protected: int = 0

    @property
    def num_experiences(self) -> int:
        return sum(part.num_experiences for part in self.purged.values())


def apply(
    buffer: Buffer, rules: RetentionConfig, *, author: str, dry_run: bool = False, starting_run_id: int | None = None
) -> Retained:
    """Purge what the rules no longer keep.

    Args:
        starting_run_id: a run that is about to be trained for the first time.
    """
    groups = buffer.database.fetch(
        "retention_groups", keep_labelled=rules.keep_labelled, starting_run_id=starting_run_id
    )
    done = Retained()
    chosen: set[int] = set()
    scopes: list[tuple[str, RetentionRule, list[Row]]] = [
        (f"taskset {name}: ", rule, [row for row in groups if row["taskset"] == name])
        for name, rule in sorted(rules.tasksets.items())
    ]
    for scope, rule, candidates in [*scopes, ("", rules, groups)]:
        for text, over in _over(rule, candidates):
            done.num_protected += sum(row["num_experiences"] for row in over if row["protected"])
            ids = [
                i
                for row in over
                if not row["protected"] and row["group_id"] not in chosen
                for i in row["experience_ids"]
            ]
            chosen |= {row["group_id"] for row in over}
            if ids:
                done.purged[scope + text] = purge_experiences(
                    buffer, ids, kind="retention", selection=scope + text, reason=f"retention: {scope}{text}", author=author,
                    dry_run=dry_run,
                )  # fmt: skip
    return done


def enforce(
    buffer: Buffer, rules: RetentionConfig, *, author: str, starting_run_id: int | None = None
) -> tuple[Retained, Erased]:
    """Apply the rules, clear away what was purged, and overwrite what earlier purges left that is due."""
    done = apply(buffer, rules, author=author, starting_run_id=starting_run_id)
    if done.purged:
        vacuum(buffer, rewrite=False)
    return done, erase(buffer)


def _over(rule: RetentionRule, groups: list[Row]) -> Iterable[tuple[str, list[Row]]]:
    """For every limit that is set, its text and the groups beyond it; `groups` are newest first."""
    if rule.max_age_days is not None:
        cut = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=rule.max_age_days)
        yield f"max_age_days {rule.max_age_days:g}", [row for row in groups if row["created_at"] < cut]
    if rule.max_experiences is not None:
        yield f"max_experiences {rule.max_experiences}", _beyond(groups, "num_experiences", rule.max_experiences)
    if rule.max_bytes is not None:
        yield f"max_bytes {rule.max_bytes}", _beyond(groups, "num_bytes", rule.max_bytes)


def _beyond(groups: list[Row], name: str, limit: int) -> list[Row]:
    """Groups from the one on with which the sum exceeds a limit."""
    total = 0
    for i, row in enumerate(groups):
        total += int(row[name])
        if total > limit:
            return groups[i:]
    return []
