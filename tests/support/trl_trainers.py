"""TRL's trainers without a model, for comparisons of losses: TRL computes its loss from tensors of the test.

A trainer is made without its constructor and given the attributes that its loss reads. Its model is a function that returns the
test's own tensors, so that both sides start from the same leaf and the gradients can be compared there.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

TrainerT = TypeVar("TrainerT")

# Its warning that experimental trainers may change would be an error of the test that imports one first.
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


def bare(trainer: type[TrainerT], **attributes: Any) -> TrainerT:
    """A trainer with these attributes and those that every loss of TRL reads."""
    made = trainer.__new__(trainer)
    alone = SimpleNamespace(
        device=torch.device("cpu"),
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        parallelism_config=None,
        num_processes=1,
        unwrap_model=lambda model: model,
    )
    common = {
        "model": SimpleNamespace(training=False),
        "accelerator": alone,
        "aux_loss_enabled": False,
        "is_encoder_decoder": False,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "_total_train_tokens": 0,
    }
    made.__dict__.update(common | attributes)
    return made


def gives_logprobs(*by_first_token: Tensor) -> Callable[..., SimpleNamespace]:
    """A model of TRL's fused kind: the call whose first input id is i gets the i-th tensor as its log-probabilities [B, T]."""

    def forward(input_ids: Tensor, **_: Any) -> SimpleNamespace:
        logprobs_BT = by_first_token[int(input_ids[0, 0])]
        zeros_BT = torch.zeros_like(logprobs_BT)
        return SimpleNamespace(
            log_probs=logprobs_BT,
            entropy=zeros_BT,
            mean_logits=zeros_BT,
            is_top1=zeros_BT.bool(),
            log_sum_sq_probs=zeros_BT,
            label_mask=logprobs_BT != 0,
        )

    return forward


def gives_logits(logits: Tensor) -> Callable[..., SimpleNamespace]:
    """A model of the plain kind, whatever its inputs."""
    return lambda *_, **__: SimpleNamespace(logits=logits)
