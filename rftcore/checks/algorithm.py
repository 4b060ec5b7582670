"""Whether a run brings what its algorithm learns from: groups, samples, inputs, models and steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from operators.base import Operator
from operators.chain.chain import Chain
from operators.chain.stage import written_columns
from rftcore.algorithms.base import Column
from rftcore.algorithms.compatibility import check_answers
from rftcore.algorithms.inputs import RECORDED_BY
from rftcore.algorithms.losses.ppo import PPO
from rftcore.config.explorer import ExplorerConfig
from rftcore.findings import Findings
from rftcore.resolved import ResolvedRun
from rftdata.config import TasksetConfig
from rftdata.errors import ConfigError, refuse

if TYPE_CHECKING:
    from rftcore.algorithms.algorithm import Algorithm

# Ratios of a sequence that dropout alone changes by more: GSPO's clip of 4e-4 is far below it, GRPO's of 0.2 far above.
_NARROW_CLIP = 0.01
_RECORDING_NOTHING = ("single_turn", "demonstration")
_FOR_A_BASELINE = {
    "greedy_baseline": "true, or leave it out",
    "engine": "an engine that samples, such as vllm",
    "workflow": "a workflow that samples",
    "temperature": "a temperature above 0",
}


def check_algorithm(resolved: ResolvedRun, findings: Findings) -> None:
    """Check that what a run samples or selects is what its algorithm learns from."""
    algorithm = findings.value(lambda: resolved.algorithm)
    if algorithm is None:
        return
    config = resolved.config
    lora = config.trainer.lora
    findings.describe(describe_algorithm(algorithm, 0.0 if lora is None else lora.dropout))
    for taskset in config.tasks:
        findings.passes(_check_group_size, algorithm, taskset)
    findings.passes(check_needed_models, algorithm, bool(config.eval.tasks or config.eval.test))
    if config.steps is not None:
        findings.passes(check_steps, algorithm, config.steps)
    views = [(whose, view.config.explorer) for whose, view in resolved.views(config.tasks)]
    for whose, explorer in views:
        findings.passes_of(whose, check_sampling, algorithm, explorer)
    findings.passes(check_source, algorithm, config.sampling.source is not None)
    if config.run.mode == "both" and config.sampling.source is None:
        chain = findings.value(lambda: resolved.experience_chain)
        for whose, explorer in views:
            findings.passes_of(whose, check_inputs, algorithm, explorer)
            if chain is not None:
                findings.passes_of(whose, check_rollouts, algorithm, explorer, chain)
        if chain is not None:
            findings.passes(check_made, algorithm, config.algorithm.smallest_group, chain)


def _check_group_size(algorithm: Algorithm, taskset: TasksetConfig) -> None:
    if taskset.group_size is not None and taskset.group_size < algorithm.min_group_size:
        raise ConfigError(
            f"group_size of the taskset {taskset.name!r} is too small for {algorithm.name}, which compares rollouts of one group",
            value=taskset.group_size,
            allowed=f"{algorithm.min_group_size} or more",
        )


def check_steps(algorithm: Algorithm, steps: int) -> None:
    """Refuse a run of so few steps that its policy is never trained.

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


