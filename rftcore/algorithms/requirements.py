"""What an algorithm needs of the rollouts it trains on, checked before a process is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from operators.base import Operator
from operators.chain.chain import Chain
from operators.chain.stage import written_columns
from rftcore.explorer.config import ExplorerConfig
from rftdata.errors import ConfigError

if TYPE_CHECKING:
    from rftcore.algorithms.base import Rule  # imports torch


def check_sampling(algorithm: Rule, explorer: ExplorerConfig) -> None:
    """Engines record log-probabilities of the distribution they sampled from; the learner must be able to compute the same.

    Raises:
        ConfigError: truncated or greedy sampling with an algorithm that weighs tokens by the policy that sampled them.
    """
    if not algorithm.uses_behavior_logprobs:
        return
    for name, value, allowed in (("top_p", explorer.top_p, 1.0), ("top_k", explorer.top_k, 0)):
        if value != allowed:
            raise ConfigError(
                f"explorer.{name} cuts tokens off, and {algorithm.name} would compare the shares of those that are left with "
                "probabilities among all",
                value=value,
                allowed=str(allowed),
                todo="explore less with explorer.temperature",
            )
    if explorer.temperature == 0:
        raise ConfigError(
            f"explorer.temperature 0 samples nothing, and {algorithm.name} learns from samples",
            value=explorer.temperature,
            allowed="a temperature above 0",
        )


def check_rollouts(algorithm: Rule, explorer: ExplorerConfig, chain: Chain) -> None:
    """Whether rollouts that come through the chain have what the algorithm learns from.

    Raises:
        ConfigError: answers that nobody sampled, or rollouts that all have the same reward.
    """
    if algorithm.uses_behavior_logprobs:
        for name, value in (("engine", explorer.engine), ("workflow", explorer.workflow)):
            if value in ("none", "demonstration"):
                raise ConfigError(
                    f"explorer.{name} {value!r} samples nothing, and {algorithm.name} needs the log-probabilities of samples",
                    todo="use sft to imitate what is given, or an engine and a workflow that sample",
                )
    if (
        algorithm.group_relative
        and not explorer.reward
        and explorer.workflow == "single_turn"
        and not any(_may_set_rewards(stage.operator) for stage in chain.stages)
    ):
        raise ConfigError(
            f"explorer.reward is empty: all rollouts would get 0, and {algorithm.name} learns from differences within a group",
            todo="name a reward such as exact_match or ./reward.py:score",
        )


def check_source(algorithm: Rule, has_source: bool) -> None:
    """Whether the algorithm can learn from where the run's batches come from.

    Raises:
        ConfigError: pairs wanted where nothing stored is selected, or whole groups where single rows are.
    """
    if algorithm.pairwise and not has_source:
        raise ConfigError(
            f"{algorithm.name} learns from preference pairs, which are stored",
            todo="build them with `rft pairs build RUN`, and set sampling.source: {sql: select pair_id from rft.v_pair where …}",
        )
    if algorithm.group_relative and has_source:
        raise ConfigError(
            f"{algorithm.name} compares the rollouts of a group, and sampling.source selects single rows",
            value=algorithm.name,
            allowed="algorithms that learn from single experiences (sft) or from pairs (dpo)",
        )


def check_selected(algorithm: Rule, kind: str) -> None:
    """Whether the algorithm learns from what was selected.

    Raises:
        ConfigError: pairs for an algorithm of single experiences, or the other way round.
    """
    wanted = "pair" if algorithm.pairwise else "experience"
    if kind != wanted:
        raise ConfigError(
            f"sampling.source selects {kind}s, and {algorithm.name} learns from {wanted}s",
            value=f"{kind}_id", allowed=f"{wanted}_id", todo="select the other column, or use sft for experiences and dpo for pairs",
        )  # fmt: skip


def check_answers(algorithm: Rule, smallest: int, answers: int) -> None:
    """Whether a group of answers that a stage makes, and that no policy sampled, can be trained on.

    Args:
        smallest: the group size below which a group is dropped.

    Raises:
        ConfigError: the algorithm weighs tokens by the policy that sampled them, or the group is too small.
    """
    todo = "train on them with algorithm: {name: sft, min_group_size: 1}, or make new tasks instead, or leave the stage out"
    if algorithm.uses_behavior_logprobs:
        raise ConfigError(
            f"it makes answers that no policy sampled, and {algorithm.name} needs the log-probabilities of samples",
            todo=todo,
        )
    if answers < smallest:
        raise ConfigError(
            "it makes groups that the run would drop, since they have too few answers", value=answers,
            allowed=f"{smallest} or more: algorithm.min_group_size, by default 2 (1 where group_size is 1)", todo=todo,
        )  # fmt: skip


def check_made(algorithm: Rule, smallest: int, chain: Chain) -> None:
    """Whether the experiences that stages make of experiences can be trained on.

    Raises:
        ConfigError: which stage makes others.
    """
    for stage in chain.stages:
        if stage.operator.answers is not None:
            try:
                check_answers(algorithm, smallest, stage.operator.answers)
            except ConfigError as error:
                raise error.about(f"pipelines.experience: stage {stage.index} ({stage.name})") from error


def _may_set_rewards(operator: Operator) -> bool:
    written = written_columns(operator)
    return written is None or "reward" in written
