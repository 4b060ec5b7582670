"""Retention: rules that limit how long experiences are kept.

Rules apply to whole groups, newest first. Groups older than an age, or beyond a number or a size, are purged (`rftdata.maintenance.purge`)
with the rule as the reason. Rules never purge groups that are labelled (unless the rule includes them), open, or may still be trained on: groups of a run
that has started and not finished, until a committed checkpoint contains them or they are dropped. Those groups count, but stay.
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
    """The result of the rules, or the expected one.

    Attributes:
        purged: purge results by the text of the rule.
        num_protected: experiences that a rule did not purge because they are labelled or still needed.
    """

    purged: dict[str, Purged] = field(default_factory=dict)
    num_protected: int = 0

    @property
    def num_experiences(self) -> int:
        return sum(part.num_experiences for part in self.purged.values())


def apply(
    buffer: Buffer, rules: RetentionConfig, *, author: str, dry_run: bool = False, starting_run_id: int | None = None
) -> Retained:
    """Purge what exceeds the rules.

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
    """Apply the rules, vacuum after a purge, and overwrite ranges of earlier purges that are due."""
    done = apply(buffer, rules, author=author, starting_run_id=starting_run_id)
    if done.purged:
        vacuum(buffer, rewrite=False)
    return done, erase(buffer)


def _over(rule: RetentionRule, groups: list[Row]) -> Iterable[tuple[str, list[Row]]]:
    """Yield every limit that is set, as text, with the groups beyond it; `groups` are newest first."""
    if rule.max_age_days is not None:
        cut = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=rule.max_age_days)
        yield f"max_age_days {rule.max_age_days:g}", [row for row in groups if row["created_at"] < cut]
    if rule.max_experiences is not None:
        yield f"max_experiences {rule.max_experiences}", _beyond(groups, "num_experiences", rule.max_experiences)
    if rule.max_bytes is not None:
        yield f"max_bytes {rule.max_bytes}", _beyond(groups, "num_bytes", rule.max_bytes)


def _beyond(groups: list[Row], name: str, limit: int) -> list[Row]:
    """Return the groups from the first one at which the sum exceeds a limit."""
    total = 0
    for i, row in enumerate(groups):
        total += int(row[name])
        if total > limit:
            return groups[i:]
    return []
