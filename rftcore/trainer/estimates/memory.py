"""Estimates of memory by arithmetic alone: of a GPU for training and for a rollout engine, and of the host.

Sizes come from config.json and the configuration, so no torch, weights or GPU are needed. The trainer holds weights of the optimizer's type
divided over all GPUs, a bfloat16 copy of the layers that are being computed, sequences packed without padding, and logits of some tokens at a
time. tests/unit/trainer/test_memory.py compares the estimate with the tensors that torch keeps. Peaks of an allocator are some percent higher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from rftcore.config.trainer import LoraConfig, TrainerConfig
from rftcore.trainer.estimates.activation_memory import activation_bytes
from rftcore.trainer.model_shape import KEPT_LOGITS_BYTES, LOGITS_BYTES, ModelShape
from rftdata.errors import ConfigError

GIB = 2**30
RUNTIME_BYTES = 3 * GIB // 2
"""CUDA context, workspaces of matrix products, NCCL's buffers."""
ASLEEP_BYTES = 3 * GIB // 2
"""Memory of a GPU that a sleeping vLLM engine keeps: CUDA context, CUDA graphs, workspaces. 1.0 GB were measured at 135M and at 1.5B on an H200."""

_FP32 = 4
TYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Layers that are gathered at one time: the computed one and the next.
_LAYERS_GATHERED = 2
# Rows of the size of the logits that exist at one time where a loss compares whole distributions: with the generalised Jensen-Shannon
# divergence, whose three distributions and their products are kept, in its backward pass.
_ROWS_COMPARED = 11
# The same where a loss reads the policy's distributions alone.
_ROWS_READ = 5
_SMALLEST_MICRO_BATCH = 1024
_MOST_GPUS = 64


class Part(NamedTuple):
    """A share of the memory.

    Attributes:
        name: of the share.
        size_bytes: on one GPU.
        note: how the size was computed.
    """

    name: str
    size_bytes: int
    note: str


