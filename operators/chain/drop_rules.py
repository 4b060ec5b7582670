"""The chain's own rules, as one reason per row: null where the row stays, else why it is dropped.

Whatever the stages are, the chain drops groups too small to compare their rollouts, and rows without a finite reward.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from operators.groups import Groups, Ints

_LIMIT = ", min_group_size is "


def short_groups(groups: Groups, rows: Ints, min_group_size: int, left: str) -> pa.Array | None:
    """Return reasons for rows of groups with fewer than `min_group_size` rollouts (branches of one rollout count once).

    Args:
        groups: groups of the whole batch.
        rows: the rows of the batch that remain.

    Returns:
        one entry for each of `rows`; None where no group is short.
    """
    if min_group_size <= 1 or not len(rows):
        return None
    remains_R = np.zeros(groups.num_rollouts, np.bool_)
    remains_R[groups.rollout_N[rows]] = True
    counts_G = np.bincount(groups.group_R[remains_R], minlength=groups.num_groups)
    group_of_row = groups.group_N[rows]
    counts = counts_G[group_of_row]
    short = counts < min_group_size
    if not short.any():
        return None
    texts = pa.array(
        [
            f"only {count} rollout{'s' if count > 1 else ''} of the group {left}{_LIMIT}{min_group_size}"
            for count in range(min_group_size)
        ]
    )
    return texts.take(pa.array(np.where(short, counts, 0), mask=~short))


def is_short(reason: str) -> bool:
    """Return whether a row was dropped because its group became too small, and not for its own content."""
    return _LIMIT in reason


def without_reward(reward: pa.Array, before_value: str) -> pa.Array | None:
    """Return reasons for rows whose reward is null, NaN or infinite: `before_value` and the value. None if all are numbers."""
    finite = pc.fill_null(pc.is_finite(reward), False)
    if pc.all(finite, min_count=0).as_py():
        return None
    value = pc.fill_null(pc.cast(reward, pa.string()), "null")
    reasons = pc.binary_join_element_wise(before_value, value, "")
    return pc.if_else(finite, pa.scalar(None, pa.string()), reasons)


def turned_non_finite(before: pa.Array, after: pa.Array) -> pa.Array | None:
    """Return reasons for rows whose finite reward a stage turned into null, NaN or infinity; None if there are none."""
    reasons = without_reward(after, "the stage turned the reward into ")
    if reasons is None:
        return None
    was_finite = pc.fill_null(pc.is_finite(before), False)
    return pc.if_else(was_finite, reasons, pa.scalar(None, pa.string()))
