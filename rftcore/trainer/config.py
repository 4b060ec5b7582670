"""Configuration of the trainer: batch, optimizer, numbers, checkpoints. Importing it does not import torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rftdata.config import Section


class OptimizerConfig(Section):
    """YAML may also give the name alone: `optimizer: muon`."""

    name: Literal["adamw", "adamw-8bit", "muon"] = Field("adamw", description="How gradients become updates.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's decay rates of the first and second moment.")
    eps: float = Field(1.0e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay of matrices; vectors are exempt.")
    momentum: float = Field(0.95, ge=0, lt=1, description="Muon's momentum.")

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
    max_tokens_per_microbatch: int = Field(
        8192, ge=1, description="Tokens, padding included, in one forward pass; a longer sequence passes alone."
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
    autocast: Literal["none", "bfloat16"] = Field("bfloat16", description="Type of matrix products.")
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations backward: less memory, a third slower."
    )
    num_gpus: int | None = Field(
        None, ge=1, description="GPUs of the trainer, one process each; without GPUs, processes on the CPU; null: one."
    )
    num_threads: int | None = Field(None, ge=1, description="CPU threads of torch; null: as the environment says.")
