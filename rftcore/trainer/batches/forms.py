"""Other batches made of a batch, for algorithms that compute something else than the responses of each experience.

    whole        every token counts, prompts too                      `train_on: all`
    scored       one place counts: that after the last token          losses of a scorer
    answered     pairs without those with an empty answer             losses of pairs
    paired       pairs, formed from the rewards of groups             `pairs: {}`
    mismatched   prompts with the responses to other prompts          the signal `mismatched`

Each is a `TrainBatch`, so cutting into micro-batches and sharing prompts stay as they are.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from operators.experience.pair_builder import Answer, PairRules, chosen_over_rejected
from rftcore.algorithms.inputs import refuse_missing_rewards
from rftcore.trainer.batches.train_batch import TrainBatch


def whole(batch: TrainBatch) -> TrainBatch:
    """The same experiences with every token counting but the first, which nothing predicts."""
    counted_BT = batch.attention_mask_BT.clone()
    counted_BT[:, 0] = False
    behavior_BT = batch.behavior_logprobs_BT.masked_fill(counted_BT & ~batch.loss_mask_BT, torch.nan)
    return replace(batch, loss_mask_BT=counted_BT, behavior_logprobs_BT=behavior_BT)


def scored(batch: TrainBatch) -> TrainBatch:
    """The same experiences with one place that counts: the one after the last token.

    What a model computes to predict that place, it computes at the last token from all of them. A scalar head there is the score.
    """
    lengths_B = batch.attention_mask_BT.sum(dim=1)
    end_BT = torch.arange(batch.attention_mask_BT.shape[1] + 1) == lengths_B[:, None]
    end_BT[:, 0] = False
    return replace(
        batch,
        token_ids_BT=_widened(batch.token_ids_BT),
        attention_mask_BT=_widened(batch.attention_mask_BT),
        loss_mask_BT=end_BT,
        behavior_logprobs_BT=torch.zeros(end_BT.shape).masked_fill(end_BT, torch.nan),
        token_rewards_BT=None,
        teacher_logprobs_BT=None,
    )


def paired(batch: TrainBatch, rules: PairRules) -> tuple[TrainBatch, dict[str, float]]:
    """The pairs that the rewards of each group form, chosen and rejected in turn, and how many there are (Guo et al. 2024, arXiv 2402.04792).

    The rules are those of the operator `pair_builder`: rollouts of several turns, and answers to another prompt than the group's first, are
    in no pair. Nor is an answer without a token that counts.

    Returns:
        The pairs, group after group; an experience may be in several, or in none. Metrics: pairs_formed, groups_without_pair.

    Raises:
        RftError: a reward is not a finite number.
    """
    refuse_missing_rewards(batch.for_algorithm(1), torch.ones(batch.num_experiences, dtype=torch.bool))
    groups = _answers(batch)
    pairs = [list(chosen_over_rejected(answers, rules)) for answers in groups]
    rows = [answer.key for found in pairs for pair in found for answer in pair]
    metrics = {
        "pairs_formed": float(len(rows) // 2),
        "groups_without_pair": float(sum(not found for found in pairs)),
    }
    return batch.in_pairs(rows), metrics


def answered_pairs(batch: TrainBatch) -> tuple[TrainBatch, float]:
    """Return the pairs whose two answers both have a token that counts, and how many pairs were left out."""
    whole_P = batch.loss_mask_BT.any(dim=1).view(-1, 2).all(dim=1)
    num_dropped = int((~whole_P).sum())
    if not num_dropped:
        return batch, 0.0
    return batch.in_pairs(whole_P.repeat_interleave(2).nonzero().flatten().tolist()), float(num_dropped)


def _answers(batch: TrainBatch) -> list[list[Answer]]:
    """The comparable answers of each group, in the order of the groups' first experiences."""
    rollouts = [*zip(batch.group_index_B.tolist(), batch.rollout_index_B.tolist(), strict=True)]
    turns, groups, prompts = Counter(rollouts), dict[int, list[Answer]](), dict[int, bytes]()
    lengths = batch.loss_mask_BT.sum(dim=1).tolist()
    for b, (group, rollout) in enumerate(rollouts):
        answers = groups.setdefault(group, [])
        if turns[group, rollout] > 1 or batch.turn_index_B[b] > 0 or not lengths[b]:
            continue
        prompt = batch.token_ids_BT[b, : int(batch.loss_mask_BT[b].int().argmax())].numpy().tobytes()
        if prompts.setdefault(group, prompt) == prompt:
            # The decimal that was stored: 0.9 - 0.7 in float32 is below a margin of 0.2 by more than rounding in float64.
            reward = float(str(np.float32(batch.rewards_B[b].item())))
            answers.append(Answer(b, rollout, reward, lengths[b]))
    return list(groups.values())


def mismatched(batch: TrainBatch) -> TrainBatch | None:
    """Each experience's prompt with the response of the next one that has another prompt; None where all prompts are equal.

    The prompt is what precedes the first token that counts. An experience without such a token has no response: nothing counts in it,
    and no other gets its response.
    """
    answered = [b for b in range(batch.num_experiences) if bool(batch.loss_mask_BT[b].any())]
    starts = {b: int(batch.loss_mask_BT[b].int().argmax()) for b in answered}
    others = _next_different([batch.token_ids_BT[b, : starts[b]].numpy().tobytes() for b in answered])
    if not others:
        return None
    tokens = [batch.token_ids_BT[b, :1] for b in range(batch.num_experiences)]
    masks = [torch.zeros(1, dtype=torch.bool)] * batch.num_experiences
    for b, other in zip(answered, (answered[place] for place in others), strict=True):
        prompt, response = slice(0, starts[b]), slice(starts[other], int(batch.attention_mask_BT[other].sum()))
        tokens[b] = torch.cat([batch.token_ids_BT[b, prompt], batch.token_ids_BT[other, response]])
        masks[b] = torch.cat([batch.loss_mask_BT[b, prompt], batch.loss_mask_BT[other, response]])
    loss_mask_BT = _padded(masks)
    return replace(
        batch,
        token_ids_BT=_padded(tokens),
        attention_mask_BT=_padded([torch.ones_like(mask) for mask in masks]),
        loss_mask_BT=loss_mask_BT,
        behavior_logprobs_BT=torch.zeros(loss_mask_BT.shape).masked_fill(loss_mask_BT, torch.nan),
        token_rewards_BT=None,
        teacher_logprobs_BT=None,
        paired=False,
    )


def _next_different(values: list[bytes]) -> list[int]:
    """For each entry the place of the next one that differs, around the end; empty where all are equal."""
    if len(set(values)) < 2:
        return []
    num = len(values)
    found = [0] * (2 * num)
    following = 2 * num
    for place in range(2 * num - 2, -1, -1):
        if values[(place + 1) % num] != values[place % num]:
            following = place + 1
        found[place] = following % num
    return found[:num]


def _widened(values_BT: Tensor) -> Tensor:
    """With one more column of 0."""
    return torch.cat([values_BT, values_BT.new_zeros(len(values_BT), 1)], dim=1)


def _padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
