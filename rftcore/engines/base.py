"""The interface of a rollout engine: prompts in, sampled tokens with behaviour log-probabilities out, weights replaced live.

Invariants of every engine:
- `Generation.logprobs` are natural logarithms under the distribution that was actually sampled from, after temperature,
  top-k and top-p. At temperature 0 nothing is sampled, and they are the model's own log-probabilities (temperature 1).
- `Generation.version_spans` names, for every token, the policy version whose weights computed it.
- `generate` may be called from any event loop, any number of times concurrently; `load_weights` and `close` from any thread.

Importing this module loads neither torch nor vLLM.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rftcore.engines.structure import Structure
from rftcore.sync.tensors import AdaptersConfig, TensorShapes
from rftcore.sync.transfer.plan import TransferPlan
from rftcore.sync.transfer.reception import Reception
from rftdata.errors import RftError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EngineConfig(BaseModel):
    """How the engine runs; the sampling is `Decoding`, set per request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    context_length: int | None = Field(
        default=None, gt=1, description="maximum tokens of prompt plus response; None uses the model's own limit"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="type of weights and activations; auto uses that of the model's config.json"
    )
    max_num_seqs: int = Field(
        default=64,
        ge=1,
        description="maximum number of responses generated concurrently; by default 256 on a GPU, 64 on a CPU",
    )
    kv_cache_gib: float = Field(default=1.0, gt=0, description="size of the KV cache on a CPU, in GiB")
    gpu_memory_utilization: float = Field(
        default=0.85, gt=0, le=1, description="share of a GPU's memory for weights and KV cache together"
    )
    enforce_eager: bool | None = Field(
        default=None, description="no graph compilation; None means yes on a CPU (fast start), no on a GPU"
    )
    own_process: bool | None = Field(
        default=None,
        description="compute in a process of its own, beside the explorer's Python code; None means yes on a GPU, no on a CPU (vLLM only)",
    )
    async_scheduling: bool | None = Field(
        default=None,
        description="schedule the next step while the last one runs, with own_process on a GPU; None means yes there. false for speculative decoding "
        "by ngram, suffix, medusa or mlp_speculator (vLLM only)",
    )
    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        description="set as explorer.tensor_parallel_size: processes that share the model's layers (vLLM only)",
    )
    kv_cache: Literal["recompute", "keep"] = Field(
        default="recompute",
        description="set as sync.kv_cache: what running requests do when weights change (vLLM only)",
    )
    num_threads: int | None = Field(
        default=None, ge=1, description="CPU threads; None uses OMP_NUM_THREADS, else the cores this process may use"
    )
    quantization: str | None = Field(
        default=None,
        description="quantise the weights while they are loaded, as with fp8: a method of vLLM's (vLLM only)",
    )
    sleep: bool = Field(
        default=False,
        description="set as explorer.sleep: free the GPU's memory while another process uses it (vLLM only)",
    )
    adapter_rank: int | None = Field(
        default=None,
        ge=1,
        description="rank of the adapters that are kept beside the model; follows from sync.adapters and trainer.lora",
    )
    vllm: dict[str, Any] = Field(
        default_factory=dict, description="further arguments of vLLM's, by its own names (vLLM only)"
    )
    seed: int = Field(default=0, ge=0, description="seed of sampling; different for every explorer")

    @model_validator(mode="after")
    def _schedules_ahead_elsewhere(self) -> EngineConfig:
        if self.async_scheduling and self.own_process is False:
            raise ValueError("async_scheduling needs own_process: set own_process: true, or async_scheduling: false")
        return self

    def resolve_num_threads(self) -> int:
        """Return the number of CPU threads that this process will compute with."""
        if self.num_threads is not None:
            return self.num_threads
        inherited = os.environ.get("OMP_NUM_THREADS", "")
        if inherited.isdigit() and int(inherited) > 0:
            return int(inherited)
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1


class PromptTooLongError(RftError):
    """A prompt that leaves no room for a response in the engine's context."""


@dataclass(frozen=True)
class Decoding:
    """Sampling parameters of one request.

    Attributes:
        temperature: 0 decodes greedily.
        top_p: nucleus probability; 1.0 is off.
        top_k: 0 is off.
        max_tokens: maximum response tokens; the context length may end a response earlier.
        stop: texts that end a response; the text is cut before the first of them, the tokens are not.
        seed: makes this request repeatable; None uses the engine's own random stream.
        structure: what the response must be; None for any text (vLLM only).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int | None = None
    structure: Structure | None = None

    def greedy(self) -> Decoding:
        """Return the same limits without sampling."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=0)


@dataclass(frozen=True)
class Generation:
    """One sampled response.

    Attributes:
        token_ids: response tokens, including the end token if the model produced it.
        logprobs: behaviour log-probability (nats) of each token.
        text: decoded response (see `AnswerText`).
        finish_reason: "stop" (end token or stop text), "length", or "abort" (the engine was closed; no tokens).
        version_spans: (first token index, policy_version_id), ascending, the first index 0; empty without tokens.
    """

    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    version_spans: list[tuple[int, int]]


