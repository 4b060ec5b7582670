"""Whether the models of a run fit its GPUs: memory, tensor parallelism, and the vocabulary of the tokenizer.

`rft check` prints the estimate from files on this machine and fetches nothing. `rft check --deep` refuses a run that does not fit. Where a
cluster runs the roles, the GPUs of this machine do not matter, and memory is only described.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from rftcore.algorithms.base import HeadTerm
from rftcore.checks.scheduling import needs_gpu
from rftcore.config.trainer import TrainerConfig
from rftcore.engines.vllm_arguments import can_free_memory
from rftcore.installation.requirements import installed_version
from rftcore.model_folder import stored_model
from rftcore.resolved import ResolvedRun
from rftcore.run.gpus import local_gpus, this_machine
from rftcore.run.placement import place_run
from rftcore.trainer.estimates.loading_memory import loading_memory, refuse_too_little_for_loading
from rftcore.trainer.estimates.memory import (
    ASLEEP_BYTES,
    GIB,
    Trained,
    engine_memory,
    host_memory,
    refuse_too_little_host_memory,
    refuse_too_little_memory,
    training_memory,
)
from rftcore.trainer.model_shape import read_model_shape, refuse_indivisible
from rftdata.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def describe_stored(resolved: ResolvedRun) -> Iterator[str]:
    """Yield the estimate of a GPU's memory if the run would train on GPUs: this machine has one, or trainer.num_gpus is set.

    Raises:
        ConfigError: trainer.lora names no layer, or trainer.tensor_parallel does not divide the model.
    """
    if resolved.config.trainer.num_gpus is None and not shutil.which("nvidia-smi"):
        return
    try:
        models = estimated_models(resolved)
    except ModelError as error:
        yield f"memory on a GPU was not estimated: {error.what}"
        return
    _refuse_uneven_division(resolved.config.trainer, models)
    yield from _describe(resolved, models)


def check_gpus(resolved: ResolvedRun) -> None:
    """Refuse a run that needs more GPUs than this machine has, or an engine that could not free theirs, unless a cluster runs it.

    Raises:
        ConfigError: see `place`; or `explorer.sleep` is set, and the installed vLLM cannot sleep.
    """
    if os.environ.get("RAY_ADDRESS"):
        return
    gpus, explorer = local_gpus(), resolved.config.explorer
    place_run(resolved, [this_machine(len(gpus))])
    if gpus and explorer.sleep and explorer.engine == "vllm" and not can_free_memory():
        raise ConfigError(
            "explorer.sleep needs the library cumem_allocator, which the installed vLLM lacks",
            value=True,
            todo="install a complete build for GPUs (`rft setup cuda`), or set explorer.sleep: false",
        )


def estimated_models(resolved: ResolvedRun) -> Trained:
    """Return the sizes of the trainer's models from files on this machine.

    Raises:
        ModelError: a model is not on this machine, or is of a family whose sizes are unknown.
    """
    base = resolved.config.base_dir

    def find(path: str) -> Path:
        folder = stored_model(str(base / path) if path.startswith((".", "/")) else path)
        if folder is None:
            raise ModelError(f"{path} is not on this machine, and --deep fetches it")
        return folder

    return _models(resolved, find)


def check_devices(resolved: ResolvedRun, model: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield the estimate of a GPU's memory as `describe_stored` does, and refuse a run that its GPUs cannot hold.

    Args:
        model: the configuration of the policy.

    Raises:
        ConfigError: the model's attention cannot be packed, the tokenizer has tokens that the model lacks, trainer.tensor_parallel does not
            divide the model, or this machine has too few GPUs or too little memory on them.
    """
    import torch

    from rftcore.trainer.estimates.packing_trial import try_packing
    from rftcore.trainer.network.packable import refuse_unpackable

    _refuse_more_tokens(model, tokenizer)
    refuse_unpackable(model)
    reason = try_packing(model)
    if reason is not None:
        yield f"packing of sequences was not tried for a {model.model_type}: {reason}"
    trainer, has_gpu = resolved.config.trainer, torch.cuda.is_available()
    if trainer.tensor_parallel > 1:
        refuse_indivisible(model.to_dict(), trainer.tensor_parallel)
    if trainer.num_gpus is None and not has_gpu:
        return
    folders = dict(_folders(resolved))
    try:
        models = _models(resolved, folders.__getitem__)
    except ModelError as error:  # the estimate does not support the family
        yield f"memory on a GPU was not estimated: {error.what}"
        return
    _refuse_uneven_division(trainer, models)
    yield from _describe(resolved, models)
    if has_gpu and not os.environ.get("RAY_ADDRESS"):
        sizes = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
        refuse_too_little_memory(trainer, models, available_bytes(resolved, sizes))
        refuse_too_little_for_loading(trainer, models, psutil.virtual_memory().total)
        shared_device = resolved.config.explorer.sleep
        refuse_too_little_host_memory(trainer, models, psutil.virtual_memory().total, shared_device=shared_device)


def available_bytes(resolved: ResolvedRun, sizes: list[int]) -> float:
    """Return the bytes that the trainer may use of each GPU: all, or what vLLM leaves where an explorer has the same GPU, awake or asleep.

    Args:
        sizes: bytes of each GPU of this machine.

    Raises:
        ConfigError: this machine has too few; see `place`.
    """
    placement = place_run(resolved, [this_machine(len(sizes))])
    engines = sum(len(bundle.roles) - 1 for bundle in placement.bundles if "trainer" in bundle.roles)
    if engines and resolved.config.explorer.sleep:
        return min(sizes) - ASLEEP_BYTES
    takes_share = resolved.config.explorer.engine == "vllm"
    share = resolved.engine(worker_index=0).gpu_memory_utilization if takes_share else 0.0
    return min(sizes) * (1 - engines * share)


