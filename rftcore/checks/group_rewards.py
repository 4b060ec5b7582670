"""Rewards over whole groups need groups: checks of what has none."""

from __future__ import annotations

from rftcore.config.taskset import RunTasksetConfig
from rftcore.resolved import ResolvedRun
from rftdata.errors import ConfigError, RftError


def check_group_rewards(resolved: ResolvedRun) -> None:
    """Refuse rewards over whole groups where a group is one rollout, or where they could not be combined with the others.

    Raises:
        ConfigError: which reward, and why.
    """
    config = resolved.config
    evaluated = {taskset.name for taskset in (*config.eval.tasks, *config.eval.test)}
    for taskset in config.tasksets:
        view = resolved.for_taskset(taskset.name)
        try:
            rewards = view.rewards
        except RftError:  # reported where rewards are loaded
            continue
        if any(reward.of_group for reward in rewards.values()):
            _check(view, taskset, is_evaluated=taskset.name in evaluated)


def _check(view: ResolvedRun, taskset: RunTasksetConfig, *, is_evaluated: bool) -> None:
    of_groups = [reward.config.key for reward in view.rewards.values() if reward.of_group]
    named = f"the reward {of_groups[0]} compares the rollouts of a group"
    if is_evaluated:
        if len(of_groups) == len(view.rewards):
            raise ConfigError(
                f"{named}, and an evaluation answers each task of {taskset.name!r} alone, so its score would be 0",
                todo="add a reward of single answers, such as exact_match; evaluations leave rewards over groups out",
            )
        return
    if view.config.explorer.reward_combination == "first_failure":
        raise ConfigError(
            f"{named}, after all others have been called, so it cannot be one of first_failure",
            value=view.config.explorer.reward_combination,
            allowed="sum, product",
            todo="set reward_combination: sum, and let the reward itself tell which rollouts count",
        )
    if (taskset.group_size or view.config.algorithm.group_size) == 1:
        raise ConfigError(
            f"{named}, and the groups of the taskset {taskset.name!r} have one",
            value=1,
            allowed="a group_size of 2 or more",
        )
    if view.has_greedy_baseline:
        raise ConfigError(
            f"{named}, and a greedy baseline is compared with none, so the two rewards would differ by it",
            todo="set explorer.greedy_baseline: false and use an algorithm that needs no baseline, or remove the reward",
        )
