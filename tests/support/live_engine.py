"""An engine of vLLM beside the transformers model that should agree with it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rftcore.engines.base import Decoding, EngineConfig, Generation
from rftcore.engines.vllm_engine import VllmEngine
from rftcore.sync.base import Publication
from rftcore.sync.files.weights_file import write_atomically
from rftcore.sync.transfer.plan import TransferPlan
from tests.support.sending import held, wire
from tests.support.waiting import PATIENCE_S
from tests.support.weights import complete_state, write_weights

# Several engines live at once on a GPU. On a CPU `sleep` has no effect.
CONFIG = EngineConfig(
    dtype="float32", context_length=128, max_num_seqs=32, kv_cache_gib=0.25, gpu_memory_utilization=0.2, sleep=True
)
ON_GPU = torch.cuda.is_available()
# On a GPU the kernel of vLLM's attention multiplies in TF32, which keeps 10 bits of a float32's mantissa. Up to 4e-3 was seen on an H200.
EXACT = 1e-2 if ON_GPU else 1e-3
BLOCK_TOKENS = 16 if ON_GPU else 32


@dataclass
class Live:
    """An engine and the transformers model that should agree with it."""

    engine: VllmEngine
    reference: Any
    folder: Path
    version: int = 0

    def sample(self, count: int, decoding: Decoding, prompt: str = "u:1+2=\na:") -> tuple[list[int], list[Generation]]:
        ids = self.engine.tokenizer.encode(prompt)

        async def all_of_them() -> list[Generation]:
            return await asyncio.gather(*(self.engine.generate(ids, decoding) for _ in range(count)))

        return ids, asyncio.run(all_of_them())

    def worst_difference(self, temperature: float = 1.0) -> float:
        """Largest |engine - transformers| over the log-probabilities of sampled tokens."""
        ids, generations = self.sample(8, Decoding(max_tokens=16, temperature=temperature))
        return max(
            abs(a - b) for g in generations for a, b in zip(g.logprobs, self.expected(ids, g, temperature), strict=True)
        )

    def expected(self, ids: list[int], generation: Generation, temperature: float = 1.0) -> list[float]:
        with torch.no_grad():
            logits = self.reference(torch.tensor([ids + generation.token_ids])).logits[0].float() / temperature
        logprobs = logits.log_softmax(-1)
        return [logprobs[len(ids) - 1 + k, token].item() for k, token in enumerate(generation.token_ids)]

    def change_reference(self) -> None:
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.reference.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * 0.2)

    def publish(self) -> Publication:
        return write_atomically(
            self.folder / f"{self.version}.safetensors",
            lambda draft: write_weights(self.reference.named_parameters(), draft),
        )

    def load(self, publication: Publication) -> None:
        self.engine.load_weights(publication.uri, self.version, publication.checksum)

    def push(self) -> None:
        self.load(self.publish())

    def started(self, ids: list[int]) -> list[asyncio.Task[Generation]]:
        """Three times as many long requests as fit at once: when the first has ended, others are at work, and will be for long."""
        decoding = Decoding(max_tokens=100, stop=("never!",))
        return [asyncio.create_task(self.engine.generate(ids, decoding)) for _ in range(3 * CONFIG.max_num_seqs)]

    def transfer(self, *, break_off: bool = False) -> None:
        """Send the reference's weights into the engine, or half of them, as a trainer does."""
        from rftcore.sync.addresses import LOOPBACK
        from rftcore.sync.transfer.group import open_store
        from rftcore.sync.transfer.sender import TransferSender

        state = list(complete_state(self.reference.named_parameters()).items())
        # As of the real trainer, a head that is tied travels as the embedding alone.
        is_tied = self.reference.config.tie_word_embeddings
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if is_tied else {}
        timeout_s = 20.0 if break_off else PATIENCE_S
        store, sender, numbers = open_store(LOOPBACK, timeout_s), TransferSender(), next(_transfers)
        num_ranks = 1 + self.engine.reception.num_ranks
        plan = TransferPlan(
            transfer_id=numbers,
            group_id=numbers,
            backend="gloo",
            host=LOOPBACK,
            port=store.port,
            num_ranks=num_ranks,
            first_rank=0,
            tensors=wire(state, tied=tied),
            dtype="float32",
            bucket_bytes=1 << 19,
            timeout_s=timeout_s,
        )

        def tensors() -> Iterator[tuple[str, Any]]:
            yield from state[: len(state) // 2] if break_off else state
            if break_off:
                raise OSError("the trainer fails")

        with ThreadPoolExecutor() as pool:
            taken = pool.submit(self.engine.receive_weights, replace(plan, first_rank=1), self.version)
            with contextlib.suppress(OSError):
                sender.send(plan, held(tensors(), tied=tied), store)
            taken.result(timeout=PATIENCE_S)
        sender.leave()


_transfers = itertools.count(1)
