"""The forms of a batch, for algorithms that train on something else than the responses of each experience.

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
from rftcore.algorithms.algorithm import Algorithm
from rftcore.algorithms.inputs import refuse_missing_rewards
from rftcore.trainer.batches.train_batch import TrainBatch, refuse_missing_behavior


def trained_form(batch: TrainBatch, algorithm: Algorithm) -> tuple[TrainBatch, dict[str, float]]:
    """Return the batch with the pairs and the tokens that an algorithm trains on, and metrics of how it was made.

    Raises:
        RftError: an experience lacks behaviour log-probabilities that the algorithm needs, or pairs are formed from rewards, and one is not
            a finite number.
    """
    if algorithm.uses_behavior_logprobs:
        refuse_missing_behavior(batch, may_be_expert=algorithm.expert is not None)
    metrics, rules = dict[str, float](), algorithm.config.pairs
    if rules is not None:
        batch, metrics = paired(batch, rules)
    if algorithm.pairwise:
        # Left out before anything is computed: routers would be balanced for their tokens, and they would be dealt to updates.
        batch, metrics["pairs_dropped"] = answered_pairs(batch)
    if algorithm.trains_scorer:
        return scored(batch), metrics
    return (whole(batch) if algorithm.config.train_on == "all" else batch), metrics


def whole(batch: TrainBatch) -> TrainBatch:
    """Let every token of the experiences count, except the first, which nothing predicts."""
    counted_BT = batch.attention_mask_BT.clone()
    counted_BT[:, 0] = False
    behavior_BT = batch.behavior_logprobs_BT.masked_fill(counted_BT & ~batch.loss_mask_BT, torch.nan)
    return replace(batch, loss_mask_BT=counted_BT, behavior_logprobs_BT=behavior_BT)


def scored(batch: TrainBatch) -> TrainBatch:
    """Let one place of each experience count: the one after its last token.

    The model predicts that place at the last token, from all tokens. The output of a scalar head there is the score.
    """
    lengths_B = batch.attention_mask_BT.sum(dim=1)
    end_BT = torch.arange(batch.attention_mask_BT.shape[1] + 1) == lengths_B[:, None]
    end_BT[:, 0] = False
    num_places = batch.attention_mask_BT.shape[1]
    return replace(
        batch,
        turn_start_BA=batch.turn_start_BA.masked_fill(batch.turn_start_BA == num_places, num_places + 1),
        token_ids_BT=_widened(batch.token_ids_BT),
        attention_mask_BT=_widened(batch.attention_mask_BT),
        loss_mask_BT=end_BT,
        behavior_logprobs_BT=torch.zeros(end_BT.shape).masked_fill(end_BT, torch.nan),
        token_rewards_BT=None,
        teacher_logprobs_BT=None,
    )


def paired(batch: TrainBatch, rules: PairRules) -> tuple[TrainBatch, dict[str, float]]:
    """Form pairs from the rewards of each group, chosen and rejected in turn, and count them (Guo et al. 2024, arXiv 2402.04792).

    The rules are those of the operator `pair_builder`: rollouts of several sequences, answers to another prompt than the group's first, and
    answers without a token that counts are in no pair.

    Returns:
        The pairs, group after group; an experience may be in several, or in none. Metrics: pairs_formed, groups_without_pair.

    Raises:
        RftError: a reward is not a finite number.
    """
    refuse_missing_rewards(batch.for_algorithm(1), torch.ones(batch.num_experiences, dtype=torch.bool))
    groups = _answers(batch)
    pairs = [list(chosen_over_rejected(answers, rules)) for answers in groups]
    rows = [answer.key for of_group in pairs for pair in of_group for answer in pair]
    metrics = {
        "pairs_formed": float(len(rows) // 2),
        "groups_without_pair": float(sum(not of_group for of_group in pairs)),
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
    """Return the comparable answers of each group, in the order of the groups' first experiences."""
    rollouts = [*zip(batch.group_index_B.tolist(), batch.rollout_index_B.tolist(), strict=True)]
    sequences, groups, prompts = Counter(rollouts), dict[int, list[Answer]](), dict[int, bytes]()
    lengths = batch.loss_mask_BT.sum(dim=1).tolist()
    for b, (group, rollout) in enumerate(rollouts):
        answers = groups.setdefault(group, [])
        if sequences[group, rollout] > 1 or batch.turn_BA[b, 0] > 0 or not lengths[b]:
            continue
        prompt = batch.token_ids_BT[b, : int(batch.loss_mask_BT[b].int().argmax())].numpy().tobytes()
        if prompts.setdefault(group, prompt) == prompt:
            # The decimal that was stored: 0.9 - 0.7 in float32 is below a margin of 0.2 by more than rounding in float64.
            reward = float(str(np.float32(batch.rewards_B[b].item())))
            answers.append(Answer(b, rollout, reward, lengths[b]))
    return list(groups.values())


def mismatched(batch: TrainBatch) -> TrainBatch | None:
    """Join each experience's prompt with the response of the next experience that has another prompt; return None where all prompts are equal.

    The prompt is what precedes the first token that counts. An experience without such a token has no response: nothing counts in it,
    and its response is joined with no other prompt.
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
    """Return for each entry the place of the next one that differs, around the end; empty where all are equal."""
    if len(set(values)) < 2:
        return []
    num = len(values)
    places = [0] * (2 * num)
    following = 2 * num
    for place in range(2 * num - 2, -1, -1):
        if values[(place + 1) % num] != values[place % num]:
            following = place + 1
        places[place] = following % num
    return places[:num]


def _widened(values_BT: Tensor) -> Tensor:
    """Add a column of 0."""
    return torch.cat([values_BT, values_BT.new_zeros(len(values_BT), 1)], dim=1)


def _padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