def _models(resolved: ResolvedRun, find: Callable[[str], Path]) -> Trained:
    """Return the sizes of the models that the trainer holds.

    Args:
        find: returns the folder of a path in the configuration.

    Raises:
        ModelError: `find` has no folder, or a model is of a family whose sizes are unknown.
    """
    algorithm = resolved.algorithm
    critic, teacher = algorithm.config.critic, algorithm.config.teacher
    policy = read_model_shape(find(resolved.config.model.path))
    critic_shape = policy if critic is None or critic.path is None else read_model_shape(find(critic.path))
    reads_teacher = teacher is not None and {"teacher", "teacher_logits"} & algorithm.signals
    return Trained(
        policy=policy,
        critic=None if critic is None else critic_shape,
        has_reference="reference" in algorithm.signals,
        teacher=read_model_shape(find(teacher.path)) if teacher is not None and reads_teacher else None,
        reads_logits=isinstance(algorithm.loss, HeadTerm),
        compares_logits="teacher_logits" in algorithm.signals,
    )


def _folders(resolved: ResolvedRun) -> Iterator[tuple[str, Path]]:
    """Yield the paths of the trainer's models and their folders, which are fetched if needed."""
    algorithm = resolved.algorithm.config
    yield resolved.config.model.path, resolved.model_folder
    if algorithm.critic is not None and algorithm.critic.path is not None and resolved.critic_folder is not None:
        yield algorithm.critic.path, resolved.critic_folder
    if algorithm.teacher is not None and resolved.teacher_folder is not None:
        yield algorithm.teacher.path, resolved.teacher_folder


def _describe(resolved: ResolvedRun, models: Trained) -> Iterator[str]:
    config = resolved.config
    gpus = config.trainer.num_gpus or 1
    yield f"estimated memory of the trainer on {'each of ' if gpus > 1 else ''}{gpus} GPU{'s' if gpus > 1 else ''}:"
    yield from (f"  {line}" for line in training_memory(config.trainer, models).lines())
    yield "estimated memory of its host, if all of its GPUs are there, while models are loaded:"
    yield from (f"  {line}" for line in loading_memory(config.trainer, models).lines())
    yield "estimated memory of its host, if all of its GPUs are there, while a checkpoint is written:"
    yield from (
        f"  {line}" for line in host_memory(config.trainer, models, shared_device=config.explorer.sleep).lines()
    )
    if not config.has_explorer or config.explorer.engine == "none":
        return
    settings = resolved.engine(worker_index=0)
    engine = engine_memory(models.policy, settings.dtype)
    sequences = ""
    if settings.context_length is not None:
        whole = settings.max_num_seqs * settings.context_length * engine.cache_token_bytes / GIB
        sequences = f", {whole:.2f} GiB for {settings.max_num_seqs} sequences of {settings.context_length:,} tokens"
    yield (
        f"estimated memory of an explorer: weights {engine.weights_bytes / GIB:.2f} GiB, cache {engine.cache_token_bytes / 1024:.1f} KiB a token"
        f"{sequences}"
    )


def _refuse_more_tokens(model: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer with more tokens than the model's embedding has rows; further rows of an embedding are padding.

    Raises:
        ConfigError: the tokenizer has more tokens.
    """
    rows = getattr(model.get_text_config(), "vocab_size", None)
    token, last = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if rows is not None and last >= rows:
        raise ConfigError(
            f"the tokenizer has tokens that the model has not: {token!r} is number {last}, and the model's embedding has {rows:,} rows",
            todo="put the tokenizer into model.path with which the model was trained, or enlarge the model with resize_token_embeddings and save it",
        )


def _refuse_uneven_division(config: TrainerConfig, models: Trained) -> None:
    """Raise a ConfigError if trainer.tensor_parallel cannot divide one of the models."""
    for shape in (models.policy, models.critic, models.teacher):
        if shape is not None:
            shape.refuse_uneven_division(config.tensor_parallel)


def describe_engine_device(resolved: ResolvedRun) -> Iterator[str]:
    """Yield settings of the engine that have no effect on this machine. With a cluster, roles run elsewhere and nothing is checked.

    Raises:
        ConfigError: a setting or the engine needs a GPU, and this machine has none.
    """
    import torch

    config = resolved.config
    if os.environ.get("RAY_ADDRESS") or torch.cuda.is_available() or not config.has_explorer:
        return
    engine = resolved.engine(worker_index=0)
    if config.explorer.engine == "vllm" and installed_version("vllm"):
        raise ConfigError(
            "the installed vLLM is the build for GPUs, but this machine has no working GPU",
            value=config.explorer.engine,
            todo="install the CPU build (`rft setup cpu`), or run on a machine with an NVIDIA GPU and driver",
        )
    if engine.async_scheduling:
        raise needs_gpu()
    if "gpu_memory_utilization" in config.explorer.engine_args:
        yield "explorer.engine_args.gpu_memory_utilization has no effect on this machine, which has no GPU: kv_cache_gib applies"
