"""Interface of a teacher: log-probabilities of tokens that the policy sampled, under another model.

A teacher scores the sequences of a group before they are written. So its log-probabilities are computed once, outside the trainer, and
lie beside the tokens as the array `teacher_logprobs`, for this run and for every later one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rftdata import experience
from rftdata.experience import Group

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ARRAY = "teacher_logprobs"


class Teacher(ABC):
    """A model that scores tokens of the policy.

    Use it in one event loop: `open`, `logprobs` any number of times concurrently, `close`.
    """

    @abstractmethod
    async def open(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check that the teacher can score tokens of this tokenizer.

        Raises:
            ConfigError: it has another vocabulary, or gives no log-probabilities.
        """

    @abstractmethod
    async def logprobs(self, token_ids: Sequence[list[int]], starts: Sequence[int]) -> list[list[float] | str]:
        """Return for each sequence the log-probability (nats) of each token from its start on, or the reason why it has none.

        Raises:
            ConfigError: this teacher can score no sequence.
        """

    @abstractmethod
    async def close(self) -> None:
        """Free everything."""

    async def score(self, group: Group) -> None:
        """Store the log-probabilities of every response in the sequences of a group. A rollout without them fails."""
        scored = [
            (rollout, sequence)
            for rollout in group.rollouts
            if rollout.outcome == "ok"
            for sequence in rollout.sequences
        ]
        logprobs = await self.logprobs(
            [list(sequence.token_ids) for _, sequence in scored], [sequence.num_prompt_tokens for _, sequence in scored]
        )
        for (rollout, sequence), values in zip(scored, logprobs, strict=True):
            if isinstance(values, str):
                rollout.outcome, rollout.error, rollout.reward = (
                    "failed",
                    f"the teacher gave no log-probabilities: {values}",
                    None,
                )
            else:
                sequence.arrays = {**sequence.arrays, ARRAY: align(values, sequence)}
        for rollout, sequence in scored:
            if rollout.outcome != "ok":
                sequence.reward, sequence.reward_parts = None, {}


def align(values: Sequence[float], sequence: experience.Sequence) -> npt.NDArray[np.float32]:
    """Return one value per token of a sequence: 0 for those of the prompt."""
    array = np.zeros(len(sequence.token_ids), np.float32)
    array[sequence.num_prompt_tokens :] = values
    return array
