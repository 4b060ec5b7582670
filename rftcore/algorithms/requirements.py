"""What an algorithm needs of the rollouts it trains on, checked before a process is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from operators.base import Operator
from operators.chain.chain import Chain
from operators.chain.stage import written_columns
from rftcore.algorithms.base import Column, HeadTerm
from rftcore.algorithms.inputs import RECORDED_BY
from rftcore.config.explorer import ExplorerConfig
from rftdata.errors import ConfigError

if TYPE_CHECKING:
    from rftcore.algorithms.algorithm import Algorithm

_RECORDING_NOTHING = ("single_turn", "demonstration")
_FOR_A_BASELINE = {
    "greedy_baseline": "true, or leave it out",
    "engine": "an engine that samples, such as vllm",
    "workflow": "a workflow that samples",
    "temperature": "a temperature above 0",
}


def check_parts(algorithm: Algorithm, group_size: int | None) -> None:
    """Whether the parts of an algorithm fit each other, and the groups are large enough for them.

    Raises:
        ConfigError: which two do not fit, and what would.
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
    """Parts that go with losses per token, or with advantages, only."""
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


def check_steps(algorithm: Algorithm, steps: int) -> None:
    """Whether a run of so many steps trains its policy.

    Raises:
        ConfigError: the critic's warm-up lasts as long as the run.
    """
    critic = algorithm.config.critic
    if critic is not None and critic.warmup_steps >= steps:
        raise ConfigError(
            f"algorithm.critic.warmup_steps leaves no step for the policy: the run has {steps} steps",
            value=critic.warmup_steps,
            allowed=f"0 to {steps - 1}",
            todo="lower it, or raise steps",
        )


def check_models(algorithm: Algorithm, has_evaluation: bool) -> None:
    """Whether the models that the algorithm needs are named, and the one that it trains can do what is asked of it.

    Raises:
        ConfigError: whole distributions of a teacher without a teacher, or a reward model that should answer tasks.
    """
    if "teacher_logits" in algorithm.signals and algorithm.config.teacher is None:
        raise ConfigError(
            f"{algorithm.name} compares whole distributions over the vocabulary, which are not stored",
            todo="set algorithm.teacher to a model, or use on_policy_distillation or jsd_sampled",
        )
    if algorithm.trains_scorer and has_evaluation:
        raise ConfigError(
            f"{algorithm.name} trains a model that scores responses and writes none, so it cannot be evaluated on tasks",
            todo="remove the eval section; pair_accuracy among the metrics says how well it judges",
        )


