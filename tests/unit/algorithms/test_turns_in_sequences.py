"""Rollouts of several turns: a sequence per rollout is credited, token for token, as one per turn was."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rftcore.algorithms import ADVANTAGES
from rftcore.algorithms.advantages.rollouts import turn_sums
from rftcore.algorithms.base import Signals, StepBatch
from rftcore.trainer.batches.padding import PackedColumns, pad_batch
from tests.support.algorithms import step_batch

# [rollout][turn] -> number of tokens; the first two rollouts are one group, the others another.
Tokens = list[list[int]]
PARTS: list[tuple[str, dict[str, Any]]] = [
    ("group", {}),
    ("group", {"baseline": "length-weighted"}),
    ("turns", {}),
    ("turns", {"step_norm": True}),
    ("gigpo", {"gamma": 0.5}),
    ("returns", {"gamma": 0.9, "outcome": "last"}),
    ("turn_rank", {"gamma": 0.9}),
    ("gae", {"gamma": 0.9, "lam": 0.8}),
    ("discounted", {"gamma": 0.9, "baseline": "mean"}),
    ("otb", {}),
    ("remax", {}),
    ("rae", {}),
    ("gdpo", {}),
    ("best", {}),
    ("pass_at_k", {"k": 2}),
]


def batches(tokens: Tokens, rewards: list[float], seed: int, *, token_rewards: bool) -> tuple[StepBatch, StepBatch]:
    """One sequence per turn, and one per rollout."""
    random = torch.Generator().manual_seed(seed)
    group = [0 if rollout < 2 else 1 for rollout in range(len(tokens))]
    turns = [(rollout, turn, num) for rollout, of in enumerate(tokens) for turn, num in enumerate(of)]
    num_tokens, longest = sum(num for _, _, num in turns), max(map(len, tokens))
    states = torch.randint(0, 3, (len(turns),), generator=random)
    steps = torch.rand(len(turns), generator=random)
    parts = torch.rand(len(tokens), 2, generator=random)
    given_N = torch.rand(num_tokens, generator=random) if token_rewards else None
    rollout_of = [rollout for rollout, _, _ in turns]
    split = step_batch(
        [rewards[rollout] for rollout in rollout_of],
        [group[rollout] for rollout in rollout_of],
        rollout_of,
        turns=[turn for _, turn, _ in turns],
        tokens=[num for _, _, num in turns],
        step_rewards_BA=steps,
        state_BA=states,
        token_rewards_N=given_N,
        baseline_rewards_B=torch.tensor([rewards[0]] * len(turns)),
        role_baselines_B=torch.tensor([rewards[0]] * len(turns)),
        reward_parts_B=parts[rollout_of],
        reward_names=("right", "short"),
    )
    whole = step_batch(
        rewards,
        group,
        list(range(len(tokens))),
        tokens=[sum(of) for of in tokens],
        step_rewards_BA=_padded(steps, tokens, longest, 0),
        state_BA=_padded(states, tokens, longest, 0),
        token_rewards_N=given_N,
        baseline_rewards_B=torch.tensor([rewards[0]] * len(tokens)),
        role_baselines_B=torch.tensor([rewards[0]] * len(tokens)),
        reward_parts_B=parts,
        reward_names=("right", "short"),
    )
    whole = replace(
        whole,
        turn_BA=_padded(torch.tensor([turn for _, turn, _ in turns]), tokens, longest, -1),
        turn_N=torch.tensor([turn for _, turn, num in turns for _ in range(num)], dtype=torch.int64),
    )
    return split, whole


def _padded(values: torch.Tensor, tokens: Tokens, longest: int, fill: float) -> torch.Tensor:
    rows = [list(of) for of in values.split([len(of) for of in tokens])]
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows], dtype=values.dtype)


SOME_TOKENS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=2, max_size=5)


@pytest.mark.parametrize(("name", "config"), PARTS, ids=lambda value: value if isinstance(value, str) else None)
@given(tokens=SOME_TOKENS, seed=st.integers(0, 2**32), data=st.data())
def test_a_sequence_per_rollout_is_credited_as_one_per_turn(
    name: str, config: dict[str, Any], tokens: Tokens, seed: int, data: st.DataObject
) -> None:
    rewards = data.draw(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=len(tokens), max_size=len(tokens)))
    # `group` averages the rewards of a rollout's sequences, those of their tokens included: there the two differ on purpose.
    split, whole = batches(tokens, rewards, seed, token_rewards=name != "group" and data.draw(st.booleans()))
    num = len(split.sequence_N)
    random = torch.Generator().manual_seed(seed)
    signals = Signals(
        old_N=-torch.rand(num, generator=random),
        values_N=torch.randn(num, generator=random),
        collision_N=torch.rand(num, generator=random),
    )
    part = ADVANTAGES.load(name)
    advantage = part(part.Config(**config))
    expected, found = advantage(split, signals), advantage(whole, signals)
    assert found.advantages_N.tolist() == pytest.approx(expected.advantages_N.tolist(), abs=1e-5)
    if expected.returns_N is not None and found.returns_N is not None:
        assert found.returns_N.tolist() == pytest.approx(expected.returns_N.tolist(), abs=1e-5)
    assert found.metrics == pytest.approx(expected.metrics, abs=1e-5)


def test_tokens_of_a_row_are_of_the_turn_in_whose_stretch_they_are() -> None:
    # A prompt of two tokens; turns 0, 2 and 5 of 2, 1 and 2 tokens, with observations of 1 and 2 between them. Then a row of one turn.
    lengths = [10, 4]
    mask = [0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    offsets = torch.tensor([0, *accumulate(lengths)]).numpy()
    three, one = torch.tensor([[2, 4, 0], [5, 6, 2], [8, 10, 5]]), torch.tensor([[2, 4, 1]])
    batch = pad_batch(
        PackedColumns(
            token_ids=(torch.arange(14).numpy(), offsets),
            loss_mask=(torch.tensor(mask, dtype=torch.bool).numpy(), offsets),
            behavior_logprobs=None,
            rewards=[1.0, 0.0],
            group_ids=[7, 7],
            rollout_index=[0, 1],
            turns=[three.numpy(), one.numpy()],
            state=[torch.tensor([5, 6, 7]).numpy(), torch.tensor([8]).numpy()],
        )
    )
    flat = batch.for_algorithm(1)
    assert flat.turn_BA.tolist() == [[0, 2, 5], [1, -1, -1]]
    assert flat.turn_N.tolist() == [0, 0, 1, 2, 2, 0, 0]
    assert flat.state_BA is not None and flat.state_BA.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert turn_sums(flat, torch.arange(7.0)).tolist() == [[1.0, 2.0, 7.0], [11.0, 0.0, 0.0]]
    second = flat.only(torch.tensor([False, True]))
    assert (second.turn_BA.tolist(), second.turn_N.tolist()) == ([[1, -1, -1]], [0, 0])


def test_a_row_needs_one_value_per_turn() -> None:
    offsets = torch.tensor([0, 3]).numpy()
    columns = PackedColumns(
        token_ids=(torch.arange(3).numpy(), offsets),
        loss_mask=(torch.ones(3, dtype=torch.bool).numpy(), offsets),
        behavior_logprobs=None,
        rewards=[1.0],
        group_ids=[7],
        rollout_index=[0],
        turns=[torch.tensor([[1, 2, 0], [2, 3, 1]]).numpy()],
        state=[torch.tensor([5]).numpy()],
    )
    with pytest.raises(ValueError, match="experience 0 of the batch has 1 values for 2 turns"):
        pad_batch(columns)
