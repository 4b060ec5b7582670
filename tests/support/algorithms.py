"""Batches and views of a few tokens, for tests of algorithms against numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rftcore.algorithms.algorithm import Algorithm
from rftcore.algorithms.base import Signals, StepBatch, TokenView
from rftcore.algorithms.plan import Plan, TokenOutputs
from rftcore.algorithms.sequences import Sequences


def step_batch(
    rewards: list[float],
    groups: list[int] | None = None,
    rollouts: list[int] | None = None,
    *,
    tokens: list[int] | None = None,
    turns: list[int] | None = None,
    behavior: list[float] | None = None,
    expert: list[bool] | None = None,
    step: int = 1,
    **optional: Any,
) -> StepBatch:
    """A batch of `len(rewards)` sequences with `tokens` tokens each (1 by default), all in group 0 unless `groups` is given."""
    num = len(rewards)
    sequence_N = torch.arange(num).repeat_interleave(torch.tensor(tokens or [1] * num, dtype=torch.int64))
    return StepBatch(
        step=step,
        rewards_B=torch.tensor(rewards, dtype=torch.float32),
        group_B=torch.tensor(groups or [0] * num, dtype=torch.int64),
        rollout_B=torch.tensor(rollouts if rollouts is not None else range(num), dtype=torch.int64),
        turn_BA=torch.tensor(turns or [0] * num, dtype=torch.int64)[:, None],
        turn_N=torch.zeros_like(sequence_N),
        sequence_N=sequence_N,
        behavior_N=torch.zeros(len(sequence_N)) if behavior is None else torch.tensor(behavior, dtype=torch.float32),
        importance_weights_B=torch.ones(num),
        expert_B=torch.zeros(num, dtype=torch.bool) if expert is None else torch.tensor(expert, dtype=torch.bool),
        **{
            name: value if value is None or name == "reward_names" else _per_turn(name, torch.as_tensor(value))
            for name, value in optional.items()
        },
    )


def _per_turn(name: str, values: Tensor) -> Tensor:
    """Values of turns as [B, A]; one for each sequence is given as [B]."""
    return values[:, None] if name.endswith("_BA") and values.ndim == 1 else values


def token_view(logprobs: list[float], **fields: list[float] | list[int]) -> TokenView:
    """A view of tokens with these log-probabilities, which carry the gradient; each token is a sequence by default."""
    num = len(logprobs)
    fields = {"anchor_N": [0.0] * num, "advantages_N": [0.0] * num, "sequence_N": list(range(num))} | fields
    sequence_N = torch.tensor(fields.pop("sequence_N"), dtype=torch.int64)
    return TokenView(
        logprobs_N=torch.tensor(logprobs, dtype=torch.float32).requires_grad_(),
        sequences=Sequences.of(sequence_N),
        **{name: torch.tensor(values, dtype=torch.float32) for name, values in fields.items()},
    )


def outputs_of(plan: Plan, index_N: Tensor, logprobs_N: Tensor, **computed: Tensor) -> TokenOutputs:
    """What models computed of the tokens of a micro-batch."""
    sequences = Sequences.of(plan.batch.sequence_N[index_N])
    return TokenOutputs(index_N=index_N, sequences=sequences, logprobs_N=logprobs_N, **computed)


def ratio_view(values: list[float], advantage: list[float]) -> TokenView:
    """Tokens with these ratios: the current log-probability is log(ratio), the anchor's is 0."""
    return token_view([math.log(value) for value in values], advantages_N=advantage)


def token_gradient(loss_N: Tensor, view: TokenView) -> list[float]:
    """The gradient of the sum by the log-probability of each token."""
    (grad,) = torch.autograd.grad(loss_N.sum(), view.logprobs_N)
    found: list[float] = grad.tolist()
    return found


def loss_and_gradient(
    algorithm: Algorithm,
    batch: StepBatch,
    logprobs: list[float],
    signals: Signals | None = None,
    **with_gradient: Tensor,
) -> tuple[float, list[float], dict[str, float]]:
    """The loss of a whole batch in one micro-batch, its gradient by log-probability, and all metrics."""
    plan = algorithm.plan(batch, signals or Signals())
    logprobs_N = torch.tensor(logprobs, dtype=torch.float32, requires_grad=True)
    index_N = torch.arange(len(logprobs))
    loss, metrics = algorithm.objective(plan, outputs_of(plan, index_N, logprobs_N, **with_gradient))
    (gradient,) = torch.autograd.grad(loss, logprobs_N)
    return loss.item(), gradient.tolist(), plan.metrics | {name: value.item() for name, value in metrics.items()}


def loss_in_parts(
    algorithm: Algorithm,
    batch: StepBatch,
    signals: Signals,
    logprobs_N: Tensor,
    micro_batches: list[list[int]] | None = None,
    **with_gradient: Tensor,
) -> Tensor:
    """The loss of a batch, summed over micro-batches.

    Args:
        micro_batches: the sequences of each; all in one by default.
        with_gradient: `values_N` or `read_N` of the whole batch.
    """
    plan = algorithm.plan(batch, signals)
    loss = torch.zeros(())
    for sequences in micro_batches or [list(range(batch.num_sequences))]:
        index_N = torch.isin(batch.sequence_N, torch.tensor(sequences, dtype=torch.int64)).nonzero()[:, 0]
        cut = {name: values_N[index_N] for name, values_N in with_gradient.items()}
        loss = loss + algorithm.objective(plan, outputs_of(plan, index_N, logprobs_N[index_N], **cut))[0]
    return loss
