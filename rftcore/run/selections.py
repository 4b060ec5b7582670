"""Whether an algorithm can learn from every row of a stored selection, checked before a run is stored for it.

The trainer would refuse such a row, too, but only in the step that draws it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rftcore.algorithms.algorithm import Algorithm
from rftcore.teachers.base import ARRAY as TEACHER_ARRAY
from rftdata.attempts.stored_selection import Selection, selected_rewards, small_groups
from rftdata.buffer import Buffer
from rftdata.errors import ConfigError


def refuse_untrainable(algorithm: Algorithm, buffer: Buffer, selected: Selection) -> None:
    """Refuse a selection with rows that the algorithm cannot learn from.

    Raises:
        ConfigError: groups have too few rollouts, or experiences lack rewards or log-probabilities, the policy's or a
            teacher's; names the first one.
    """
    if selected.kind == "group":
        small = small_groups(buffer.database, selected, algorithm.min_group_size)
        if small:
            raise ConfigError(
                f"{len(small)} of the {len(selected.item_ids)} groups that sampling.source selects have too few rollouts for {algorithm.name}; "
                f"the first is group {min(small)}",
                value=small[min(small)],
                allowed=f"{algorithm.min_group_size} or more",
                todo="leave them out: select group_id from rft.v_group where num_ok > 1",
            )
    # An expert's responses have neither.
    needs_logprobs = algorithm.uses_behavior_logprobs and algorithm.expert is None
    needs_rewards = algorithm.uses_rewards and algorithm.expert is None
    needs_teacher = algorithm.reads_stored_teacher
    if not (needs_logprobs or needs_rewards or needs_teacher):
        return
    unrewarded, unsampled, untaught = [], [], []
    for rewards in selected_rewards(buffer.database, selected):
        ids = list(rewards)
        unrewarded += [number for number, reward in rewards.items() if reward is None] if needs_rewards else []
        unsampled += _unsampled(buffer, ids) if needs_logprobs else []
        untaught += _untaught(buffer, ids) if needs_teacher else []
    if unsampled:
        raise ConfigError(
            f"{len(unsampled)} of the experiences that sampling.source selects have no log-probabilities of the policy that sampled them, "
            f"which {algorithm.name} needs; the first is experience {unsampled[0]}",
            todo="leave out what was imported or written by people (where source = 'explorer'), or train on it with sft",
        )
    if untaught:
        raise ConfigError(
            f"{algorithm.name} reads the teacher's stored log-probabilities, and {len(untaught):,} of the experiences that sampling.source "
            f"selects have none; the first is experience {untaught[0]}",
            value=f"no array {TEACHER_ARRAY}",
            todo="select the experiences of runs with explorer.teacher, or set algorithm.teacher to a model, which the trainer then computes",
        )
    if unrewarded:
        raise ConfigError(
            f"{len(unrewarded)} of the experiences that sampling.source selects have no reward, which {algorithm.name} needs; the first is "
            f"experience {unrewarded[0]}",
            todo="set the rewards (UPDATE rft.experience SET reward = …), or leave these rows out",
        )


def _unsampled(buffer: Buffer, experience_ids: Sequence[int]) -> list[int]:
    """Return the experiences with a token that counts and that no policy sampled."""
    found = []
    logprobs, masks = (buffer.arrays(experience_ids, name) for name in ("behavior_logprobs", "loss_mask"))
    for experience_id, logprobs_T, mask_T in zip(experience_ids, logprobs, masks, strict=True):
        if logprobs_T is None or mask_T is None or bool(np.isnan(logprobs_T[mask_T.astype(bool)]).any()):
            found.append(experience_id)
    return found


def _untaught(buffer: Buffer, experience_ids: Sequence[int]) -> list[int]:
    """Return the experiences whose tokens no teacher has scored."""
    arrays = buffer.arrays(experience_ids, TEACHER_ARRAY)
    return [number for number, array in zip(experience_ids, arrays, strict=True) if array is None]
