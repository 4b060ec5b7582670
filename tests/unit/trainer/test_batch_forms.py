"""The forms of a batch: every token, the end of each sequence, prompts with the responses to other prompts."""

from __future__ import annotations

import numpy as np
import torch

from rftcore.trainer.batches.forms import mismatched, scored, whole
from rftcore.trainer.batches.micro_batches import Cutting, split_batch
from rftcore.trainer.batches.padding import PackedColumns, pad_batch
from rftcore.trainer.batches.train_batch import TrainBatch


def batch_of(*experiences: tuple[list[int], list[int]]) -> TrainBatch:
    """Build a batch of prompts and responses; each token of a response counts and has the behaviour log-probability -1."""
    tokens = [prompt + response for prompt, response in experiences]
    masks = [[False] * len(prompt) + [True] * len(response) for prompt, response in experiences]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in tokens])])
    return pad_batch(
        PackedColumns(
            token_ids=(np.concatenate(tokens).astype(np.int64), offsets),
            loss_mask=(np.concatenate(masks).astype(bool), offsets),
            behavior_logprobs=(np.full(offsets[-1], -1.0, np.float32), offsets),
            rewards=[0.0] * len(tokens),
            group_ids=range(len(tokens)),
            rollout_index=[0] * len(tokens),
        )
    )


def sequences(batch: TrainBatch) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of each experience, and the places that count."""
    return [
        (
            batch.token_ids_BT[b, : int(batch.attention_mask_BT[b].sum())].tolist(),
            batch.loss_mask_BT[b].nonzero()[:, 0].tolist(),
        )
        for b in range(batch.num_experiences)
    ]


def test_every_token_but_the_first_counts_in_a_whole_batch() -> None:
    batch = batch_of(([1, 2], [3]), ([4], [5, 6, 7]), ([8, 9], []))
    found = whole(batch)
    assert sequences(found) == [([1, 2, 3], [1, 2]), ([4, 5, 6, 7], [1, 2, 3]), ([8, 9], [1])]
    assert found.behavior_logprobs_BT.isnan().tolist() == [
        [False, True, False, False],
        [False] * 4,
        [False, True, False, False],
    ]


def test_only_the_place_after_the_last_token_counts_in_a_scored_batch() -> None:
    batch = batch_of(([1, 2], [3]), ([4], [5, 6, 7]), ([8, 9], []))
    assert sequences(scored(batch)) == [([1, 2, 3], [3]), ([4, 5, 6, 7], [4]), ([8, 9], [2])]


def test_a_scored_batch_computes_every_token_and_reads_the_last_one() -> None:
    batch = scored(batch_of(([1, 2], [3]), ([1, 2], [5, 6, 7])))
    ((micro_batch,),) = split_batch(batch, Cutting(max_tokens=100))
    assert sorted(micro_batch.token_ids_L[micro_batch.source_N].tolist()) == [3, 7]
    assert micro_batch.num_tokens == 8


class TestMismatched:
    def test_takes_the_response_of_the_next_experience_with_another_prompt_around_the_end(self) -> None:
        batch = batch_of(([1, 2], [3]), ([1, 2], [4]), ([5], [6, 7]), ([1, 2], [8]))
        found = mismatched(batch)
        assert found is not None
        # 0 and 1 share a prompt, so both take the response of 2; 2 takes that of 3; 3 passes 0 and 1 and takes that of 2.
        assert sequences(found) == [
            ([1, 2, 6, 7], [2, 3]),
            ([1, 2, 6, 7], [2, 3]),
            ([5, 8], [1]),
            ([1, 2, 6, 7], [2, 3]),
        ]
        assert found.behavior_logprobs_BT[found.loss_mask_BT].isnan().all() and not found.paired

    def test_leaves_experiences_without_a_response_out(self) -> None:
        found = mismatched(batch_of(([1], [2]), ([3], []), ([4], [5])))
        assert found is not None and sequences(found) == [([1, 5], [1]), ([3], []), ([4, 2], [1])]

    def test_keeps_tokens_of_a_response_that_do_not_count(self) -> None:
        batch = batch_of(([1], [2, 3, 4]), ([5], [6]))
        batch.loss_mask_BT[0, 2] = False
        found = mismatched(batch)
        assert found is not None and sequences(found) == [([1, 6], [1]), ([5, 2, 3, 4], [1, 3])]

    def test_is_none_for_a_single_prompt(self) -> None:
        assert mismatched(batch_of(([1], [2]), ([1], [3]))) is None
        assert mismatched(batch_of(([1], [2]))) is None
        assert mismatched(batch_of(([1], []), ([2], []))) is None

    def test_agrees_with_a_plain_search_for_many_prompts(self) -> None:
        random = torch.Generator().manual_seed(0)
        prompts = torch.randint(3, (60,), generator=random).tolist()
        found = mismatched(batch_of(*(([prompt + 1], [10 + place]) for place, prompt in enumerate(prompts))))
        assert found is not None
        for place, prompt in enumerate(prompts):
            other = next(other for step in range(1, 60) if prompts[other := (place + step) % 60] != prompt)
            assert sequences(found)[place][0] == [prompt + 1, 10 + other]
