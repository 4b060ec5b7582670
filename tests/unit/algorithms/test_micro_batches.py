"""Every preset: loss, gradient and metrics do not depend on how a batch is cut into micro-batches of whole sequences or pairs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rftcore.algorithms import build_algorithm
from rftcore.algorithms.base import Loss, Signals, StepBatch, TokenTerm, TokenView
from rftcore.algorithms.presets import presets
from tests.support.algorithms import loss_in_parts, outputs_of, step_batch

LENGTHS = [3, 1, 0, 4, 2, 2, 5, 1, 1, 3, 2, 6]
NUM = sum(LENGTHS)


def batch() -> StepBatch:
    """Three groups of four responses, of different lengths, one of them empty."""
    random = torch.Generator().manual_seed(0)
    return step_batch(
        torch.randn(12, generator=random).tolist(),
        [0] * 4 + [1] * 4 + [2] * 4,
        [0, 1, 2, 3] * 3,
        tokens=LENGTHS,
        behavior=(-2.0 * torch.rand(NUM, generator=random)).tolist(),
        expert=[row % 4 == 1 for row in range(12)],
        step=3,
        token_rewards_N=0.1 * torch.randn(NUM, generator=random),
        step_rewards_BA=torch.randn(12, generator=random),
        state_BA=torch.tensor([7, 7, 8, 9] * 3),
        baseline_rewards_B=torch.randn(4, generator=random).repeat_interleave(3),
        role_baselines_B=torch.randn(12, generator=random),
        reward_parts_B=torch.randn(12, 2, generator=random),
        reward_names=("right", "short"),
    )


def signals() -> Signals:
    random = torch.Generator().manual_seed(1)
    numbers = [torch.rand(NUM, generator=random) for _ in range(6)]
    return Signals(
        old_N=-2.0 * numbers[0],
        reference_N=-2.0 * numbers[1],
        teacher_N=-2.0 * numbers[2],
        values_N=numbers[3],
        entropy_N=numbers[4],
        discriminator_N=numbers[5] - 0.5,
        collision_N=numbers[5],
        mismatched_kl=torch.tensor(0.3),
    )


def leaves() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(2)
    return {
        "logprobs_N": (-2.0 * torch.rand(NUM, generator=random)).requires_grad_(),
        "values_N": torch.randn(NUM, generator=random).requires_grad_(),
        "read_N": torch.rand(NUM, generator=random).requires_grad_(),
    }


@pytest.mark.parametrize("preset", sorted(presets()))
@pytest.mark.parametrize(
    "cut",
    [[[0], [1], [2], [3], [4], [5], [6], [7], [8], [9], [10], [11]], [[8, 9, 2, 3], [0, 1, 10, 11, 4, 5], [6, 7]]],
)
def test_do_not_change_the_loss_or_the_gradient(preset: str, cut: list[list[int]]) -> None:
    algorithm = build_algorithm(preset, group_size=4)
    if algorithm.pairwise:
        cut = cut if len(cut) == 3 else [[first, first + 1] for first in range(0, 12, 2)]
    found, gradients = [], []
    for micro_batches in (None, cut):
        given = leaves()
        loss = loss_in_parts(
            algorithm,
            batch(),
            signals(),
            given["logprobs_N"],
            micro_batches,
            values_N=given["values_N"],
            read_N=given["read_N"],
        )
        loss.backward()
        found.append(loss.detach())
        gradients.append([leaf.grad for leaf in given.values()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
    assert any(grad is not None and grad.abs().max() > 0 for grad in gradients[0])
    for after, before in zip(gradients[1], gradients[0], strict=True):
        assert (after is None) == (before is None)
        if before is not None:
            torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-7)


class Undetached(TokenTerm):
    """A loss whose metric still has its gradient."""

    def __call__(self, view: TokenView) -> Loss:
        return Loss(-view.logprobs_N, {"logprob": view.logprobs_N})


def test_metrics_keep_no_graph_alive() -> None:
    algorithm = build_algorithm("grpo", group_size=4)
    algorithm.loss = Undetached()
    plan = algorithm.plan(batch(), signals())
    index_N = torch.arange(NUM)
    loss, metrics = algorithm.objective(plan, outputs_of(plan, index_N, leaves()["logprobs_N"]))
    assert loss.requires_grad and not metrics["logprob"].requires_grad
