"""Rows of `rft.turn_reward` for experiences of before schema 0003, whose rewards of turns are in their arrays alone.

Until then such experiences are trained on with the values of their arrays, and their rewards of turns cannot be corrected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rftdata.buffer import Buffer
from rftdata.experience import STEP_REWARD, TURNS
from rftdata.postgres.binary_copy import TURN_REWARD_COLUMNS, copy_bytes, turn_reward_row
from rftdata.postgres.database import Row
from rftdata.postgres.locks import Lock, holding
from rftdata.segments.codec import ColumnReader

_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class AddedTurnRewards:
    """What was added.

    Attributes:
        num_experiences: experiences that have got rows.
        num_damaged: segments that could not be read, whose experiences are left as they are.
        has_archived: whether experiences are left because their runs are archived.
    """

    num_experiences: int
    num_damaged: int
    has_archived: bool


def are_complete(buffer: Buffer) -> bool:
    """Return whether every reward of a turn is a row, as it is in buffers that began with schema 0003."""
    return not buffer.database.fetch("turn_rewards_from")


def add_turn_rewards(buffer: Buffer) -> AddedTurnRewards:
    """Add the missing rows; what was added before stays as it is."""
    with holding(buffer.database, Lock("turn rewards"), wait_s=math.inf):
        return _add(buffer)


def _add(buffer: Buffer) -> AddedTurnRewards:
    added, damaged = 0, set[int]()
    found = buffer.database.fetch("turn_rewards_from")
    if not found:
        return AddedTurnRewards(0, 0, False)
    for rows in _pages(buffer, found[0]["turn_rewards_from"]):
        batches, errors = buffer.reader.intact(sorted({row["segment_id"] for row in rows}))
        damaged |= {error.segment_id for error in errors}
        rewards = {i: ColumnReader(b, STEP_REWARD) for i, b in batches.items() if STEP_REWARD in b.schema.names}
        turns = {i: ColumnReader(b, TURNS) for i, b in batches.items() if TURNS in b.schema.names}
        found_rewards = [(row["experience_id"], _rewards(row, rewards, turns)) for row in rows]
        lines = [turn_reward_row(key, turn, value, value) for key, values in found_rewards for turn, value in values]
        if lines:
            added += sum(bool(values) for _, values in found_rewards)
            with buffer.database.transaction() as connection:
                copy_bytes(connection, "rft.turn_reward", TURN_REWARD_COLUMNS, lines)
    if not damaged and not found[0]["has_archived"]:
        buffer.database.run("all_have_turn_rewards")
    return AddedTurnRewards(added, len(damaged), found[0]["has_archived"])


def _pages(buffer: Buffer, from_segment: int) -> Iterator[list[Row]]:
    after = 0
    while rows := buffer.database.fetch_by_index(
        "without_turn_rewards", after=after, from_segment=from_segment, count=_ROWS_AT_ONCE
    ):
        after = rows[-1]["experience_id"]
        if without := [row for row in rows if row["is_without"]]:
            yield without


def _rewards(row: Row, rewards: dict[int, ColumnReader], turns: dict[int, ColumnReader]) -> list[tuple[int, float]]:
    """Return number and reward of each turn; none if the array has not one finite number per turn, which no algorithm reads."""
    segment_id, place = row["segment_id"], row["segment_row"]
    values = rewards[segment_id].row(place) if segment_id in rewards else None
    if values is None:
        return []
    of_turns = turns[segment_id].row(place) if segment_id in turns else None
    numbers = [row["turn_index"]] if of_turns is None else of_turns[:, 2].tolist()
    if values.shape != (len(numbers),) or not np.isfinite(values).all():
        return []
    if (len(numbers), numbers[0]) != (row["num_turns"], row["turn_index"]):
        return []  # wrong facts, see `rftdata.maintenance.turn_facts`
    return list(zip(numbers, values.tolist(), strict=True))
