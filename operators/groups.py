"""Map the rows of a batch to rollouts and groups, for stages that compare them.

N rows, R rollouts, G groups. A row is a rollout of one or several turns, or a branch of one. A rollout of several rows counts once, with the
mean of their values, as it does for advantages. Where rows have roles, the rewards of two roles are not comparable: `Groups.by_role` numbers each role
of a group as a group of its own, and each role of a rollout as a rollout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Groups:
    """The groups of a batch. `x_N` has one entry a row, `x_R` one a rollout, and so on.

    Attributes:
        group_N: group of each row, as a number from 0 to G − 1, in ascending order of group_id.
        rollout_N: rollout of each row, 0 to R − 1, in ascending order of group_id and rollout_index.
        group_R: group of each rollout.
        num_groups: G.
    """

    group_N: Ints
    rollout_N: Ints
    group_R: Ints
    num_groups: int

    @classmethod
    def of(cls, table: pa.Table) -> Groups:
        ids, group_N = np.unique(table["group_id"].to_numpy(), return_inverse=True)
        rollout_index = table["rollout_index"].to_numpy().astype(np.int64)
        span = int(rollout_index.max(initial=0)) + 1
        rollouts, rollout_N = np.unique(group_N * span + rollout_index, return_inverse=True)
        return cls(group_N.astype(np.int64), rollout_N.astype(np.int64), rollouts // span, len(ids))

    @classmethod
    def by_role(cls, table: pa.Table) -> Groups:
        """Return the groups whose rollouts are comparable; a table without the column `role`, or without roles, has those of `of`."""
        if "role" not in table.column_names or table["role"].null_count == table.num_rows:
            return cls.of(table)
        roles, role_N = np.unique(pc.fill_null(table["role"], "").to_numpy(zero_copy_only=False), return_inverse=True)
        _, group_N = np.unique(table["group_id"].to_numpy(), return_inverse=True)
        keys = pa.array(group_N * len(roles) + role_N)
        return cls.of(pa.table({"group_id": keys, "rollout_index": table["rollout_index"]}))

    @property
    def num_rollouts(self) -> int:
        return len(self.group_R)

    def rollout_means(self, values_N: Floats) -> Floats:
        """Return R means over rows. NaN values are ignored; a rollout with no other value is NaN."""
        has_value_N = ~np.isnan(values_N)
        counts = np.bincount(self.rollout_N[has_value_N], minlength=self.num_rollouts)
        sums = np.bincount(self.rollout_N[has_value_N], weights=values_N[has_value_N], minlength=self.num_rollouts)
        means: Floats = np.divide(sums, counts, out=np.full(self.num_rollouts, np.nan), where=counts > 0)
        return means


@dataclass(frozen=True)
class Correct:
    """Which rollouts are correct.

    Attributes:
        correct_R: true where the rollout is known to be correct.
        known_R: false where it has no value to decide by.
        num_correct_G, num_known_G: counts per group.
    """

    correct_R: Mask
    known_R: Mask
    num_correct_G: Ints
    num_known_G: Ints

    @classmethod
    def of(cls, groups: Groups, values: pa.Array, above: float) -> Correct:
        """Count a rollout as correct if its value is greater than `above`; without a number it is neither correct nor wrong."""
        values_R = groups.rollout_means(finite(values))
        has_value_R = ~np.isnan(values_R)
        correct = has_value_R & (np.nan_to_num(values_R, nan=-np.inf) > above)
        counted = [np.bincount(groups.group_R[of], minlength=groups.num_groups) for of in (correct, has_value_R)]
        return cls(correct, has_value_R, *counted)


def finite(values: pa.Array) -> Floats:
    """Convert to doubles; null, NaN and ±inf become NaN."""
    numbers = pc.fill_null(pc.cast(values, pa.float64()), np.nan).to_numpy(zero_copy_only=False)
    return np.where(np.isfinite(numbers), numbers, np.nan)


def extremes(values: Floats, sets: Ints, num_sets: int) -> tuple[Floats, Floats]:
    """Return the least and greatest value of each set; +inf and -inf for an empty set."""
    lowest, highest = np.full(num_sets, np.inf), np.full(num_sets, -np.inf)
    np.minimum.at(lowest, sets, values)
    np.maximum.at(highest, sets, values)
    return lowest, highest


def fewest_first(order_N: npt.NDArray[np.generic], members_N: Ints) -> Ints:
    """Return the rank (from 0) of each row in its set, sorted by `order_N`."""
    sort = np.lexsort((order_N, members_N))
    members = members_N[sort]
    starts = np.flatnonzero(np.r_[True, members[1:] != members[:-1]]) if len(members) else np.array([], np.int64)
    lengths = np.diff(np.r_[starts, len(members)])
    places = np.arange(len(members)) - np.repeat(starts, lengths)
    ranks = np.empty(len(members), np.int64)
    ranks[sort] = places
    return ranks


def hashed(values: npt.NDArray[np.integer], seed: int) -> npt.NDArray[np.uint64]:
    """Hash numbers evenly over 64 bits, the same everywhere for the same value and seed (the finaliser of SplitMix64)."""
    with np.errstate(over="ignore"):
        state = values.astype(np.uint64) + np.uint64((seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return state ^ (state >> np.uint64(31))


def same_prompt(rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return, for each prompt of a group, the places of the rows that answer it, by rollout: their responses are comparable."""
    places_by_prompt: dict[tuple[int, str], list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        places_by_prompt[row["group_id"], row["prompt"]].append(place)
    return [
        sorted(places, key=lambda place: (rows[place]["rollout_index"], place)) for places in places_by_prompt.values()
    ]
