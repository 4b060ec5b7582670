"""The compilation of what a step computes, before the first batch is there.

The first pass through a layer compiles it, which takes half a minute on a GPU, while a run's first batch is still being sampled. So passes over
made-up tokens come before. They take the way of a step from the cut of a batch on, and leave nothing behind: no gradient, and the random state as
it was. There is no optimizer step, which is not compiled.

The compiler chooses kernels by the sizes of the first pass, so a made-up micro-batch on a GPU has the size of a usual one. Two micro-batches of other
lengths show the compiler what varies.

Memory that the passes took on a GPU stays with this process: an engine that starts on the same GPU must not see its free memory grow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from rftcore.algorithms.algorithm import Algorithm
from rftcore.trainer.batches.micro_batches import MicroBatch, split_batch
from rftcore.trainer.batches.padding import PackedColumns, pad_batch
from rftcore.trainer.batches.train_batch import TrainBatch
from rftcore.trainer.checkpoints import random_state, set_random_state
from rftcore.trainer.models import Models
from rftcore.trainer.step.gradients import GradientPasses
from rftcore.trainer.step.signals import SignalReader

CompiledPart = Literal["gradients", "signals"]

# Tokens of a made-up micro-batch, at most `trainer.max_tokens_per_microbatch`. A CPU's kernels do not depend on them.
_TOKENS = {"cuda": 4096, "cpu": 256}
_GROUP_SIZE = 4
_TOKENS_OF_GROUP = 51  # about


@dataclass(frozen=True)
class Compilation:
    """Compiles the passes of a learner, part by part. All ranks compile the same part together."""

    models: Models
    algorithm: Algorithm
    gradients: GradientPasses
    signals: SignalReader

    @property
    def parts(self) -> tuple[CompiledPart, ...]:
        """The parts to compile, that of every step first; none where nothing is compiled."""
        if not self.models.policy.is_compiled:
            return ()
        return ("gradients", "signals") if self.signals.computed(self.algorithm.signals) else ("gradients",)

    def compile(self, part: CompiledPart) -> None:
        """Compute this part of a step on made-up tokens."""
        policy = self.models.policy
        shares_prompts = self.algorithm.learns_from_samples or self.algorithm.pairwise
        num_tokens = min(policy.cutting.max_tokens, _TOKENS[policy.device.type]) * policy.grid.num_data_ranks
        before = {name.removeprefix("random/"): state for name, state in random_state(policy.device).items()}
        try:
            for size in (num_tokens, num_tokens * 2 // 3):
                batch = _made_up_batch(size, policy.num_tokens, shares_prompts=shares_prompts)
                for micro_batch in split_batch(batch, policy.cutting)[policy.grid.data_rank]:
                    self._compute(part, micro_batch.to(policy.device))
        finally:
            self.models.release()
            for network in self.models.trained().values():
                network.optimizers.clear_gradients()
            set_random_state(before, policy.device)

    def _compute(self, part: CompiledPart, micro_batch: MicroBatch) -> None:
        if part == "gradients":
            self.gradients.discard(micro_batch)
        else:
            self.signals.discard(micro_batch, self.algorithm.signals)


def _made_up_batch(num_tokens: int, num_ids: int, *, shares_prompts: bool) -> TrainBatch:
    """Return groups of short experiences, of about this many tokens where their prompts are computed once.

    Args:
        num_ids: size of the vocabulary.
        shares_prompts: whether the experiences of a group have the same prompt.
    """
    rows, prompt_lengths = list[np.ndarray](), list[int]()
    for group in range(max(1, num_tokens // _TOKENS_OF_GROUP)):
        for member in range(_GROUP_SIZE):
            prompt_length, response_length = 17 + group % 5, 5 + (group + 3 * member) % 8
            # A prompt begins with its number, so that no two groups have the same one.
            number = group if shares_prompts else _GROUP_SIZE * group + member
            digits = [number // num_ids**place for place in range(4)]
            rows.append(np.array([*digits, *range(prompt_length + response_length - 4)]) % num_ids)
            prompt_lengths.append(prompt_length)
    lengths = np.array([len(row) for row in rows])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    counted = np.concatenate(
        [np.arange(n) >= prompt_length for n, prompt_length in zip(lengths, prompt_lengths, strict=True)]
    )
    return pad_batch(
        PackedColumns(
            token_ids=(np.concatenate(rows), offsets),
            loss_mask=(counted, offsets),
            behavior_logprobs=None,
            rewards=np.zeros(len(rows), np.float32),
            group_ids=np.arange(len(rows)) // _GROUP_SIZE,
            rollout_index=np.arange(len(rows)) % _GROUP_SIZE,
        )
    )
