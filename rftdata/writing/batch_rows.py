"""The rows of a write batch: rollouts, experiences, prompts, rewards of turns and origins, each sent with one COPY.

Their ids are taken from the sequences before, so no row waits for another one, and the arrays are encoded meanwhile.
"""

from __future__ import annotations

from rftdata.experience import STEP_REWARD, Group, Sequence
from rftdata.postgres.binary_copy import (
    EXPERIENCE_COLUMNS,
    GROUP_PROMPT_COLUMNS,
    ROLLOUT_COLUMNS,
    TURN_REWARD_COLUMNS,
    ExperienceKeys,
    copy_bytes,
    experience_row,
    rollout_row,
    turn_reward_rows,
)
from rftdata.postgres.database import Connection, Row, copy_rows
from rftdata.writing import origins
from rftdata.writing.prompts import Prompts
from rftdata.writing.write_batch import WriteBatch

_EDIT_COLUMNS = (("experience_id", "int8"), ("annotation_id", "int8"))


def copy_rows_of(connection: Connection, run_id: int, batch: WriteBatch, ids: Row) -> None:
    """Send all rows of a batch except those of its groups.

    Args:
        batch: with its `group_ids`.
        ids: the result of the query `reserve_ids`.
    """
    rollouts = list(zip(ids["rollouts"], batch.rollouts, strict=True))
    copy_bytes(
        connection,
        "rft.rollout",
        ROLLOUT_COLUMNS,
        (rollout_row(rollout_id, batch.group_ids[i], rollout) for rollout_id, (i, rollout) in rollouts),
    )
    _copy_experiences(connection, run_id, batch, ids)
    origins.store(
        connection,
        run_id,
        [(i, g.origin) for i, g in zip(batch.group_ids, batch.groups, strict=True) if g.origin],
        list(zip(ids["experiences"], batch.sequences, strict=True)),
    )


def _copy_experiences(connection: Connection, run_id: int, batch: WriteBatch, ids: Row) -> None:
    """Send the experiences and their prompts, which are encoded while the server stores the rows before them."""
    keys, owners = _keys(run_id, batch, ids)
    sequences = batch.sequences
    parents = origins.parents_of(
        connection,
        run_id,
        [(k.experience_id, g, s) for k, g, s in zip(keys, owners, sequences, strict=True)],
    )
    prompts = Prompts()
    texts = (
        fields
        for group_id, group in zip(batch.group_ids, batch.groups, strict=True)
        for fields in prompts.of_group(group_id, [s for rollout in group.rollouts for s in rollout.sequences])
    )
    copy_bytes(
        connection,
        "rft.experience",
        EXPERIENCE_COLUMNS,
        (
            experience_row(key, group.source, s, origins.parent_id(group, s, parents), fields)
            for key, group, s, fields in zip(keys, owners, sequences, texts, strict=True)
        ),
    )
    copy_bytes(connection, "rft.group_prompt", GROUP_PROMPT_COLUMNS, prompts.rows)
    _copy_turn_rewards(connection, keys, sequences)
    edits = [(key.experience_id, s.edit_id) for key, s in zip(keys, sequences, strict=True) if s.edit_id is not None]
    if edits:
        copy_rows(connection, "rft.edited_response", _EDIT_COLUMNS, iter(edits))


def _copy_turn_rewards(connection: Connection, keys: list[ExperienceKeys], sequences: list[Sequence]) -> None:
    """Send the rewards of turns, if any were recorded; no statement otherwise."""
    rewarded = [(key, s) for key, s in zip(keys, sequences, strict=True) if STEP_REWARD in s.arrays]
    if rewarded:
        rows = (row for key, s in rewarded for row in turn_reward_rows(key.experience_id, key.turn_index, s))
        copy_bytes(connection, "rft.turn_reward", TURN_REWARD_COLUMNS, rows)


def _keys(run_id: int, batch: WriteBatch, ids: Row) -> tuple[list[ExperienceKeys], list[Group]]:
    """Return the keys and the group of each experience."""
    keys: list[ExperienceKeys] = []
    owners: list[Group] = []
    for rollout_id, (i, rollout) in zip(ids["rollouts"], batch.rollouts, strict=True):
        num_turns = 0
        for sequence in rollout.sequences:
            row = len(keys)
            keys.append(
                ExperienceKeys(
                    ids["experiences"][row],
                    run_id,
                    batch.group_ids[i],
                    rollout_id,
                    ids["segment"],
                    row,
                    sequence.first_turn(num_turns),
                )
            )
            owners.append(batch.groups[i])
            num_turns += sequence.num_turns
    return keys, owners
