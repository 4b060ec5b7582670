"""Rewards over whole groups, added when all rollouts of a group have been scored alone.

A failed rollout is left out. If a reward of the group fails, no rollout of the group has a whole reward, so all that were scored become failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from rftcore.explorer.rollout_errors import ends_rollout_alone, outcome_of
from rftcore.explorer.scorer import GroupScore, Scorer
from rftcore.failures import user_stack
from rftcore.rewards.answered_rollout import AnsweredRollout
from rftcore.workflows.task import Task
from rftcore.workflows.turn import Turn
from rftdata.experience import Group, Rollout


async def add_group_rewards(
    scorer: Scorer,
    group: Group,
    task: Task,
    turns: Mapping[int, list[Turn]],
    on_failure: Callable[[str, str], None],
) -> None:
    """Call the rewards of the group, and add them to its rollouts.

    Args:
        turns: of the rollouts that were scored, by index.
        on_failure: receives the description of a failure and the user's stack.

    Raises:
        ConfigError, ModelError, EngineStoppedError: the run cannot continue.
    """
    answered = {
        place: AnsweredRollout(rollout.index, turns[rollout.index], rollout.reward, _parts(rollout))
        for place, rollout in enumerate(group.rollouts)
        if rollout.reward is not None and turns.get(rollout.index)
    }
    if not answered:
        return
    try:
        scores = await scorer.score_group(list(answered.values()), task)
    except BaseException as raised:  # the boundary: errors of a user's code are data
        if not ends_rollout_alone(raised):
            raise
        outcome, error = outcome_of(raised)
        on_failure(error, user_stack(raised))
        for place in answered:
            group.rollouts[place] = _failed(group.rollouts[place], outcome, error)
        return
    for place, score in zip(answered, scores, strict=True):
        group.rollouts[place] = _added(group.rollouts[place], score)


def _parts(rollout: Rollout) -> dict[str, float]:
    return dict(rollout.sequences[-1].reward_parts) if rollout.sequences else {}


def _added(rollout: Rollout, score: GroupScore) -> Rollout:
    for sequence in rollout.sequences:
        if sequence.reward is not None:
            sequence.reward = score.added_to(sequence.reward)
            sequence.reward_parts = {**sequence.reward_parts, **score.parts}
    assert rollout.reward is not None
    return replace(rollout, reward=score.added_to(rollout.reward))


def _failed(rollout: Rollout, outcome: str, error: str) -> Rollout:
    for sequence in rollout.sequences:
        sequence.reward, sequence.reward_parts = None, {}
    return replace(rollout, outcome=outcome, reward=None, error=error, stop_reason=None)
