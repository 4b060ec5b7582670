"""What `sampling.source` selects, and whether the algorithm can learn from every row of it, checked before a run is stored.

The trainer would refuse such a row, too, but only in the step that draws it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

import rftdata
from rftcore.algorithms.algorithm import Algorithm
from rftcore.checks.algorithm import check_selected
from rftcore.config.run import RunConfig
from rftcore.resolved import ResolvedRun
from rftcore.teachers.base import ARRAY as TEACHER_ARRAY
from rftdata.attempts.stored_selection import Selection, num_steps, select, selected_rewards, small_groups
from rftdata.buffer import Buffer
from rftdata.errors import ConfigError


def select_source(resolved: ResolvedRun, buffer: Buffer) -> Selection | None:
    """Return the rows that `sampling.source` selects now; None for a run that samples for itself.

    Raises:
        QueryError: see `rftdata.attempts.stored_selection.select`.
        ConfigError: the algorithm cannot learn from the selected rows; see also `refuse_untrainable`.
    """
    source = resolved.config.sampling.source
    if source is None:
        return None
    sampling = resolved.config.sampling
    exponent = sampling.priority.exponent if sampling.order == "prioritized" else None
    selected = select(
        buffer.database,
        source.sql,
        pin_labels=source.pin_labels,
        priority_exponent=exponent,
        include_dropped=source.include_dropped,
        min_rollouts=resolved.algorithm.min_group_size,
        epochs=sampling.epochs,
    )
    check_selected(resolved.algorithm, selected.kind)
    refuse_untrainable(resolved.algorithm, buffer, selected)
    return selected


def planned_steps(config: RunConfig, num_selected: int | None) -> int:
    """Return the trainer steps of a run; `num_selected` is the number of rows of its stored selection, or None.

    Raises:
        ConfigError: there are more steps than the selection provides.
    """
    if config.only_evaluates:
        return 0
    if num_selected is None:
        assert config.steps is not None  # the configuration's own check
        return config.steps
    batch, epochs = config.trainer.batch_groups, config.sampling.epochs
    last = num_steps(num_selected, batch, epochs)
    if config.steps is not None and config.steps > last:
        raise ConfigError(
            f"steps exceeds what the stored selection provides: {num_selected} rows, trainer.batch_groups {batch}, sampling.epochs {epochs}",
            value=config.steps,
            allowed=f"up to {last}",
            todo="raise sampling.epochs, or omit steps",
        )
    return config.steps or last


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


def describe_selection(resolved: ResolvedRun) -> Iterator[str]:
    """Describe what the run would train on if it were created now."""
    config = resolved.config
    with rftdata.open(config.buffer, create=False, schema="check", application="rft check") as found:
        selected = select_source(resolved, found)
    assert selected is not None
    steps = planned_steps(config, len(selected.item_ids))
    sentence = f"sampling.source: {len(selected.item_ids):,} {selected.kind}s, {steps} steps, hash {selected.content_hash[:12]}"
    dropped = selected.describe_dropped()
    yield sentence if dropped is None else f"{sentence}; {dropped}"
