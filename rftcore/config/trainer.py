"""Configuration of the trainer: batch, optimizer, numbers, checkpoints. Importing it does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rftdata.config import Section
from rftdata.plugins import Registry

# What holds a model, computes with it and updates it. The built-in `Network`'s public methods and attributes are what another backend must have:
# docs/how-to/train-on-several-gpus.md. Any: a type here would import torch for every reader of a configuration.
BACKENDS = Registry[Any]("trainer backend", {"fsdp2": "rftcore.trainer.network.network:Network"})


class OptimizerConfig(Section):
    """YAML may also give the name alone: `optimizer: muon`."""

    name: Literal["adamw", "muon"] = Field("adamw", description="How gradients become updates.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's decay rates of the first and second moment.")
    eps: float = Field(1.0e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay of matrices; vectors are exempt.")
    momentum: float = Field(0.95, ge=0, lt=1, description="Muon's momentum.")
    on_change: Literal["refuse", "reset"] = Field(
        "refuse",
        description="What a resumed run does if its checkpoint has the moments of another optimizer: refuse it, or begin those moments at 0.",
    )

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("betas")
    @classmethod
    def _betas_are_decay_rates(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("each must be at least 0 and below 1")
        return betas


# Embeddings and output layers of the usual families.
_OUTSIDE_LAYERS = frozenset({"embed_tokens", "wte", "embed_in", "lm_head", "embed_out", "score", "classifier"})


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685): the model's weights stay as they are, and only the adapters are trained."""

    rank: int = Field(32, ge=1, description="Rank of each adapter.")
    alpha: int = Field(32, ge=1, description="An adapter's output is multiplied by alpha / rank.")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Share of an adapter's inputs set to 0 in training; noise in the policy's ratios."
    )
    target_modules: Literal["all-linear"] | list[str] = Field(
        "all-linear",
        description="Linear layers with an adapter: all but the output layer, or the ends of their names, such as q_proj. Experts of a mixture have none.",
    )

    @field_validator("target_modules")
    @classmethod
    def _names_layers(cls, names: str | list[str]) -> str | list[str]:
        if not names or not all(names):
            raise ValueError("it names no layer, so nothing would be trained; name some, such as q_proj, or all-linear")
        outside = (
            [name for name in names if name.rpartition(".")[2] in _OUTSIDE_LAYERS] if isinstance(names, list) else []
        )
        if outside:
            raise ValueError(
                f"{', '.join(outside)}: embeddings and the output layer can have no adapter; name layers of the blocks, such as q_proj"
            )
        return names


class TrainerConfig(Section):
    batch_groups: int = Field(16, ge=1, description="Groups drawn for one trainer step.")
    epochs: int = Field(1, ge=1, description="Passes over the batch of a step.")
    mini_batches: int = Field(
        1, ge=1, description="Optimizer updates in one pass: whole groups are dealt into so many parts."
    )
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="A name, or {name, …} with the optimizer's keys.")
    learning_rate: float = Field(1.0e-6, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(0, ge=0, description="Steps over which the learning rate rises linearly to its peak.")
    lr_schedule: Literal["constant", "cosine", "linear", "wsd"] = Field(
        "constant",
        description="Learning rate after the warm-up. wsd stays at the peak and falls linearly over the last steps.",
    )
    min_lr_ratio: float = Field(
        0.1, ge=0, le=1, description="Where the learning rate ends at the last step, as a share of the peak."
    )
    lr_decay_ratio: float = Field(0.1, gt=0, le=1, description="Share of the run's steps over which wsd falls.")
    max_grad_norm: float | None = Field(1.0, gt=0, description="Gradients are scaled down to this norm; null: never.")
    router_aux_coef: float | None = Field(
        None,
        ge=0,
        description="Weight of the load-balancing loss of a mixture of experts; null: the model's own router_aux_loss_coef if its configuration has"
        " output_router_logits, otherwise 0.",
    )
    max_tokens_per_microbatch: int = Field(
        8192, ge=1, description="Tokens in one forward pass; a longer sequence passes alone."
    )
    share_prompts: bool = Field(
        True, description="Compute a prompt once for the responses that share it, where the model's attention allows."
    )
    checkpoint_every: int = Field(20, ge=1, description="Steps between checkpoints; the last step always has one.")
    keep_checkpoints: int = Field(2, ge=1, description="Newest checkpoints kept on disk, besides the best one.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Type of weights and optimizer state; bfloat16 loses updates smaller than 1/256 of a weight.",
    )
    autocast: Literal["auto", "none", "bfloat16"] = Field(
        "auto",
        description="Type of matrix products; none: that of dtype; auto: bfloat16 on GPUs and on CPUs that multiply it in hardware, otherwise none.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations backward: less memory, a third slower."
    )
    backend: str = Field(
        "fsdp2", description="What holds and updates the models: fsdp2, or a class of yours that does as it does."
    )
    compile: bool | None = Field(None, description="Compile the model's layers (torch.compile); null: on a GPU.")
    hang_s: float = Field(
        900.0,
        gt=0,
        description="Seconds for which a step may make no progress: one micro-batch, or the compilation before the first. Then the trainer ends with the"
        " stacks of its ranks, and `rft run` starts it again from the last checkpoint.",
    )
    num_threads: int | None = Field(
        None, ge=1, description="CPU threads of torch, of all ranks together; null: as the environment says."
    )
    num_gpus: int | None = Field(
        None,
        ge=1,
        description="GPUs that train together; null: one, or the CPU where there is none. On a CPU, that many processes.",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        description="GPUs over which each matrix of a layer is divided. Must divide num_gpus and the model's heads.",
    )
    lora: LoraConfig | None = Field(
        None, description="Train low-rank adapters instead of the weights; {} for those of every linear layer."
    )
    offload: bool = Field(
        True,
        description="With explorer.sleep, keep weights and optimizer state in the host's memory while the engine has the GPU; false keeps them on the GPU.",
    )
    offload_reference: bool = Field(
        False,
        description="Keep the reference model in the host's memory while it is not computed. With lora there is none: it is the policy without adapters.",
    )

    @model_validator(mode="after")
    def _tensor_parallel_divides_gpus(self) -> TrainerConfig:
        gpus = self.num_gpus or 1
        if gpus % self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel ({self.tensor_parallel}) must divide num_gpus ({'null, which is one' if self.num_gpus is None else gpus}): every "
                f"copy of the model is divided over tensor_parallel GPUs; set num_gpus to a multiple of {self.tensor_parallel}"
            )
        if self.lora is not None and self.tensor_parallel > 1:
            raise ValueError(
                "lora cannot be combined with tensor_parallel: adapters stand beside whole matrices; set tensor_parallel: 1"
            )
        return self

    def check_backend(self, base_dir: Path) -> None:
        """Load the backend, unless it is a built-in one, which would import torch.

        Raises:
            PluginError: it is unknown, or cannot be loaded.
        """
        if self.backend not in BACKENDS.builtins:
            BACKENDS.load(self.backend, base_dir)
