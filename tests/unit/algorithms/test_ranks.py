"""Two processes with a share of the groups each, over gloo: the sum of their gradients is that of the whole batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rftcore.algorithms import build_algorithm
from rftcore.algorithms.base import HeadTerm, Signals, StepBatch
from rftcore.algorithms.presets import presets
from rftcore.algorithms.ranks import collect, joined
from rftdata.errors import RftError
from tests.support.algorithms import step_batch

NUM_RANKS = 2
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in sorted(presets()) if build_algorithm(name).loss.unit == "token" and not isinstance(build_algorithm(name).loss, HeadTerm)),
    ("grpo", {"advantage": {"scale": "batch"}}), ("clip_v", {"mask": {"mu": 0.5, "max_share": 0.5}}), ("clip_b", {"mask": {"mu": 0.2}}),
    ("grpo", {"aggregation": "seq-mean-token-mean", "kl": {"type": "k3", "coef": 0.1}, "correction": {"level": "geometric"}}),
]  # fmt: skip
RANK_OF_GROUP = torch.tensor([0, 1, 0])


def whole() -> tuple[StepBatch, Signals, Tensor]:
    """Three groups of three rollouts with one or two turns each, an expert's answer, and the log-probabilities of all tokens."""
    random = torch.Generator().manual_seed(5)
    places = [
        (group, rollout, turn) for group in range(3) for rollout in range(3) for turn in range(1 + (rollout == 1))
    ]
    groups, rollouts, turns = ([place[i] for place in places] for i in range(3))
    num = len(places)
    tokens = torch.randint(1, 5, (num,), generator=random).tolist()

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(sum(tokens), generator=random)

    logprobs_N = -3.0 * torch.rand(sum(tokens), generator=random) - 0.01
    batch = step_batch(
        torch.randint(0, 3, (num,), generator=random).tolist(), groups, rollouts, tokens=tokens, turns=turns,
        behavior=(logprobs_N + noise(0.4)).tolist(), expert=[place == 4 for place in range(num)], token_rewards_N=noise(0.1),
        baseline_rewards_B=torch.rand(num, generator=random), step_rewards_B=torch.rand(num, generator=random),
        state_B=torch.randint(0, 2, (num,), generator=random),
    )  # fmt: skip
    signals = Signals(
        old_N=logprobs_N + noise(0.3), reference_N=logprobs_N + noise(0.3), teacher_N=logprobs_N + noise(0.3), values_N=noise(1.0),
        entropy_N=noise(1.0).abs(), discriminator_N=noise(0.1),
    )  # fmt: skip
    return batch, signals, logprobs_N


def share(rank: int) -> tuple[StepBatch, Signals, Tensor, Tensor]:
    """What a rank has, and the places of its tokens in the whole batch."""
    batch, signals, logprobs_N = whole()
    kept_B = RANK_OF_GROUP[batch.group_B] == rank
    kept_N = kept_B[batch.sequence_N]
    own = batch.only(kept_B)
    own = replace(own, group_B=own.group_B.unique(return_inverse=True)[1])
    return own, signals.only(kept_N), logprobs_N[kept_N], kept_N.nonzero()[:, 0]


def gradient(
    name: str, changes: dict[str, Any], batch: StepBatch, signals: Signals, index_N: Tensor, logprobs_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss of some sequences of a batch, and its gradient by log-probability and value."""
    algorithm = build_algorithm(name, changes)
    plan = algorithm.plan(batch, signals)
    leaf_2N = torch.stack([logprobs_N, logprobs_N + 2.0]).requires_grad_()
    view = plan.view(index_N, leaf_2N[0], entropy_N=leaf_2N[1], values_N=leaf_2N[1])
    loss = algorithm.objective(plan, index_N, view)[0]
    if algorithm.value is not None:
        loss = loss + algorithm.critic_objective(plan, index_N, view)[0]
    (found,) = torch.autograd.grad(loss + 0.0 * leaf_2N.sum(), leaf_2N)
    return loss.detach(), found


def run_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=NUM_RANKS)
    batch, signals, logprobs_N, _ = share(rank)
    found = collect(batch, signals)
    index_N = torch.arange(len(logprobs_N)) + found.first_token
    results = [gradient(name, changes, found.batch, found.signals, index_N, logprobs_N) for name, changes in CASES]
    losses = torch.stack([loss for loss, _ in results])
    dist.all_reduce(losses)
    torch.save((losses, [grad for _, grad in results]), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_have_the_loss_and_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(run_rank, (str(tmp_path),), nprocs=NUM_RANKS)  # type: ignore[no-untyped-call]  # torch has no types here
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(NUM_RANKS)]
    batch, signals, logprobs_N = whole()
    everything_N = torch.arange(len(logprobs_N))
    for case, (name, changes) in enumerate(CASES):
        loss, expected = gradient(name, changes, batch, signals, everything_N, logprobs_N)
        got = torch.full_like(expected, torch.nan)
        for rank, (losses, gradients) in enumerate(found):
            got[:, share(rank)[3]] = gradients[case]
            torch.testing.assert_close(
                losses[case], loss, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_statistics_of_one_rank_alone_would_differ() -> None:
    name, changes = "grpo", {"advantage": {"scale": "batch"}}
    batch, signals, logprobs_N, places_N = share(0)
    _, alone = gradient(name, changes, batch, signals, torch.arange(len(logprobs_N)), logprobs_N)
    everything, all_signals, all_logprobs_N = whole()
    _, expected = gradient(name, changes, everything, all_signals, torch.arange(len(all_logprobs_N)), all_logprobs_N)
    assert not torch.allclose(alone, expected[:, places_N], rtol=1e-3)


class TestJoined:
    def test_a_rank_without_sequences_adds_nothing(self) -> None:
        batch, signals, _ = whole()
        nothing = batch.only(torch.zeros(batch.num_sequences, dtype=torch.bool))
        empty = replace(nothing, state_B=None, token_rewards_N=None), Signals()
        found = joined([empty, (batch, signals)], 1)
        assert (
            found.first_token == 0
            and found.batch.state_B is not None
            and found.batch.state_B.tolist() == batch.state_B.tolist()
        )  # type: ignore[union-attr]

    def test_rewards_of_tokens_are_0_where_a_rank_has_none(self) -> None:
        batch, signals, _ = whole()
        found = joined([(batch, signals), (replace(batch, token_rewards_N=None), signals)], 1)
        assert found.batch.token_rewards_N is not None and found.first_token == len(batch.sequence_N)
        assert not found.batch.token_rewards_N[found.first_token :].any() and found.batch.token_rewards_N.any()

    def test_an_input_that_only_some_ranks_have_is_refused(self) -> None:
        batch, signals, _ = whole()
        with pytest.raises(RftError, match="1 of 2 ranks have no state_B"):
            joined([(batch, signals), (replace(batch, state_B=None), signals)], 0)
