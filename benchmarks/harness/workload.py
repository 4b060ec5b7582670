"""Experiences of all storage benchmarks: groups of 8, about 8 KB each, all different.

A prompt has about 128 tokens, a response 64 to 960 (uniform): int32 tokens, float32 log-probabilities and a mask; 400 bytes of prompt text,
about 2 KB of response text, and a small metrics object.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

GROUP_SIZE = 8
MAX_TOKENS = 144 + 960
WORDS = [
    "so",
    "we",
    "add",
    "carry",
    "the",
    "result",
    "then",
    "check",
    "left",
    "side",
    "equals",
    "right",
    "number",
    "step",
]


@dataclass(frozen=True)
class Sample:
    """One experience; its arrays have one entry per prompt and response token."""

    key: int
    group: int
    prompt: str
    response: str
    num_prompt_tokens: int
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    mask: npt.NDArray[np.bool_]
    reward: float
    metrics: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        """Bytes of arrays and texts."""
        arrays = self.token_ids.nbytes + self.logprobs.nbytes + self.mask.nbytes
        return arrays + len(self.prompt) + len(self.response)


def make_samples(num: int, *, seed: int, first_key: int = 0) -> list[Sample]:
    """Return `num` samples, a multiple of `GROUP_SIZE`. Keys count from `first_key`; the first token of a sample is its key."""
    words, numbers = random.Random(seed), np.random.default_rng(seed)
    samples = []
    for key in range(first_key, first_key + num):
        num_prompt, num_response = int(numbers.integers(112, 145)), int(numbers.integers(64, 961))
        total = num_prompt + num_response
        mask = np.zeros(total, dtype=np.bool_)
        mask[num_prompt:] = True
        token_ids = numbers.integers(0, 150_000, total, dtype=np.int32)
        token_ids[0] = key
        samples.append(
            Sample(
                key=key,
                group=key // GROUP_SIZE,
                prompt=_text(words, 400, key // GROUP_SIZE),
                response=_text(words, 4 * num_response, key),
                num_prompt_tokens=num_prompt,
                token_ids=token_ids,
                logprobs=-numbers.random(total, dtype=np.float32) * mask,
                mask=mask,
                reward=float(numbers.integers(0, 2)),
                metrics={"seconds": round(float(numbers.random()), 4), "num_turns": 1, "correct": bool(key & 1)},
            )
        )
    return samples


def _text(words: random.Random, num_bytes: int, key: int) -> str:
    text = f"{key}: " + " ".join(words.choices(WORDS, k=num_bytes // 4))
    return text[:num_bytes]
