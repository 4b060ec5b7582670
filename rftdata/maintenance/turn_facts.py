"""Comparison of what the database says about turns with the arrays in the segments, which have checksums: `rft doctor` reads all of them.

`rft.experience` repeats numbers of turns and tokens, and `rft.turn_reward` the array `step_reward`. The writer derives them from the arrays. A worker may
insert other ones, since the database checks what needs no arrays. Purged and archived experiences are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rftdata.buffer import Buffer
from rftdata.experience import STEP_REWARD, TURNS
from rftdata.postgres.database import Row, execute, fetch
from rftdata.segments.codec import ColumnReader

_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class WrongTurns:
    """An experience about whose turns the database and the arrays differ.

    Attributes:
        what: the differences, one sentence each.
        facts: values of columns of `rft.experience` by the arrays; empty if these are right.
        rewards: turns and rewards by the array, if those of the rows differ; None if they do not.
        has_other_length: whether its numbers of tokens differ, which do not follow from the arrays.
    """

    experience_id: int
    what: list[str]
    facts: dict[str, int] = field(default_factory=dict)
    rewards: list[tuple[int, float]] | None = None
    has_other_length: bool = False


class _SegmentTurns:
    """The facts about turns of each row of a segment."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        names = batch.schema.names
        self._turns = ColumnReader(batch, TURNS) if TURNS in names else None
        self._rewards = ColumnReader(batch, STEP_REWARD) if STEP_REWARD in names else None
        self.num_tokens: list[int] = pc.list_value_length(batch.column("token_ids")).to_pylist()
        mask = batch.column("loss_mask")
        before = np.concatenate([[0], np.cumsum(mask.values.to_numpy(zero_copy_only=False) != 0)])
        offsets = mask.offsets.to_numpy()
        self.num_trained: list[int] = (before[offsets[1:]] - before[offsets[:-1]]).tolist()

    def numbers(self, place: int) -> list[int] | None:
        """Return the numbers of the turns; None without the array, in which case there is one turn."""
        turns = None if self._turns is None else self._turns.row(place)
        return None if turns is None else turns[:, 2].tolist()

    def rewards(self, place: int, num_turns: int) -> list[float] | None:
        """Return the rewards of the turns; None if the array has not one finite number for each, and no algorithm reads it."""
        values = None if self._rewards is None else self._rewards.row(place)
        if values is None or values.shape != (num_turns,) or not np.isfinite(values).all():
            return None
        found: list[float] = values.tolist()
        return found


def wrong_turns(buffer: Buffer) -> Iterator[WrongTurns]:
    """Yield the experiences about whose turns database and arrays differ, in ascending order of their ids."""
    found = buffer.database.fetch("turn_rewards_from")
    from_segment = found[0]["turn_rewards_from"] if found else 0
    after = 0
    while rows := buffer.database.fetch_by_index("turns_to_compare", after=after, count=_ROWS_AT_ONCE):
        after = rows[-1]["experience_id"]
        rows = [row for row in rows if row["has_arrays"]]
        batches, _ = buffer.reader.intact(sorted({row["segment_id"] for row in rows}))
        segments = {key: _SegmentTurns(batch) for key, batch in batches.items()}
        for row in rows:
            segment = segments.get(row["segment_id"])
            # Damaged segments, and rows that they do not have, are findings of their own.
            if segment is None or row["segment_row"] >= len(segment.num_tokens):
                continue
            wrong = _compared(row, segment, may_lack_rows=row["segment_id"] < from_segment)
            if wrong is not None:
                yield wrong


def _compared(row: Row, segment: _SegmentTurns, *, may_lack_rows: bool) -> WrongTurns | None:
    place, what = row["segment_row"], list[str]()
    of_array = segment.numbers(place)
    numbers = [row["turn_index"]] if of_array is None else of_array
    is_old = of_array is None and row["num_trained_tokens"] == row["num_response_tokens"]  # of before schema 0002
    facts = {"num_turns": len(numbers), "turn_index": numbers[0]}
    facts |= {} if is_old else {"num_trained_tokens": segment.num_trained[place]}
    facts = {name: value for name, value in facts.items() if row[name] != value}
    what += [f"{name} is {row[name]}, and {value} by its arrays" for name, value in facts.items()]
    has_other_length = row["num_tokens"] != segment.num_tokens[place]
    if has_other_length:
        what.append(f"it has {row['num_tokens']} tokens, and {segment.num_tokens[place]} by its arrays")
    rewards = segment.rewards(place, len(numbers))
    expected = [] if rewards is None else list(zip(numbers, rewards, strict=True))
    stored = list(zip(row["turns"] or (), row["rewards"] or (), strict=True))
    differ = stored != expected and not (may_lack_rows and not stored)
    if differ:
        what.append(f"rft.turn_reward has {_shown(stored)}, and the array {STEP_REWARD} {_shown(expected)}")
    if not what:
        return None
    return WrongTurns(row["experience_id"], what, facts, expected if differ else None, has_other_length)


def _shown(rewards: list[tuple[int, float]]) -> str:
    if not rewards:
        return "no rewards of turns"
    shown = ", ".join(f"turn {turn}: {reward:g}" for turn, reward in rewards[:5])
    return shown + (f" and {len(rewards) - 5} more" if len(rewards) > 5 else "")


def correct_turns(buffer: Buffer, wrong: WrongTurns) -> bool:
    """Write what the arrays say about the turns of an experience; return whether that was possible.

    Rewards that were corrected by labels stay with their labels, so rows are only written anew where there are none.
    """
    if wrong.has_other_length:
        return False
    with buffer.database.transaction() as connection:
        if wrong.rewards is not None and fetch(connection, "labels_of_turns", experience_id=wrong.experience_id):
            return False
        if wrong.facts:
            values: dict[str, Any] = dict.fromkeys(("num_turns", "turn_index", "num_trained_tokens")) | wrong.facts
            fetch(connection, "allow_archive_changes")
            execute(connection, "correct_turn_facts", experience_id=wrong.experience_id, **values)
        if wrong.rewards is not None:
            execute(connection, "allow_turn_reward_deletes")
            execute(connection, "delete_turn_rewards", experience_id=wrong.experience_id)
            execute(connection, "refuse_turn_reward_deletes")
            execute(
                connection,
                "insert_turn_rewards",
                experience_ids=[wrong.experience_id] * len(wrong.rewards),
                turns=[turn for turn, _ in wrong.rewards],
                rewards=[reward for _, reward in wrong.rewards],
            )
    return True
