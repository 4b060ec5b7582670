"""A two-layer Llama and batches for it, for tests of the learner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rftcore.algorithms.algorithm import Algorithm
from rftcore.config.trainer import TrainerConfig
from rftcore.trainer.batches.padding import PackedColumns, pad_batch
from rftcore.trainer.batches.train_batch import TrainBatch
from rftcore.trainer.learner import Learner
from rftcore.trainer.learner_arguments import LearnerArguments

VOCABULARY = 50


def save_model(folder: Path, *, tied: bool) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)  # random logits are almost uniform; differences should show
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def config(**settings: Any) -> TrainerConfig:
    """Layers are not compiled unless asked for, which takes 20 s for each learner on a GPU."""
    defaults = {"autocast": "none", "compile": False, "learning_rate": 1e-3, "max_tokens_per_microbatch": 4096}
    return TrainerConfig(**(defaults | settings))


def make_learner(
    model_path: str | Path,
    config: TrainerConfig,
    algorithm: Algorithm,
    seed: int,
    device: str | torch.device | None = None,
    **others: Any,
) -> Learner:
    """A learner; `others` are arguments that have a default."""
    return Learner(LearnerArguments(model_path=str(model_path), config=config, seed=seed, **others), algorithm, device)


def make_batch(seed: int, *, groups: int = 3, size: int = 4, rewards: list[float] | None = None) -> TrainBatch:
    """Groups with one prompt each, responses of 1 to 6 tokens, one of them empty."""
    random = np.random.default_rng(seed)
    tokens, masks = [], []
    for group in range(groups):
        prompt = random.integers(0, VOCABULARY, 8 + group)
        for member in range(size):
            length = 0 if (group, member) == (1, 0) else int(random.integers(1, 7))
            tokens.append(np.concatenate([prompt, random.integers(0, VOCABULARY, length)]))
            masks.append(np.arange(len(tokens[-1])) >= len(prompt))
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in tokens])])
    return pad_batch(
        PackedColumns(
            token_ids=(np.concatenate(tokens), offsets),
            loss_mask=(np.concatenate(masks), offsets),
            behavior_logprobs=(random.normal(-4.0, 0.5, offsets[-1]).astype(np.float32), offsets),
            rewards=rewards if rewards is not None else random.integers(0, 2, groups * size).astype(np.float32),
            group_ids=np.repeat(np.arange(groups), size),
            rollout_index=np.tile(np.arange(size), groups),
        )
    )


def batch_with_everything(seed: int = 1, *, paired: bool = False) -> TrainBatch:
    """Rewards of both signs, and every array that an algorithm may read."""
    batch = make_batch(seed, rewards=[float(index % 3) - 1.0 for index in range(12)])
    return replace(
        batch,
        teacher_logprobs_BT=batch.behavior_logprobs_BT / 2,
        step_rewards_BA=torch.arange(12)[:, None] / 12.0,
        state_BA=torch.arange(12)[:, None] % 4,
        baseline_rewards_B=torch.full((12,), 0.25),
        role_baselines_B=torch.full((12,), 0.25),
        paired=paired,
        reward_parts_B=torch.stack([torch.arange(12) % 3 / 2.0, torch.arange(12) % 2 / 1.0], dim=1),
        reward_names=("right", "short"),
    )


def weights(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in learner.policy.model.named_parameters()}