def check_needed_models(algorithm: Algorithm, has_evaluation: bool) -> None:
    """Refuse an algorithm without a model that it needs, or an evaluation of a model that writes no answers.

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
    """Refuse sampling from a distribution under which the learner cannot compute probabilities, where the algorithm needs them.

    Raises:
        ConfigError: truncated or greedy sampling with an algorithm that learns from samples.
        SeveralErrors: several settings make it so.
    """
    if not algorithm.learns_from_samples:
        return
    errors = []
    for name, value, allowed in (("top_p", explorer.top_p, 1.0), ("top_k", explorer.top_k, 0)):
        if value != allowed:
            error = ConfigError(
                f"explorer.{name} samples from the tokens that are left, and {algorithm.name} would train with probabilities among all tokens",
                value=value,
                allowed=str(allowed),
                todo="explore less with explorer.temperature",
            )
            errors.append(error)
    if explorer.temperature == 0:
        error = ConfigError(
            f"explorer.temperature 0 samples nothing, and {algorithm.name} learns from samples",
            value=explorer.temperature,
            allowed="a temperature above 0",
        )
        errors.append(error)
    refuse(errors)


def check_rollouts(algorithm: Algorithm, explorer: ExplorerConfig, chain: Chain) -> None:
    """Refuse rollouts that come through the chain without what the algorithm learns from.

    Raises:
        ConfigError: answers that no policy sampled, rollouts that all have the same reward, pairs of equal answers or of a model that
            writes none, or weights of rewards that the algorithm does not read.
    """
    if algorithm.forms_pairs:
        _check_sampled_pairs(algorithm, explorer)
    if "reward_parts" in algorithm.columns:
        _check_single_rewards(algorithm, explorer)
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


def _check_single_rewards(algorithm: Algorithm, explorer: ExplorerConfig) -> None:
    """Refuse what the list of rewards says about their combination and an algorithm that reads each alone would ignore."""
    if explorer.reward_combination != "sum":
        raise ConfigError(
            f"{algorithm.name} reads each reward alone, and explorer.reward_combination would have no effect",
            value=explorer.reward_combination,
            allowed="sum",
            todo="remove reward_combination, or use another algorithm",
        )
    weights = getattr(algorithm.advantage.config, "weights", {}) if algorithm.advantage is not None else {}
    for reward in explorer.reward:
        name = reward.as_ or reward.name.rpartition(":")[2]
        if reward.weight not in (1.0, weights.get(name, 1.0)):
            raise ConfigError(
                f"explorer.reward gives {reward.key} a weight, and {algorithm.name} reads each reward without it",
                value=reward.weight,
                allowed="1, or the weight of the same name in algorithm.advantage.weights",
                todo=f"set algorithm.advantage.weights: {{{name}: {reward.weight:g}}}",
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
    """Refuse a run whose rollouts cannot bring what the algorithm reads besides rewards.

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
    """Refuse a workflow whose trial rollout did not record what the algorithm reads.

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
    """Refuse an algorithm that cannot learn from where the run's batches come from.

    Raises:
        ConfigError: pairs wanted where nothing stored is selected.
    """
    if algorithm.draws_pairs and not has_source:
        raise ConfigError(
            f"{algorithm.name} learns from preference pairs, which are stored",
            todo="build them with `rft pairs build RUN`, and set sampling.source: {sql: select pair_id from rft.v_preferred_pair where …}; or set"
            " algorithm.pairs: {} to form them from the rewards of the groups that the run samples",
        )


def check_selected(algorithm: Algorithm, kind: str) -> None:
    """Refuse a selection of what the algorithm does not learn from.

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


def check_made(algorithm: Algorithm, smallest: int, chain: Chain) -> None:
    """Refuse stages that make experiences which cannot be trained on.

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


def describe_algorithm(algorithm: Algorithm, dropout: float) -> Iterator[str]:
    """Describe settings that fit together and still have a surprising effect.

    Args:
        dropout: of the adapters that are trained.
    """
    loss, aggregation = algorithm.loss, algorithm.config.aggregation.name
    if (
        isinstance(loss, PPO)
        and loss.config.level == "product"
        and aggregation in ("token-mean", "seq-mean-token-mean")
    ):
        yield (
            f"algorithm.loss.level: product gives each token 1 / length of its response's loss, and aggregation: {aggregation} averages over"
            " tokens once more, so the update shrinks with the length of responses; aggregation: seq-mean-token-sum is one loss per response"
        )
    if isinstance(loss, PPO) and dropout and loss.config.clip.high < _NARROW_CLIP:
        yield (
            f"trainer.lora.dropout {dropout:g} changes the ratios by more than algorithm.loss.clip ({loss.config.clip.low:g},"
            f" {loss.config.clip.high:g}) lets through, so most of what is sampled is clipped before anything is trained; leave it at 0"
        )
