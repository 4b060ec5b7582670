"""Plug-ins of the crash tests' run: an engine whose answers are all different and contain their own proof.

Nothing is computed that takes time, so that processes spend theirs in the buffer: every answer is random text, its reward and the
log-probability of each of its tokens are functions of that text. A reader of a row can therefore check whether its arrays, its text and its
reward belong together.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rftcore.engines.base import Decoding, Engine, EngineConfig, Generation
from rftcore.sync.weights_file import open_weights
from rftcore.workflows.task import Task, Turn

NUM_TASKS = 200
_RESPONSE_BYTES = 12


def questions() -> Iterator[dict[str, str]]:
    for number in range(NUM_TASKS):
        yield {"question": f"what is {number}?", "answer": str(number)}


def reward_of(response: str) -> float:
    """0 to 1 in quarters, from the text alone."""
    return (sum(response.encode()) % 5) / 4


def logprobs_of(token_ids: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """[T] nats, from the tokens alone; exact in float32."""
    return (-(np.asarray(token_ids) % 7 + 1) / 8).astype(np.float32)


def score(turn: Turn, task: Task) -> float:
    return reward_of(turn.response)


class Scribe(Engine):
    """Writes random text; checks the weights it is given as every engine does, and loads nothing."""

    def __init__(self, model_path: str | Path, config: EngineConfig | None = None, policy_version_id: int = 0) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(str(model_path))
        self.policy_version_id = policy_version_id
        self.num_generated_tokens = 0

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        text = os.urandom(_RESPONSE_BYTES).hex()
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        self.num_generated_tokens += len(token_ids)
        reason = "length" if text.startswith("0") else "stop"
        return Generation(token_ids, logprobs_of(token_ids).tolist(), text, reason, [(0, self.policy_version_id)])

    def load_weights(self, uri: str, policy_version_id: int, checksum: str | None = None) -> float:
        open_weights(uri, checksum)
        self.policy_version_id = policy_version_id
        return 0.0

    def close(self) -> None:
        """There is nothing to close."""
