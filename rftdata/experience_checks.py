"""Checks of groups, rollouts and sequences before they are stored."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from rftdata.errors import RftError
from rftdata.experience import (
    FORKS,
    MAX_ROLE,
    OUTCOMES,
    SOURCES,
    STEP_REWARD,
    STOP_REASONS,
    TURNS,
    Array,
    Baseline,
    Group,
    Rollout,
    Sequence,
)
from rftdata.limits import INT4, LARGEST_REWARD, check_integer, check_task_name, is_number


def validate(groups: tuple[Group, ...]) -> None:
    """Refuse groups that cannot be stored.

    Raises:
        RftError: what is wrong, the value and what is allowed.
    """
    claimed = [group.group_id for group in groups if group.group_id is not None]
    if len(set(claimed)) < len(claimed):
        raise RftError("a group is given twice", value=sorted(claimed), todo="write each group once")
    for group in groups:
        if group.group_id is None and (group.taskset is None or group.task_key is None):
            raise RftError(
                "a group needs either group_id and claim_token, or taskset and task_key", todo="name its task"
            )
        if group.group_id is None:
            check_task_name(group.taskset, group.task_key)
        if group.source not in SOURCES:
            raise RftError("a group has an unknown source", value=group.source, allowed=", ".join(SOURCES))
        if (
            sorted(rollout.index for rollout in group.rollouts) != list(range(len(group.rollouts)))
            or not group.rollouts
        ):
            raise RftError(
                "a group's rollouts must be numbered from 0, one after the other",
                value=[r.index for r in group.rollouts],
            )
        if group.baseline is not None:
            _validate_outcome(group.baseline)
        for rollout in group.rollouts:
            _validate_outcome(rollout)
            for sequence in rollout.sequences:
                _validate_sequence(sequence)


def _validate_outcome(rollout: Rollout | Baseline) -> None:
    if rollout.outcome not in OUTCOMES:
        raise RftError("a rollout has an unknown outcome", value=rollout.outcome, allowed=", ".join(OUTCOMES))
    if isinstance(rollout, Rollout) and rollout.stop_reason not in (None, *STOP_REASONS):
        raise RftError(
            "a rollout has an unknown reason to stop", value=rollout.stop_reason, allowed=", ".join(STOP_REASONS)
        )
    check_reward(rollout.reward)
    if not 0 <= rollout.seconds < math.inf:
        raise RftError("the duration of a rollout is not valid", value=rollout.seconds, allowed="0 or more seconds")


def _validate_sequence(s: Sequence) -> None:
    if not 0 <= s.num_prompt_tokens <= len(s.token_ids):
        raise RftError(
            "a sequence has a wrong number of prompt tokens",
            value=s.num_prompt_tokens,
            allowed=f"0 to {len(s.token_ids)}",
        )
    num_response = len(s.token_ids) - s.num_prompt_tokens
    for name in ("behavior_logprobs", "loss_mask"):
        values = getattr(s, name)
        if values is not None and len(values) != num_response:
            raise RftError(
                f"{name} must have one value per response token", value=len(values), allowed=str(num_response)
            )
    starts = [start for start, _ in s.policy_spans]
    if starts != sorted(set(starts)) or any(not 0 <= start < len(s.token_ids) for start in starts):
        raise RftError(
            "policy_spans must begin at ascending tokens of the sequence",
            value=s.policy_spans,
            allowed=f"0 to {len(s.token_ids) - 1}",
        )
    for _, policy_version_id in s.policy_spans:
        check_integer("the policy_version_id of a span", policy_version_id)
    if s.parent_id is not None:
        check_integer("the parent_id of a sequence", s.parent_id)
    if s.edit_id is not None:
        check_integer("the edit_id of a sequence", s.edit_id)
    if s.turn_index is not None:
        check_integer("the turn_index of a sequence", s.turn_index, (0, INT4[1]))
    if s.fork is not None and s.fork not in FORKS:
        raise RftError("a sequence has an unknown cause of its fork", value=s.fork, allowed=", ".join(FORKS))
    if s.role is not None:
        check_role(s.role)
    if TURNS in s.arrays:
        _validate_turns(np.asarray(s.arrays[TURNS]), s)
    if STEP_REWARD in s.arrays:
        _validate_step_rewards(np.asarray(s.arrays[STEP_REWARD]), s)
    check_reward(s.reward)
    check_reward_parts(s.reward_parts)


def _validate_turns(turns: Array, s: Sequence) -> None:
    if turns.ndim != 2 or turns.shape[1] != 3 or not len(turns) or turns.dtype != np.int32:
        raise RftError(
            "the array turns of a sequence has another type or shape",
            value=f"{turns.dtype} {list(turns.shape)}",
            allowed="int32 [K, 3]: first token, token after the last, and number of each of the K turns",
        )
    bounds, numbers = turns[:, :2].astype(np.int64).reshape(-1), turns[:, 2].astype(np.int64)
    if bounds[0] < s.num_prompt_tokens or bounds[-1] > len(s.token_ids) or (np.diff(bounds) < 0).any():
        raise RftError(
            "the turns of a sequence are not stretches of its response, one after the other",
            value=turns[:10, :2].tolist(),
            allowed=f"ascending places from {s.num_prompt_tokens} to {len(s.token_ids)}",
        )
    if numbers[0] < 0 or (np.diff(numbers) <= 0).any():
        raise RftError(
            "the turns of a sequence must have ascending numbers", value=numbers[:10].tolist(), allowed="0, 1, 2, …"
        )
    if s.turn_index not in (None, numbers[0]):
        raise RftError(
            "the turn_index of a sequence is not the number of its first turn",
            value=s.turn_index,
            allowed=str(numbers[0]),
        )


def _validate_step_rewards(rewards: Array, s: Sequence) -> None:
    num_turns = s.num_turns
    if rewards.shape != (num_turns,) or rewards.dtype.kind not in "fiu":
        raise RftError(
            "the array step_reward of a sequence has not one number per turn",
            value=f"{rewards.dtype} {list(rewards.shape)}",
            allowed=f"float32 [{num_turns}]",
            todo="record it for every turn of the sequence, or for none",
        )
    if not np.isfinite(rewards).all():
        raise RftError(
            "a step_reward of a sequence is not a finite number",
            value=float(rewards[~np.isfinite(rewards)][0]),
            allowed="finite numbers",
        )


def check_role(role: object) -> None:
    """Refuse what is not the name of a role."""
    if not isinstance(role, str) or not 1 <= len(role) <= MAX_ROLE or not role.isprintable():
        raise RftError(
            "the name of a role is not valid", value=role, allowed=f"1 to {MAX_ROLE} printable characters, or None"
        )


def check_reward(reward: float | None) -> None:
    """Refuse a reward that is not a finite number; None is a pending one."""
    if reward is not None and not is_number(reward):
        raise RftError(
            "a reward is not a finite number",
            value=reward,
            allowed=f"a number between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}, or None while it is pending",
            todo="correct what computes it, or record the rollout as failed",
        )


def check_reward_parts(parts: Mapping[str, float | None]) -> None:
    """Refuse parts of a reward that are not finite numbers; None is a part without a value."""
    for name, value in parts.items():
        if value is not None and not is_number(value):
            raise RftError(
                f"the part {name!r} of reward_parts is not a finite number",
                value=value,
                allowed=f"a number between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}, or None",
                todo="correct what computes it; metrics may have other values",
            )