@dataclass(frozen=True)
class Estimate:
    """The memory of one GPU, by parts."""

    parts: tuple[Part, ...]

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    def part(self, name: str) -> int:
        """Return the bytes of one part; 0 for one that is left out."""
        return sum(part.size_bytes for part in self.parts if part.name == name)

    def lines(self) -> list[str]:
        """Return a table, one line per part and one for all together."""
        rows = [*self.parts, Part("together", self.size_bytes, "")]
        width = max(len(row.name) for row in rows)
        return [f"{row.name:{width}}  {row.size_bytes / GIB:7.2f} GiB  {row.note}".rstrip() for row in rows]

    def __str__(self) -> str:
        return ", ".join(f"{part.name} {part.size_bytes / GIB:.1f}" for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The models of a trainer.

    Attributes:
        policy: the policy, or the reward model in its place.
        critic: a value model beside the policy; all of its weights are trained.
        has_reference: whether a reference model is computed.
        teacher: a model whose log-probabilities the trainer computes.
        reads_logits: whether the loss reads whole distributions of the policy, besides the token's own probability.
        compares_logits: whether the loss compares whole distributions of policy and teacher.
    """

    policy: ModelShape
    critic: ModelShape | None = None
    has_reference: bool = False
    teacher: ModelShape | None = None
    reads_logits: bool = False
    compares_logits: bool = False


def training_memory(config: TrainerConfig, models: Trained) -> Estimate:
    """Estimate the memory of each GPU at the peak of a step, in the backward pass of the largest micro-batch.

    Raises:
        ConfigError: trainer.lora names no layer of the policy.
    """
    item, tokens = compute_bytes(config), config.max_tokens_per_microbatch
    parts = [*_states(config, models.policy, config.lora), *_gathered(config, models.policy)]
    trained = [models.policy]
    if models.critic is not None:
        trained.append(models.critic)
        size = sum(part.size_bytes for part in _states(config, models.critic, None))
        parts.append(Part("critic", size, "its weights, gradients and optimizer"))
    # Policy and critic are differentiated one after the other, so the larger one counts.
    activations = max(
        activation_bytes(
            shape,
            tokens,
            checkpointing=config.gradient_checkpointing,
            compiled=config.compile is not False,
            tensor_parallel=config.tensor_parallel,
            item=item,
        )
        for shape in trained
    )
    checkpointed = ", with gradient_checkpointing" if config.gradient_checkpointing else ""
    parts.append(Part("activations", activations, f"{tokens:,} tokens a micro-batch{checkpointed}"))
    parts += _logits(config, models)
    # Under LoRA the reference is the policy without its adapters.
    has_reference = models.has_reference and not config.offload_reference and config.lora is None
    for name, shape in (("reference", models.policy if has_reference else None), ("teacher", models.teacher)):
        if shape is not None:
            parts.append(Part(name, _sharded(config, shape, item), f"{item} bytes a weight, {_division(config)}"))
    return Estimate((*parts, Part("runtime", RUNTIME_BYTES, "CUDA, matrix products, NCCL")))


def _logits(config: TrainerConfig, models: Trained) -> list[Part]:
    """Return the parts of the output layer, which computes some tokens at a time."""
    item, tokens = compute_bytes(config), config.max_tokens_per_microbatch
    row = _FP32 * models.policy.vocabulary
    rows = max(1, min(tokens, LOGITS_BYTES // row))
    if models.compares_logits and models.teacher is not None:
        parts = [
            Part(
                "logits",
                _ROWS_COMPARED * rows * row,
                f"of {rows:,} tokens, of policy and teacher, and what the loss makes of them",
            ),
            Part(
                "gathered teacher",
                item * models.teacher.root_parameters,
                f"embedding and output layer, {item} bytes a weight",
            ),
        ]
    elif models.reads_logits:
        parts = [Part("logits", _ROWS_READ * rows * row, f"of {rows:,} tokens, and what the loss makes of them")]
    else:
        kept = 0 if config.gradient_checkpointing else KEPT_LOGITS_BYTES
        size = min(item * models.policy.vocabulary * tokens, kept + LOGITS_BYTES)
        # Gradients replace logits.
        parts = [Part("logits", size, f"{kept / GIB:.0f} GiB are kept for the backward pass")]
    if tokens > rows:  # so that gradients of the pieces are added up in float32
        parts.append(Part("output layer", _FP32 * models.policy.embedding_parameters, f"{_FP32} bytes a weight"))
    return parts


def kept_memory(config: TrainerConfig, models: Trained) -> int:
    """Return the bytes that a trainer keeps on its GPU while an engine has it.

    Raises:
        ConfigError: trainer.lora names no layer of the policy.
    """
    if config.offload:
        return RUNTIME_BYTES
    estimate = training_memory(config, models)
    kept = ("weights", "adapters", "optimizer", "reference", "teacher", "runtime")
    critic = (
        0
        if models.critic is None
        else sum(p.size_bytes for p in _states(config, models.critic, None) if p.name in kept)
    )
    return critic + sum(estimate.part(name) for name in kept)


def host_memory(config: TrainerConfig, models: Trained, *, shared_device: bool = False) -> Estimate:
    """Estimate the memory of a host while a checkpoint is written beside training, if all GPUs are on it.

    Args:
        shared_device: whether trainer and engine share a GPU (`explorer.sleep`), so that the trainer's state may wait on the host.

    Raises:
        ConfigError: trainer.lora names no layer of the policy.
    """
    parts = []
    if shared_device and config.offload:
        kept = kept_memory(config.model_copy(update={"offload": False}), models) - RUNTIME_BYTES
        parts.append(Part("weights and optimizer", kept, "while the engine has the GPU (trainer.offload)"))
    for name, shape, lora in (("", models.policy, config.lora), ("critic's ", models.critic, None)):
        if shape is not None:
            weight = TYPE_BYTES[config.dtype] if lora is None else _FP32  # merged with the adapters
            parts.append(
                Part(f"copy of the {name}weights", weight * shape.parameters, f"{weight} bytes a weight, whole")
            )
            number, moments = _moments(config, shape, lora)
            parts.append(Part(f"copy of the {name}optimizer", round(moments * number), f"{moments:.3g} bytes a weight"))
    if models.has_reference and config.offload_reference and config.lora is None:
        item = compute_bytes(config)
        parts.append(Part("reference", item * models.policy.parameters, f"{item} bytes a weight, offloaded"))
    return Estimate(tuple(parts))


def _num_gpus(config: TrainerConfig) -> int:
    return config.num_gpus or 1


def _division(config: TrainerConfig) -> str:
    gpus = _num_gpus(config)
    return f"divided over {gpus} GPUs" if gpus > 1 else "on one GPU"


def compute_bytes(config: TrainerConfig) -> int:
    """Return the bytes of a weight or an activation in matrix products on a GPU."""
    return TYPE_BYTES[config.dtype] if config.autocast == "none" else 2


def _sharded(config: TrainerConfig, shape: ModelShape, item: float) -> int:
    """Return the bytes of each GPU's share of a model.

    Matrices of layers are divided over all GPUs. Vectors, embedding and output layer are divided over those that see different
    sequences, and are the same on the GPUs of one tensor-parallel group.
    """
    gpus = _num_gpus(config)
    matrices = shape.matrix_parameters
    return round(item * (matrices / gpus + (shape.parameters - matrices) * config.tensor_parallel / gpus))


def _states(config: TrainerConfig, shape: ModelShape, lora: LoraConfig | None) -> list[Part]:
    """Return the parts of a trained model that each GPU always holds: its shares of weights, gradients and moments."""
    item, place, compute = TYPE_BYTES[config.dtype], _division(config), compute_bytes(config)
    name = config.optimizer.name
    number, moments = _moments(config, shape, lora)
    if lora is None:
        return [
            Part("weights", _sharded(config, shape, item), f"{number:,} of {item} bytes, {place}"),
            Part("gradients", _sharded(config, shape, item), f"{item} bytes a weight"),
            Part("optimizer", _sharded(config, shape, moments), f"{name}: {moments:.3g} bytes a weight"),
        ]
    # Weights that are never updated have the type of the products. Adapters are float32 and whole on every GPU.
    return [
        Part("weights", _sharded(config, shape, compute), f"{shape.parameters:,} of {compute} bytes, frozen, {place}"),
        Part("adapters", number * _FP32, f"{number:,} of {_FP32} bytes, on every GPU"),
        Part("gradients", number * _FP32, f"{_FP32} bytes a weight of adapters"),
        Part("optimizer", round(number * moments), f"{name}: {moments:.3g} bytes a weight of adapters"),
    ]


def _moments(config: TrainerConfig, shape: ModelShape, lora: LoraConfig | None) -> tuple[int, float]:
    """Return the number of weights that the optimizer updates, and the bytes of its moments for each."""
    # Muon has one moment for each weight of a matrix, and AdamW two for the others.
    if lora is not None:
        number = shape.adapter_parameters(lora.rank, lora.target_modules)
        return number, {"adamw": 2 * _FP32, "muon": _FP32}[config.optimizer.name]
    item, matrices = TYPE_BYTES[config.dtype], shape.matrix_parameters
    moments = {"adamw": 2.0 * item, "muon": item * (2 - matrices / shape.parameters)}
    return shape.parameters, moments[config.optimizer.name]


def _gathered(config: TrainerConfig, shape: ModelShape) -> list[Part]:
    """Return the parts that are gathered: layers, embedding and output layer in the type of the products, and their gradients before they are divided."""
    item, tp = compute_bytes(config), config.tensor_parallel
    # See `Network`: a single data-parallel rank keeps weights in the products' type for all micro-batches of an update.
    keeps_all = _num_gpus(config) == tp and config.lora is None and item < TYPE_BYTES[config.dtype]
    layers = shape.layers if keeps_all else _LAYERS_GATHERED
    weights = round(item * (layers * shape.layer_parameters / tp + shape.root_parameters))
    note = f"{layers} layers, embedding and output layer, {item} bytes a weight"
    parts = [Part("gathered weights", weights, note)]
    if config.lora is None:
        # Of the products' type at first, then float32 for the sum over GPUs and micro-batches.
        gradients = round((item + _FP32) * (shape.layer_parameters / tp + shape.embedding_parameters))
        parts.append(Part("gathered gradients", gradients, f"one layer and the output layer, {item} and {_FP32} bytes"))
    return parts


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """The memory of a rollout engine on one GPU.

    Attributes:
        weights_bytes: the whole model.
        cache_token_bytes: keys and values of one token in all layers.
    """

    weights_bytes: int
    cache_token_bytes: int

    def cached_tokens(self, size_bytes: float) -> int:
        """Return the number of tokens whose keys and values fit into so many bytes beside the weights."""
        return max(0, int((size_bytes - self.weights_bytes) // self.cache_token_bytes))


def engine_memory(shape: ModelShape, dtype: Literal["auto", "float32", "bfloat16", "float16"]) -> EngineMemory:
    """Estimate the memory of an engine of `explorer.engine_args.dtype`."""
    item = TYPE_BYTES.get(shape.dtype if dtype == "auto" else dtype, 2)
    return EngineMemory(weights_bytes=shape.parameters * item, cache_token_bytes=2 * shape.layers * shape.kv * item)


def refuse_too_little_memory(config: TrainerConfig, models: Trained, available_bytes: float) -> Estimate:
    """Return the estimate if it fits.

    Args:
        available_bytes: what the trainer may use of each GPU.

    Raises:
        ConfigError: it does not fit. The error lists the parts, and settings that need less with the memory that they would need. Or see
            `training_memory`.
    """
    estimate = training_memory(config, models)
    if estimate.size_bytes <= available_bytes:
        return estimate
    raise ConfigError(
        f"training needs about {estimate.size_bytes / GIB:.1f} GiB on each GPU, and may use {available_bytes / GIB:.1f} GiB of it ({estimate})",
        todo=_advice(config, models, available_bytes),
    )


def refuse_too_little_host_memory(
    config: TrainerConfig, models: Trained, available_bytes: float, *, shared_device: bool = False
) -> None:
    """Raise a ConfigError if the copy of a checkpoint and offloaded state do not fit the host with all GPUs; see `host_memory`."""
    estimate = host_memory(config, models, shared_device=shared_device)
    if estimate.size_bytes > available_bytes:
        offloaded = "trainer.offload_reference: false, or " if estimate.part("reference") else ""
        raise ConfigError(
            f"a checkpoint is copied to the memory of the host, which needs about {estimate.size_bytes / GIB:.1f} GiB and has {available_bytes / GIB:.1f} "
            f"({estimate})",
            todo=f"set {offloaded}trainer.lora: {{}}, or take a host with more memory",
        )


def _advice(config: TrainerConfig, models: Trained, available_bytes: float) -> str:
    """Return the settings that suffice alone, each with the memory that it needs; if none does, those that help, and all of them together."""
    before = training_memory(config, models).size_bytes
    changes = _changes(config, models, available_bytes)
    sizes = {
        text: training_memory(config.model_copy(update=change), models).size_bytes for text, change in changes.items()
    }
    helping = {text: size for text, size in sizes.items() if size < before}
    enough = {text: size for text, size in helping.items() if size <= available_bytes}
    listed = ", or ".join(f"{text} ({size / GIB:.1f} GiB)" for text, size in (enough or helping).items())
    if enough:
        return f"set {listed}"
    everything = {key: value for text in helping for key, value in changes[text].items()}
    combined = training_memory(config.model_copy(update=everything), models).size_bytes
    return f"none of these is enough alone: {listed}; combine them (all together {combined / GIB:.1f} GiB), or take a smaller model or more GPUs"


def _changes(config: TrainerConfig, models: Trained, available_bytes: float) -> dict[str, dict[str, object]]:
    """Return changes of the configuration that may need less memory, by their spelling in YAML."""
    changes: dict[str, dict[str, object]] = {}
    if not config.gradient_checkpointing:
        changes["trainer.gradient_checkpointing: true"] = {"gradient_checkpointing": True}

    def fits(**change: object) -> bool:
        return training_memory(config.model_copy(update=change), models).size_bytes <= available_bytes

    tokens = config.max_tokens_per_microbatch // 2
    while tokens > _SMALLEST_MICRO_BATCH and not fits(max_tokens_per_microbatch=tokens):
        tokens //= 2
    if tokens >= _SMALLEST_MICRO_BATCH:
        changes[f"trainer.max_tokens_per_microbatch: {tokens}"] = {"max_tokens_per_microbatch": tokens}
    gpus = 2 * _num_gpus(config)
    while gpus < _MOST_GPUS and not fits(num_gpus=gpus):
        gpus *= 2
    if fits(num_gpus=gpus):
        changes[f"trainer.num_gpus: {gpus}"] = {"num_gpus": gpus}
    if config.lora is None:
        changes["trainer.lora: {}"] = {"lora": LoraConfig()}
    if models.has_reference and not config.offload_reference and config.lora is None:
        changes["trainer.offload_reference: true"] = {"offload_reference": True}
    return changes
