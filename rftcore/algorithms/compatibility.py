"""Refusal of algorithms whose parts do not fit each other, and of answers that an algorithm cannot learn from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rftcore.algorithms.base import HeadTerm
from rftdata.errors import ConfigError

if TYPE_CHECKING:
    from rftcore.algorithms.algorithm import Algorithm


def check_parts(algorithm: Algorithm, group_size: int | None) -> None:
    """Refuse parts of an algorithm that do not fit each other, and groups that are too small for them.

    Raises:
        ConfigError: names what does not fit, and what would.
    """
    config, loss, advantage = algorithm.config, algorithm.loss, algorithm.advantage
    name = config.loss.name
    if loss.of_critic:
        raise ConfigError(f"algorithm.loss: {name} trains a critic, not the policy", todo="name it under critic.loss")
    if algorithm.forms_pairs and not algorithm.pairwise:
        raise ConfigError(
            f"algorithm.pairs forms preference pairs, and {name} has one loss per {loss.unit}",
            todo="leave pairs out, or name an algorithm that learns from pairs, such as dpo",
        )
    if loss.uses_advantages and advantage is None:
        raise ConfigError(
            f"the loss {name} needs advantages", todo="name an advantage: algorithm.advantage: {name: group}"
        )
    if advantage is not None and not loss.uses_advantages:
        raise ConfigError(
            f"the loss {name}, one per {loss.unit}, reads no advantages",
            value=f"algorithm.advantage: {config.advantage and config.advantage.name}",
            todo="leave the advantage out (advantage: null), or name a loss that reads them, such as ppo",
        )
    if config.train_on == "all" and (loss.unit != "token" or algorithm.uses_behavior_logprobs or advantage is not None):
        raise ConfigError(
            f"algorithm.train_on: all is for losses that imitate text, and {name} judges responses",
            value="all",
            allowed="responses",
            todo="leave train_on out, or name the loss sft",
        )
    if loss.reads_mask and algorithm.mask is None:
        raise ConfigError(f"the loss {name} acts on tokens that a mask names", todo="name a mask: algorithm.mask: cov")
    _check_token_parts(algorithm)
    _check_critic(algorithm)
    if group_size is not None and group_size < algorithm.min_group_size:
        raise ConfigError(
            f"algorithm.group_size is too small for {algorithm.name}, which compares rollouts of one group",
            value=group_size,
            allowed=f"{algorithm.min_group_size} or more",
            todo="raise it"
            if algorithm.forms_pairs
            else "raise it, or take an advantage that compares nothing, such as advantage: {baseline: none, scale: none}",
        )


def _check_token_parts(algorithm: Algorithm) -> None:
    """Refuse parts that need a loss per token, or advantages, if the algorithm has none."""
    config = algorithm.config
    per_token = {
        "kl": config.kl.is_on,
        "entropy": config.entropy.coef > 0,
        "mask": config.mask is not None,
        "correction": bool(config.correction),
        "expert": config.expert is not None,
    }
    for key in (key for key, is_on in per_token.items() if is_on and algorithm.loss.unit != "token"):
        raise ConfigError(
            f"algorithm.{key} is for losses per token, and the loss {config.loss.name} has one per {algorithm.loss.unit}",
            todo=f"leave {key} out, or name a loss per token, such as ppo or sft",
        )
    needs_advantage = {
        "mask": config.mask is not None,
        "correction": bool(config.correction),
        "kl.where: reward": config.kl.is_on and config.kl.where == "reward",
    }
    for key in (key for key, is_on in needs_advantage.items() if is_on and algorithm.advantage is None):
        raise ConfigError(
            f"algorithm.{key} changes how advantages count, and the loss {config.loss.name} has none",
            todo="leave it out, or name an advantage and a loss that reads it",
        )
    if config.kl.is_on and config.kl.where == "reward" and algorithm.kl is not None and algorithm.kl.compares:
        raise ConfigError(
            "algorithm.kl: this estimator is for the loss; in the reward the anchor policy itself is measured",
            value=config.kl.type.name if config.kl.type else None,
            allowed="k1, k2 or k3",
            todo="change kl.type, or set kl.where: loss",
        )
    if (
        algorithm.advantage is not None
        and "reward_parts" in algorithm.advantage.columns
        and config.kl.where == "reward"
    ):
        raise ConfigError(
            "algorithm.kl.where: reward changes the sum of rewards, and the advantage reads each of them by name",
            value=config.advantage.name if config.advantage else None,
            allowed="kl.where: loss",
            todo="set kl.where: loss",
        )
    if config.correction and config.old_logprobs == "behavior":
        raise ConfigError(
            "algorithm.correction compares the recomputed log-probabilities with those of the engine",
            value="old_logprobs: behavior",
            allowed="recomputed",
            todo="leave old_logprobs out",
        )
    expert = algorithm.expert
    if expert is not None and (expert.unit != "token" or expert.uses_advantages or isinstance(expert, HeadTerm)):
        assert config.expert is not None
        raise ConfigError(
            "algorithm.expert.loss is for responses that have no advantage",
            value=config.expert.loss.name,
            allowed="a loss per token without advantages and whole distributions",
            todo="name sft",
        )


def _check_critic(algorithm: Algorithm) -> None:
    config, value = algorithm.config, algorithm.value
    wants_values = algorithm.advantage is not None and "values" in algorithm.advantage.signals
    if wants_values and value is None:
        assert config.advantage is not None
        raise ConfigError(
            f"the advantage {config.advantage.name} needs a critic", todo="add critic: {} to the algorithm section"
        )
    if value is not None and not value.of_critic:
        assert config.critic is not None
        raise ConfigError(f"algorithm.critic.loss: {config.critic.loss.name} does not train a critic", allowed="value")
    if value is not None and config.expert is not None:
        raise ConfigError(
            "algorithm.expert gives responses without returns, and algorithm.critic learns from returns",
            todo="leave one of the two out, or name an advantage without a critic, such as group",
        )
    if value is not None and not wants_values:
        raise ConfigError(
            "algorithm.critic trains values that no advantage reads",
            value=config.advantage.name if config.advantage else None,
            todo="name the advantage gae, or leave the critic out",
        )


def check_answers(algorithm: Algorithm, smallest: int, answers: int) -> None:
    """Refuse a group of answers that a stage creates, and that no policy sampled, if the algorithm cannot train on it.

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
            "it makes groups that the run would drop, since they have too few answers",
            value=answers,
            allowed=f"{smallest} or more: algorithm.min_group_size, by default 2 (1 where group_size is 1)",
            todo=todo,
        )


def refuse_adapters(algorithm: Algorithm) -> None:
    """Refuse `trainer.lora` for an algorithm that trains a new head.

    Raises:
        ConfigError: adapters would leave the new head random.
    """
    if algorithm.trains_scorer:
        raise ConfigError(
            "trainer.lora cannot train a reward model: adapters leave its new head untrained",
            value=algorithm.name,
            allowed="algorithms that train a language model",
            todo="leave trainer.lora out",
        )
