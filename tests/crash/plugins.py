"""Plug-ins of the crash tests' run: an engine whose answers are all different and contain their own proof.

Nothing is computed that takes time, so that processes spend theirs in the buffer: every answer is random text, its reward and the
log-probability of each of its tokens are functions of that text. A reader of a row can therefore check whether its arrays, its text and its
reward belong together.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rftcore.engines.base import Decoding, Engine, EngineConfig, Generation
from rftcore.sync.files.weights_file import open_weights
from rftcore.sync.tensors import AdaptersConfig, TensorShapes
from rftcore.sync.transfer.plan import TransferError, TransferPlan
from rftcore.sync.transfer.receiver import TransferReceiver
from rftcore.sync.transfer.reception import Reception
from rftcore.workflows.task import Task, Turn
from tests.crash.games import reward_of

NUM_TASKS = 200
_RESPONSE_TOKENS = 24
_TO_SPARE = 8  # max_tokens, in config.yaml, beyond these
_SLOW_SHARE, _PAUSE_S = 0.05, 0.1


def questions() -> Iterator[dict[str, str]]:
    for number in range(NUM_TASKS):
        yield {"question": f"what is {number}?", "answer": str(number)}


def logprobs_of(token_ids: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """[T] nats, from the tokens alone; exact in float32."""
    return (-(np.asarray(token_ids) % 7 + 1) / 8).astype(np.float32)


def games() -> Iterator[dict[str, str]]:
    for number in range(NUM_TASKS):
        yield {"question": f"game {number}", "answer": ""}


def score(turn: Turn, task: Task) -> float:
    return reward_of(turn.response)


def is_not_bad(row: dict[str, Any]) -> bool:
    """A stage that reads what the labeller says."""
    return bool(row["label_good"]["majority"] != "false")


is_not_bad.reads = {"label_good"}  # type: ignore[attr-defined]


class Scribe(Engine):
    """Writes random text, some of it slowly, token by token; takes and checks the weights it is given as every engine does, and keeps none of
    them. It writes nothing while it has had some tensors of a version, and not the others, nor while it sleeps."""

    def __init__(self, model_path: str | Path, config: EngineConfig | None = None, policy_version_id: int = 0) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(str(model_path))
        self.policy_version_id = policy_version_id
        self.num_generated_tokens = 0
        self._receiver = TransferReceiver()
        self._has_mixed_weights = self._is_asleep = False
        self._open: dict[str, Generation] = {}

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        return await self.generate_named("", prompt_token_ids, decoding)

    async def generate_named(self, name: str, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        # What was kept of an answer is at the end of its prompt, and leaves less to write.
        text = os.urandom(_RESPONSE_TOKENS).hex()[: decoding.max_tokens - _TO_SPARE]
        is_slow = random.random() < _SLOW_SHARE
        spans: list[tuple[int, int]] = []
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        try:
            for place in range(len(token_ids)):
                while self._has_mixed_weights or self._is_asleep:
                    await asyncio.sleep(0.01)
                if not spans or spans[-1][1] != self.policy_version_id:
                    spans.append((place, self.policy_version_id))
                if is_slow:
                    so_far = token_ids[: place + 1]
                    self._open[name] = Generation(so_far, logprobs_of(so_far).tolist(), "", "abort", list(spans))
                    await asyncio.sleep(_PAUSE_S)
        finally:
            self._open.pop(name, None)
        self.num_generated_tokens += len(token_ids)
        reason = "length" if text.startswith("0") else "stop"
        return Generation(token_ids, logprobs_of(token_ids).tolist(), text, reason, spans)

    def unfinished(self, first_tokens: Mapping[str, int]) -> dict[str, Generation]:
        found = {name: self._open.get(name) for name in first_tokens}
        return {
            name: replace(
                part, token_ids=part.token_ids[first_tokens[name] :], logprobs=part.logprobs[first_tokens[name] :]
            )
            for name, part in found.items()
            if part is not None
        }

    def load_weights(self, uri: str, policy_version_id: int, checksum: str | None = None) -> float:
        open_weights(uri, checksum)
        self._has_mixed_weights = False
        self.policy_version_id = policy_version_id
        return 0.0

    @property
    def reception(self) -> Reception:
        return Reception(dtype="float32", device="cpu", num_ranks=1)

    def refuse_unfit(self, tensors: TensorShapes, adapters: AdaptersConfig | None = None) -> None:
        """Everything fits."""

    def receive_weights(self, plan: TransferPlan, policy_version_id: int) -> str:
        try:
            checksum = self._receiver.receive(plan, 0, lambda tensors: deque(tensors, maxlen=0))
        except TransferError as error:
            self._has_mixed_weights |= error.is_half_applied
            raise
        self._has_mixed_weights = False
        self.policy_version_id = policy_version_id
        return checksum

    def sleep(self) -> float:
        self._is_asleep = self._has_mixed_weights = True
        return 0.0

    def wake(self, weights_only: bool = False) -> bool:
        self._is_asleep = self._is_asleep and weights_only
        return not self._has_mixed_weights

    def close(self) -> None:
        self._receiver.leave()
