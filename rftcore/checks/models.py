"""Checks of a run's models against each other: the policy, and its critic, teachers and reward models."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftcore.algorithms.compatibility import refuse_adapters
from rftcore.explorer.teacher import open_teacher
from rftcore.findings import Findings
from rftcore.resolved import ResolvedRun
from rftcore.rewards.reward_model import PREFIX, gives_scores
from rftcore.vocabulary import refuse_damaged_tokenizer, refuse_other_tokenizer
from rftcore.workflows.chat_encoding import chat_encoder
from rftcore.workflows.prompts import refuse_opaque
from rftdata.errors import ConfigError, ModelError
from rftdata.uri import redacted

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

# What families call the number of their experts.
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check_models(resolved: ResolvedRun, findings: Findings) -> None:
    """Fetch all models of the run, and check them against each other and against the settings of engine and trainer."""
    models = findings.value(lambda: resolved.models)
    if models is not None:
        for whose, view in resolved.views(resolved.config.tasksets):
            findings.passes_of(whose, check_max_tokens, view)
        keys = {model.folder: model.key for model in reversed(models)}
        whole = [findings.passes(refuse_damaged_tokenizer, folder, key) for folder, key in keys.items()]
        if all(whole):
            findings.passes(check_models_fit, resolved)
            if resolved.config.explorer.thoughts == "all":
                findings.passes(check_thoughts, resolved)
            check_workflow_models(resolved, findings)


def check_workflow_models(resolved: ResolvedRun, findings: Findings) -> None:
    """Let workflows that declare `check_model` refuse the policy's tokenizer, such as one whose chat template cannot carry tools."""
    if not resolved.config.has_explorer:
        return
    for whose, view in resolved.views(resolved.config.tasksets):
        findings.passes_of(whose, _check_workflow_model, view)


def _check_workflow_model(view: ResolvedRun) -> None:
    if check := getattr(view.workflow, "check_model", None):
        from transformers import AutoTokenizer

        check(AutoTokenizer.from_pretrained(view.model_folder), **view.config.explorer.workflow_args)


@dataclass(frozen=True)
class OpenedModel:
    """The policy's configuration and tokenizer.

    Attributes:
        sentence: describes the model.
    """

    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    sentence: str


def open_model(resolved: ResolvedRun) -> OpenedModel:
    """Open the policy's configuration and tokenizer; the model is fetched if needed.

    Raises:
        ModelError: it does not exist, or cannot be opened.
    """
    from transformers import AutoConfig, AutoTokenizer

    folder = resolved.model_folder
    try:
        model, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        reason = " ".join(str(error).split())[:400]
        raise ModelError(f"the model in {folder} cannot be opened: {reason}", todo="correct model.path") from error
    sentence = f"model {resolved.config.model.path}: a {model.model_type} with {len(tokenizer):,} tokens, in {tokenizer.name_or_path}"
    return OpenedModel(model, tokenizer, sentence)


def check_thoughts(resolved: ResolvedRun) -> None:
    """Refuse a chat template with which no chat can continue with all that was sampled.

    Raises:
        ModelError: the tokenizer cannot be opened.
        ConfigError: see `refuse_opaque`.
    """
    refuse_opaque(chat_encoder(open_model(resolved).tokenizer))


def check_models_fit(resolved: ResolvedRun) -> None:
    """Fetch all models of the run; compare their tokenizers with the policy's, and refuse a policy that gives scores.

    Raises:
        ModelError: a model does not exist, or the policy's is a reward model.
        ConfigError: a model has another tokenizer, adapters of a reward model are to be trained, explorer.tensor_parallel_size does not
            divide the policy, or vLLM is to keep adapters beside a mixture of experts.
    """
    if resolved.config.trainer.lora is not None:
        refuse_adapters(resolved.algorithm)
    policy, *others = resolved.models
    if not resolved.algorithm.trains_scorer and gives_scores(policy.folder):
        raise ModelError(
            "the model has a scalar head, which gives scores and writes no answers",
            value=resolved.config.model.path,
            allowed="a language model",
            todo=f"name it as a reward (explorer.reward: {PREFIX}FOLDER), and a language model in model.path",
        )
    for model in others:
        refuse_other_tokenizer(policy.folder, model.folder, model.key)
    if resolved.config.has_explorer and resolved.sends_adapters_alone and resolved.config.explorer.engine == "vllm":
        refuse_adapters_beside_experts(policy.folder)
    size = resolved.config.explorer.tensor_parallel_size
    if resolved.config.has_explorer and size > 1:
        refuse_indivisible_engine(policy.folder, size)


