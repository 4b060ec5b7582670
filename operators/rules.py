"""The chain's own rules, as reasons per row: null where the row stays, else why it is dropped.

A group too small to be compared with itself, and a reward that is no number, are refused whatever the stages are.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from operators.base import StageOutcome


def short_groups(table: pa.Table, min_group_size: int, left: str) -> pa.Array:
    """Reasons for the rows of groups with fewer than `min_group_size` rollouts (turns of one rollout count once)."""
    if min_group_size <= 1 or not table.num_rows:
        return pa.nulls(table.num_rows, pa.string())
    counts = table.group_by("group_id", use_threads=False).aggregate([("rollout_index", "count_distinct")])
    reasons = pa.array(
        [
            f"only {count} rollout{'s' if count > 1 else ''} of the group {left}, min_group_size is {min_group_size}"
            if count < min_group_size
            else None
            for count in counts["rollout_index_count_distinct"].to_pylist()
        ],
        pa.string(),
    )
    return reasons.take(pc.index_in(table["group_id"].combine_chunks(), value_set=counts["group_id"]))


def without_reward(table: pa.Table, before_value: str) -> pa.Array:
    """Reasons for rows whose reward is null, NaN or infinite: `before_value` and the value."""
    reward = table["reward"].combine_chunks()
    finite = pc.fill_null(pc.is_finite(reward), False)
    if pc.all(finite, min_count=0).as_py():
        return pa.nulls(table.num_rows, pa.string())
    shown = pc.fill_null(pc.cast(reward, pa.string()), "null")
    reasons = pc.binary_join_element_wise(before_value, shown, "")
    return pc.if_else(finite, pa.scalar(None, pa.string()), reasons)


def spoilt_rewards(before: pa.Table, after: pa.Table, outcome: StageOutcome) -> pa.Array | None:
    """Reasons for rows whose finite reward a stage turned into null, NaN or infinity."""
    if "reward" not in outcome.columns:
        return None
    reasons = without_reward(after, "the stage turned the reward into ")
    was_finite = pc.fill_null(pc.is_finite(before["reward"].combine_chunks()), False)
    return pc.if_else(was_finite, reasons, pa.scalar(None, pa.string()))
