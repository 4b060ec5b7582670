"""The groups that one transaction stores, and the errors of groups that were not stored."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import psycopg

from rftdata.errors import BufferUnavailableError, RftError
from rftdata.experience import Group, Rollout, Sequence

# Errors of values that cannot be encoded, or that the database does not accept. `struct.error` has no better base.
UNSTORABLE = (
    TypeError,
    ValueError,
    ArithmeticError,
    AttributeError,
    LookupError,
    struct.error,
    psycopg.DataError,
    psycopg.IntegrityError,
    psycopg.ProgrammingError,
)


@dataclass
class WriteBatch:
    """Groups that one transaction stores, with what is known of it over its retries.

    Attributes:
        group_ids: ids that the newest try assigned, in order of the groups. If a later try finds the receipt, these were stored; empty if an
            earlier caller stored the batch.
        is_undecided: whether a try may have been committed, or may still be: its COMMIT was sent, and the answer was lost. A later try that
            finds no receipt proves that it was not.
    """

    groups: list[Group]
    receipt: uuid.UUID
    group_ids: list[int] = field(default_factory=list)
    is_undecided: bool = False

    @property
    def rollouts(self) -> list[tuple[int, Rollout]]:
        """The rollouts in the order in which they are stored, each with the index of its group."""
        return [(i, rollout) for i, group in enumerate(self.groups) for rollout in group.rollouts]

    @property
    def sequences(self) -> list[Sequence]:
        """The experiences in the order in which they are stored: the n-th is row n of the segment."""
        return [sequence for group in self.groups for rollout in group.rollouts for sequence in rollout.sequences]


def unknown_outcome(groups: Items[Group]) -> BufferUnavailableError:
    """Return the error of groups that may have been stored."""
    return BufferUnavailableError(
        f"whether {len(groups)} groups were stored is unknown: the database did not answer when they were committed, nor afterwards",
        todo="look for them before they are written again, or write with a receipt, under which groups are stored once",
    )


def refusal(groups: Items[Group], error: Exception) -> Exception:
    """Return the error of groups that cannot be stored."""
    if isinstance(error, RftError) or not isinstance(error, UNSTORABLE):
        return error
    names = ", ".join(str(g.task_key if g.group_id is None else g.group_id) for g in groups[:3])
    return RftError(
        f"{'groups' if len(groups) > 1 else 'the group'} {names} cannot be stored: {type(error).__name__}: {' '.join(str(error).split())}",
        todo="correct the values; nothing was stored",
    )