def check_sampling(algorithm: Algorithm, explorer: ExplorerConfig) -> None:
    """Whether the learner can compute probabilities under the distribution that rollouts are sampled from, where the algorithm needs them.

    Raises:
        ConfigError: truncated or greedy sampling with an algorithm that learns from samples.
    """
    if not algorithm.learns_from_samples:
        return
    for name, value, allowed in (("top_p", explorer.top_p, 1.0), ("top_k", explorer.top_k, 0)):
        if value != allowed:
            raise ConfigError(
                f"explorer.{name} samples from the tokens that are left, and {algorithm.name} would train with probabilities among all tokens",
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


def check_rollouts(algorithm: Algorithm, explorer: ExplorerConfig, chain: Chain) -> None:
    """Whether rollouts that come through the chain have what the algorithm learns from.

    Raises:
        ConfigError: answers that no policy sampled, rollouts that all have the same reward, or pairs of equal answers or of a model that
            writes none.
    """
    if algorithm.forms_pairs:
        _check_sampled_pairs(algorithm, explorer)
    if algorithm.uses_behavior_logprobs:
        for name, value in (("engine", explorer.engine), ("workflow", explorer.workflow)):
            if value in ("none", "demonstration"):
                raise ConfigError(
                    f"explorer.{name} {value!r} samples nothing, and {algorithm.name} needs the log-probabilities of samples",
                    todo="use sft to imitate what is given, or an engine and a workflow that sample",
                )
    if (
        (algorithm.group_relative or "baseline_rewards" in algorithm.columns)
        and not explorer.reward
        and explorer.workflow == "single_turn"
        and not any(_may_set_rewards(stage.operator) for stage in chain.stages)
    ):
        raise ConfigError(
            f"explorer.reward is empty: all rollouts would get 0, and {algorithm.name} learns from differences between rollouts",
            todo="name a reward such as exact_match or ./reward.py:score",
        )


def _check_sampled_pairs(algorithm: Algorithm, explorer: ExplorerConfig) -> None:
    if algorithm.trains_scorer:
        raise ConfigError(
            f"{algorithm.name} trains a model that scores responses and writes none, so it cannot sample the groups of algorithm.pairs",
            todo="select stored groups: sampling.source: {sql: select group_id from rft.v_group where …}",
        )
    if explorer.temperature == 0:
        raise ConfigError(
            f"explorer.temperature 0 makes the answers of a group equal, and {algorithm.name} forms pairs of better and worse ones",
            value=explorer.temperature,
            allowed="a temperature above 0",
        )


_ARRAYS: dict[Column, str] = {"state": "state_hash", "step_rewards": "step_reward"}


def recorded_inputs(algorithm: Algorithm) -> dict[str, tuple[str, str]]:
    """The arrays that a workflow must record for the algorithm, each with what it is and how it is recorded."""
    needed = {array: RECORDED_BY[column] for column, array in _ARRAYS.items() if column in algorithm.columns}
    if algorithm.reads_stored_teacher:
        needed["teacher_logprobs"] = (
            "log-probabilities of a teacher",
            "set explorer.teacher to a folder or an endpoint, or set algorithm.teacher to a model, or record them: turn.record(teacher_logprobs=…)",
        )
    return needed


def check_inputs(algorithm: Algorithm, explorer: ExplorerConfig) -> None:
    """Whether rollouts of the run can bring what the algorithm reads besides rewards.

    Raises:
        ConfigError: a built-in workflow does not record it, or there can be no greedy rollout.
    """
    if explorer.workflow in _RECORDING_NOTHING:
        _refuse_missing_inputs(algorithm, explorer, frozenset(), "records no inputs")
    if "baseline_rewards" not in algorithm.columns:
        return
    for key, value, reason in (
        ("greedy_baseline", explorer.greedy_baseline, explorer.greedy_baseline is False),
        ("engine", explorer.engine, explorer.engine == "none"),
        ("workflow", explorer.workflow, explorer.workflow == "demonstration"),
        ("temperature", explorer.temperature, explorer.temperature == 0),
    ):
        if reason:
            raise ConfigError(
                f"{algorithm.name} compares sampled rollouts with a greedy one of the same task, and explorer.{key} prevents that",
                value=value,
                allowed=_FOR_A_BASELINE[key],
                todo="change it, or name an algorithm without a baseline, such as rloo",
            )


def check_recorded(algorithm: Algorithm, explorer: ExplorerConfig, recorded: frozenset[str]) -> None:
    """Whether a trial rollout of the workflow recorded what the algorithm reads.

    Args:
        recorded: names of the arrays that every sampled turn has.

    Raises:
        ConfigError: what is missing, and how to record it.
    """
    _refuse_missing_inputs(algorithm, explorer, recorded, "did not record them in a trial rollout")


def _refuse_missing_inputs(algorithm: Algorithm, explorer: ExplorerConfig, recorded: frozenset[str], why: str) -> None:
    if explorer.teacher is not None:
        recorded |= {"teacher_logprobs"}
    for array, (what, how) in recorded_inputs(algorithm).items():
        if array not in recorded:
            raise ConfigError(
                f"{algorithm.name} reads {array} ({what}), and the workflow {explorer.workflow!r} {why}", todo=how
            )


def check_source(algorithm: Algorithm, has_source: bool) -> None:
    """Whether the algorithm can learn from where the run's batches come from.

    Raises:
        ConfigError: pairs wanted where nothing stored is selected.
    """
    if algorithm.draws_pairs and not has_source:
        raise ConfigError(
            f"{algorithm.name} learns from preference pairs, which are stored",
            todo="build them with `rft pairs build RUN`, and set sampling.source: {sql: select pair_id from rft.v_pair where …}; or set"
            " algorithm.pairs: {} to form them from the rewards of the groups that the run samples",
        )


def check_selected(algorithm: Algorithm, kind: str) -> None:
    """Whether the algorithm learns from what was selected.

    Raises:
        ConfigError: pairs for an algorithm of single experiences, or the other way round; or experiences for one that compares the
            rollouts of a group.
    """
    if algorithm.draws_pairs:
        wanted = ["pair"]
    else:
        wanted = ["group"] if algorithm.group_relative else ["experience", "group"]
    if kind in wanted:
        return
    if algorithm.forms_pairs and kind == "pair":
        raise ConfigError(
            f"sampling.source selects stored pairs, and {algorithm.name} forms its pairs from the rewards of groups",
            value="pair_id",
            allowed="group_id",
            todo="select the groups, or set algorithm.pairs: null to learn from the stored pairs",
        )
    if algorithm.group_relative and kind == "experience":
        raise ConfigError(
            f"sampling.source selects single experiences, and {algorithm.name} compares the rollouts of whole groups",
            value="experience_id",
            allowed="group_id",
            todo="select the groups: select distinct group_id from rft.v_experience where …",
        )
    raise ConfigError(
        f"sampling.source selects {kind}s, and {algorithm.name} learns from {wanted[0]}s",
        value=f"{kind}_id",
        allowed=" or ".join(f"{each}_id" for each in wanted),
        todo="select the other column, or use an algorithm of single experiences (sft), groups (grpo) or pairs (dpo)",
    )


def check_answers(algorithm: Algorithm, smallest: int, answers: int) -> None:
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
            "it makes groups that the run would drop, since they have too few answers",
            value=answers,
            allowed=f"{smallest} or more: algorithm.min_group_size, by default 2 (1 where group_size is 1)",
            todo=todo,
        )


def check_made(algorithm: Algorithm, smallest: int, chain: Chain) -> None:
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
