"""Teacher in the explorer's process: one forward pass over whole responses, in a thread of its own.

Log-probabilities are those of the distribution at the policy's sampling temperature, as the trainer's are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftcore.teachers.base import Teacher
from rftcore.teachers.config import TeacherConfig
from rftcore.whole_models import open_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LocalTeacher(Teacher):
    """See the module header.

    Args:
        folder: folder of the model. Its tokenizer is compared with the policy's when the run is checked.
        config: type of the weights and size of a batch.
        temperature: temperature of the sampled distribution.
        num_threads: number of CPU threads.

    Raises:
        ModelError: the model cannot be opened, or is not whole.
    """

    def __init__(self, folder: Path, config: TeacherConfig, temperature: float, num_threads: int) -> None:
        self._folder, self._config, self._temperature = folder, config, temperature
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="teacher")
        # In the thread that computes: OpenMP's thread counts belong to it.
        self._model = self._thread.submit(self._open_model, num_threads).result()

    async def open(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Do nothing: the tokenizers were compared when the run was checked."""

    async def logprobs(self, token_ids: Sequence[list[int]], starts: Sequence[int]) -> list[list[float] | str]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._compute, token_ids, starts)

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    def _open_model(self, num_threads: int) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        if not torch.cuda.is_available():
            torch.set_num_threads(num_threads)
        model = open_whole(AutoModelForCausalLM, self._folder, key="explorer.teacher.path", dtype=self._config.dtype)
        return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")

    def _compute(self, token_ids: Sequence[list[int]], starts: Sequence[int]) -> list[list[float] | str]:
        results: list[list[float] | str] = [[] for _ in token_ids]
        limit = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        fitting = []
        for index, ids in enumerate(token_ids):
            if limit is not None and len(ids) > limit:
                results[index] = f"{len(ids)} tokens do not fit its context of {limit}"
            else:
                fitting.append(index)
        for indices in _batches(fitting, token_ids, self._config.max_tokens_per_batch):
            values = self._score([token_ids[index] for index in indices], [starts[index] for index in indices])
            for index, scored in zip(indices, values, strict=True):
                results[index] = scored
        return results

    def _score(self, token_ids: list[list[int]], starts: list[int]) -> list[list[float]]:
        import torch

        device, width = self._model.device, max(map(len, token_ids))
        ids_BT = torch.tensor([ids + [0] * (width - len(ids)) for ids in token_ids], device=device)
        mask_BT = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in token_ids], device=device)
        with torch.inference_mode():
            logits_BTV = self._model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
            scored = []
            for row, (ids, start) in enumerate(zip(token_ids, starts, strict=True)):
                first = max(start, 1)  # nothing predicts the first token
                logits_RV = logits_BTV[row, first - 1 : len(ids) - 1].float() / self._temperature
                logprobs_R = logits_RV.log_softmax(-1).gather(1, ids_BT[row, first : len(ids), None])[:, 0]
                scored.append([0.0] * (first - start) + logprobs_R.tolist())
        return scored


def _batches(indices: list[int], token_ids: Sequence[list[int]], max_tokens: int) -> Iterator[list[int]]:
    """Yield batches of sequences of similar lengths, as indices, with at most `max_tokens` tokens each, padding included."""
    batch: list[int] = []
    for index in sorted(indices, key=lambda index: len(token_ids[index])):
        if batch and (len(batch) + 1) * len(token_ids[index]) > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