def check_max_tokens(resolved: ResolvedRun) -> None:
    """Refuse an explorer.max_tokens that leaves no room for a prompt. With the default, the context limits responses.

    Raises:
        ModelError: the model does not exist.
        ConfigError: explorer.max_tokens is too large.
    """
    config, context = resolved.config, resolved.context_length
    explorer = config.explorer
    if context is None or explorer.max_tokens < context or "max_tokens" not in explorer.model_fields_set:
        return
    if config.has_explorer and explorer.engine != "none":
        raise ConfigError(
            "explorer.max_tokens leaves no room for a prompt in the engine's context",
            value=explorer.max_tokens,
            allowed=f"up to {context - 1}, less the prompt (its context is {context} tokens)",
            todo="lower explorer.max_tokens, or raise explorer.engine_args.context_length if the model allows it",
        )


def describe_adapters(resolved: ResolvedRun) -> Iterator[str]:
    """Yield what engines get of trained adapters, and what is lost of merged ones."""
    config, reason = resolved.config, resolved.reason_to_merge
    if config.trainer.lora is None or not config.has_explorer or config.explorer.engine == "none":
        return
    if reason is None:
        yield "engines get the adapters of trainer.lora alone, and compute them beside the model (sync.adapters)"
        return
    dtype = resolved.engine_dtype
    yield f"engines get the adapters of trainer.lora merged into the model's weights, because {reason}"
    if dtype != "float32":
        yield (
            f"warning: merged weights are rounded to {dtype or 'the type of the engine'}, which loses most of a small update, so that engines sample and are "
            "evaluated with less than was trained; merged_update_error in rft.v_train_step is the lost share. Set sync.adapters: alone, or "
            "explorer.engine_args.dtype: float32"
        )


def refuse_indivisible_engine(folder: Path, size: int) -> None:
    """Refuse an explorer.tensor_parallel_size that vLLM cannot divide a model by.

    It divides attention heads evenly, and key heads evenly or repeats them evenly.

    Raises:
        ConfigError: the size does not fit the model.
    """
    values = _text_config(folder)
    heads = values.get("num_attention_heads")
    if not isinstance(heads, int):  # of a family that only vLLM knows, which refuses what does not fit when it starts
        return
    kv_heads = values.get("num_key_value_heads") or heads
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if size not in fitting:
        raise ConfigError(
            f"explorer.tensor_parallel_size does not divide the model's {heads} attention heads and {kv_heads} key heads",
            value=size,
            allowed=", ".join(map(str, fitting)),
            todo="set one of these; for more GPUs, raise explorer.num_explorers",
        )


def refuse_adapters_beside_experts(folder: Path) -> None:
    """For `sync.adapters: alone`: with adapters vLLM 0.32 computes experts by other kernels, which do not run on a CPU and were not tried on a GPU.

    Raises:
        ConfigError: the model is a mixture of experts.
    """
    values = _text_config(folder)
    if any(values.get(name) for name in _NUM_EXPERTS):
        raise ConfigError(
            "vLLM does not keep adapters beside a mixture of experts",
            value=f"sync.adapters: alone, {values.get('model_type')}",
            allowed="sync.adapters: merged",
            todo="set it; explorer.engine: transformers takes adapters alone, too",
        )


def _text_config(folder: Path) -> dict[str, Any]:
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return dict(values.get("text_config") or values)


def check_stages(stages: Sequence[ResolvedRun]) -> None:
    """Refuse a stage that cannot start from the model of the stage before it.

    Raises:
        ConfigError: it is a reward model, and the stage trains a language model; or it is in another buffer.
    """
    for earlier, later in itertools.pairwise(stages):
        if later.config.buffer.uri != earlier.config.buffer.uri:
            raise ConfigError(
                f"{later.config.run.name} would start from the model of {earlier.config.run.name}, which is in another buffer",
                value=redacted(later.config.buffer.uri),
                allowed=redacted(earlier.config.buffer.uri),
                todo="give all stages one buffer, or write a file for each",
            )
        if earlier.algorithm.trains_scorer and not later.algorithm.trains_scorer:
            raise ConfigError(
                f"{later.config.run.name} would start from the model of {earlier.config.run.name}, which gives scores and writes no answers",
                todo=f"train the reward model with a file of its own, and name its checkpoint in explorer.reward: {PREFIX}FOLDER",
            )


def describe_models(resolved: ResolvedRun, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Describe the models beside the policy, and ask a teacher's server for log-probabilities.

    Raises:
        ModelError, PluginError, ConfigError: see `open_teacher`.
    """
    for model in resolved.models[1:]:
        yield f"{model.key}: {model.folder} has the policy's tokenizer"
    teacher = resolved.config.explorer.teacher
    if teacher is not None and teacher.endpoint is not None:

        async def ask() -> None:
            await (await open_teacher(resolved, tokenizer)).close()

        asyncio.run(ask())
        yield f"explorer.teacher: the server at {teacher.endpoint.url} scores the policy's tokens"
