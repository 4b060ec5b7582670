"""Estimate of a host's memory while the trainer's ranks load their models, by arithmetic alone, as in `rftcore.trainer.estimates.memory`.

Every rank opens the model's files in the type in which they are stored. They are mapped, so all ranks of a host share one copy, which the operating system
may drop. Each rank then converts one layer after the other to the trainer's type, with its experts directly from the files, and keeps its share.
tests/unit/trainer/test_loading.py compares the estimate with what ranks really take.
"""

from __future__ import annotations

from rftcore.config.trainer import LoraConfig, TrainerConfig
from rftcore.trainer.estimates.memory import GIB, TYPE_BYTES, Estimate, Part, Trained, compute_bytes
from rftcore.trainer.model_shape import ModelShape
from rftdata.errors import ConfigError

_FP32 = 4
PROCESS_BYTES = 2 * GIB
"""Python, torch and CUDA in the memory of one rank's process."""


def loading_memory(config: TrainerConfig, models: Trained, *, on_gpus: bool = True) -> Estimate:
    """Estimate the memory of a host while models are loaded, if all ranks are on it. Models are loaded one by one, so the largest counts.

    Args:
        on_gpus: whether shares of weights go to GPUs, or stay in the memory of the host.

    Raises:
        ConfigError: trainer.lora names no layer of the policy.
    """
    loaded = [
        (models.policy, config.lora),
        *((shape, None) for shape in (models.critic, models.teacher) if shape is not None),
    ]
    parts = max(
        (_parts(config, shape, lora, on_gpus) for shape, lora in loaded), key=lambda parts: Estimate(parts).size_bytes
    )
    ranks = config.num_gpus or 1
    return Estimate((*parts, Part("processes", ranks * PROCESS_BYTES, f"Python, torch and CUDA of {ranks}")))


def _parts(config: TrainerConfig, shape: ModelShape, lora: LoraConfig | None, on_gpus: bool) -> tuple[Part, ...]:
    ranks, stored = config.num_gpus or 1, TYPE_BYTES.get(shape.dtype, _FP32)
    master = compute_bytes(config) if on_gpus and lora is not None else TYPE_BYTES[config.dtype]
    parts = [Part("files", stored * shape.parameters, "mapped once for all ranks; freed where others need it")]
    if on_gpus:
        # Copies to a GPU that change the type do so on the host, one matrix at a time. None is larger than the embedding.
        largest = 0 if stored == master else master * shape.embedding_parameters
        parts.append(
            Part("largest matrix", ranks * largest, f"of {ranks} ranks, {master} bytes a weight, on its way to a GPU")
        )
    else:
        parts.append(Part("shares", master * shape.parameters, f"{master} bytes a weight, on all ranks together"))
        unit = max(shape.layer_parameters, shape.root_parameters)
        parts.append(Part("largest unit", ranks * master * unit, f"of {ranks} ranks, whole until it is divided"))
    if lora is not None:
        number = shape.adapter_parameters(lora.rank, lora.target_modules)
        parts.append(
            Part("adapters", ranks * _FP32 * number, f"{_FP32} bytes a weight, whole on each of {ranks} ranks")
        )
    return tuple(parts)


def refuse_too_little_for_loading(config: TrainerConfig, models: Trained, available_bytes: float) -> None:
    """Raise a ConfigError if loading needs more memory than a host with all GPUs has; mapped files, which the system may drop, do not count."""
    estimate = loading_memory(config, models)
    needed = estimate.size_bytes - estimate.part("files")
    if needed > available_bytes:
        raise ConfigError(
            f"loading the models needs about {needed / GIB:.1f} GiB of the host's memory, which has {available_bytes / GIB:.1f} ({estimate})",
            todo="lower trainer.num_gpus, or take a host with more memory",
        )