class Engine(ABC):
    """A model that samples, and whose weights can be replaced while it does.

    The constructor returns when the model is loaded, and raises if loading fails.
    """

    tokenizer: PreTrainedTokenizerBase
    policy_version_id: int
    """Version of the engine's current weights; tokens of open requests may be older."""
    num_generated_tokens: int
    """Response tokens of all finished requests."""

    @abstractmethod
    def __init__(
        self, model_path: str | Path, config: EngineConfig | None = None, policy_version_id: int = 0
    ) -> None: ...

    @classmethod
    def process_environment(cls, config: EngineConfig) -> dict[str, str]:
        """Return the variables that the engine's process needs *before* torch or the engine's package is imported.

        Set them for the process that will hold the engine; a launcher does so for an explorer.
        Idle OpenMP threads then sleep instead of spinning, so that processes can share few cores.
        """
        return {
            "OMP_NUM_THREADS": str(config.resolve_num_threads()),
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
        }

    @classmethod
    def imported_modules(cls) -> tuple[str, ...]:
        """Return the modules that creating the engine imports and that take long; a launcher has them imported before the engine is needed."""
        return ()

    @classmethod  # noqa: B027 - most engines need nothing
    def prepare_process(cls, config: EngineConfig) -> None:
        """Prepare this process for an engine; called once it has imported `imported_modules`, and while it has one thread."""

    @abstractmethod
    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        """Sample one response. Cancelling the awaiting task removes the request from the engine.

        Raises:
            PromptTooLongError: the prompt does not fit the context length.
            RftError: the engine cannot sample with this decoding.
            EngineStoppedError: the engine was closed, or ended by an error.
        """

    async def generate_named(self, name: str, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        """Sample one response as `generate` does, for a request that `unfinished` finds by a name of the caller's."""
        return await self.generate(prompt_token_ids, decoding)

    def unfinished(self, first_tokens: Mapping[str, int]) -> dict[str, Generation]:
        """Return what open requests have sampled so far, by name, as far as the engine can tell.

        Blocks the calling thread until the engine is between two steps.

        Args:
            first_tokens: name of each request, with the first token to return. A generation has the tokens from there on and no text; its
                spans are those of all tokens.
        """
        return {}

    @abstractmethod
    def load_weights(self, uri: str, policy_version_id: int, checksum: str | None = None) -> float:
        """Load published weights into the live engine, between two steps of generation; return the seconds it took.

        Blocks the calling thread (in a coroutine use `asyncio.to_thread`). The file is checked first. If it is missing or
        incomplete, or does not match a given `checksum`, the old weights stay and ModelError is raised. Open requests continue
        under the new weights; their `version_spans` record the switch. `EngineConfig.kv_cache` decides whether their earlier tokens are
        computed again.
        """

    def stuck_s(self) -> float:
        """Return for how many seconds the engine has done one piece of work (a step, or a change of weights); 0 while it has none.

        Called in any thread, also while that piece of work blocks all others.
        """
        return 0.0

    @property
    def reads_weights(self) -> bool:
        """Whether the engine is reading a weights file, which may be on a slow disk."""
        return False

    def stack(self) -> str:
        """Return the present traceback of the engine's thread; empty if it is not in this process."""
        return ""

    @property
    def reception(self) -> Reception | None:
        """How `receive_weights` takes weights; None for an engine that only loads files."""
        return None

    def refuse_unfit(self, tensors: TensorShapes, adapters: AdaptersConfig | None = None) -> None:
        """Refuse weights that would leave part of the model unchanged, or adapters that do not fit it, before `receive_weights`.

        Args:
            adapters: peft's configuration, if the tensors are adapters.

        Raises:
            ModelError: a tensor or the output head is missing, or has another shape; or the engine takes adapters alone and these are whole
                weights, or the reverse.
        """
        raise RftError(f"{type(self).__name__} takes no weights from a trainer", todo="set sync.method: memory")

    def receive_weights(self, plan: TransferPlan, policy_version_id: int) -> str:
        """Take part in a transfer of weights into the live engine, between two steps of generation; return the checksum of what arrived.

        Blocks the calling thread. As with `load_weights`, open requests continue under the new weights. If the transfer fails before
        anything was loaded, the old weights stay. If it fails later, the engine computes no further token until `load_weights` or another
        transfer has succeeded: open and new requests wait.

        Raises:
            TransferError, RftError: the weights were not applied.
        """
        raise RftError(f"{type(self).__name__} takes no weights from a trainer", todo="set sync.method: memory")

    def differing_weights(self, uri: str, checksum: str | None = None) -> list[str]:
        """Compare the weights in the engine with a model that is loaded anew from published ones; return the names of the tensors that differ.

        Blocks the calling thread, and sampling. Takes memory for a second copy of the model. Names are those of the engine's own tensors,
        with the process where there are several.

        Raises:
            ModelError: the file does not exist or is not the published one.
        """
        raise RftError(f"{type(self).__name__} cannot compare its weights", todo="set sync.check_weights: false")

    def sleep(self) -> float:
        """Free the device's memory, between two steps of generation; return the seconds it took.

        Blocks the calling thread. Open and new requests wait, and continue after `wake`; their earlier tokens are computed again.
        """
        raise RftError(f"{type(self).__name__} does not sleep", todo="set explorer.sleep: false")

    def wake(self, weights_only: bool = False) -> bool:
        """Take the device's memory again after `sleep`; return whether the engine has its weights.

        Blocks the calling thread. An engine that has lost its weights computes no token until `load_weights` or a transfer has succeeded.

        Args:
            weights_only: take memory for the weights alone, to receive new ones while another process still uses the device.
        """
        raise RftError(f"{type(self).__name__} does not sleep", todo="set explorer.sleep: false")

    def set_policy_version(self, policy_version_id: int) -> None:
        """Set a new version for unchanged weights that were published again; new tokens carry it."""
        self.policy_version_id = policy_version_id

    @abstractmethod
    def close(self) -> None:
        """Stop and free everything; open requests end with finish_reason "abort". Further calls do nothing."""
