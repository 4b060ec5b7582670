"""Checks of a run's models against each other: the policy, and its critic, teachers and reward models."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rftcore.models import refuse_other_tokenizer
from rftcore.resolved import ResolvedRun
from rftcore.rewards.reward_model import PREFIX, gives_scores
from rftdata.errors import ConfigError, ModelError


def check_models_fit(resolved: ResolvedRun) -> None:
    """Fetch all models of the run; compare their tokenizers with the policy's, and refuse a policy that gives scores.

    Raises:
        ModelError: a model does not exist, or the policy's is a reward model.
        ConfigError: a model has another tokenizer, or adapters of a reward model are to be trained.
    """
    if resolved.config.trainer.lora is not None:
        resolved.algorithm.refuse_adapters()
    policy, *others = resolved.models
    if not resolved.algorithm.trains_scorer and gives_scores(policy.folder):
        raise ModelError(
            "the model has a scalar head, which gives scores and writes no answers", value=resolved.config.model.path,
            allowed="a language model", todo=f"name it as a reward (explorer.reward: {PREFIX}FOLDER), and a language model in model.path",
        )  # fmt: skip
    for model in others:
        refuse_other_tokenizer(policy.folder, model.folder, model.key)


def check_stages(stages: Sequence[ResolvedRun]) -> None:
    """Whether each stage can start from the model of the stage before it.

    Raises:
        ConfigError: it is a reward model, and the stage trains a language model.
    """
    for earlier, later in itertools.pairwise(stages):
        if earlier.algorithm.trains_scorer and not later.algorithm.trains_scorer:
            raise ConfigError(
                f"{later.config.run.name} would start from the model of {earlier.config.run.name}, which gives scores and writes no answers",
                todo=f"train the reward model with a file of its own, and name its checkpoint in explorer.reward: {PREFIX}FOLDER",
            )  # fmt: skip
