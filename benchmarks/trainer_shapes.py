"""Models of `rft bench trainer` and `rft bench weights`, and batches of the first: shapes with random weights, and tensors made from a seed.

A model is written once as a Hugging Face folder, in bfloat16, so that every case of every system starts from the same numbers; a case that
trains float32 weights loads them into float32. Tokens are drawn uniformly. Behaviour log-probabilities are those that a model with
random weights gives on average, with noise, so that some ratios are clipped and the loss is not 0.
"""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

NUM_FIRST_TOKENS = 8  # ids below it are for padding and the like, and never drawn
_INITIALIZER_RANGE = 0.02
_NOISE = 0.1  # standard deviation of behaviour log-probabilities, nats
_GROUP_SIZE = 8
_SHORTEST = 2  # tokens of a prompt or a response after scaling
_SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer; `model_type` is that of transformers.

    Attributes:
        num_experts: of each layer, of `intermediate_size` each; 0 for a dense model.
        experts_per_token: how many of them compute a token.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int = 151_936
    tied: bool = True
    rope_theta: float = 1.0e6
    num_experts: int = 0
    experts_per_token: int = 0

    def config(self) -> dict[str, Any]:
        """Its config.json."""
        experts = {
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.intermediate_size,
            "head_dim": self.hidden_size // self.num_heads,
            "norm_topk_prob": True,
        }
        return (experts if self.num_experts else {}) | {
            "model_type": self.model_type,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 262_144,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rms_norm_eps": 1.0e-6,
            "initializer_range": _INITIALIZER_RANGE,
            "use_cache": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }

    @property
    def num_parameters(self) -> int:
        """Tied ones counted once."""
        head_size = self.hidden_size // self.num_heads
        width = (self.num_heads + 2 * self.num_kv_heads) * head_size
        bias = width if self.model_type == "qwen2" else 0
        norms = 2 * head_size if self.num_experts else 0  # of queries and keys
        attention = self.hidden_size * (width + self.num_heads * head_size) + bias + norms
        router = self.hidden_size * self.num_experts
        experts = max(1, self.num_experts) * 3 * self.hidden_size * self.intermediate_size
        layer = attention + router + experts + 2 * self.hidden_size
        return (1 if self.tied else 2) * self.vocab_size * self.hidden_size + self.num_layers * layer + self.hidden_size

    @property
    def num_active_parameters(self) -> int:
        """Those that compute a token: not the experts that it is not sent to."""
        idle = self.num_experts - self.experts_per_token
        return self.num_parameters - self.num_layers * idle * 3 * self.hidden_size * self.intermediate_size

    @property
    def mean_logprob(self) -> float:
        """Log-probability of a random token with random weights: logits are normal with standard deviation s, their log-sum-exp log V + s²/2."""
        variance = _INITIALIZER_RANGE**2 * self.hidden_size
        return -(math.log(self.vocab_size) + variance / 2)


# SmolLM2-135M, Qwen2.5-0.5B and -1.5B, and Llama-3.1-8B; those with experts are small ones of the kind of Qwen3-30B-A3B.
SHAPES = {
    "tiny": Shape("qwen2", 64, 128, 2, 4, 2, vocab_size=512),
    "small": Shape("llama", 256, 512, 4, 8, 4, vocab_size=512),
    "tiny-experts": Shape("qwen3_moe", 64, 48, 2, 2, 1, vocab_size=512, num_experts=8, experts_per_token=2),
    "135M": Shape("llama", 576, 1536, 30, 9, 3, vocab_size=49_152, rope_theta=1.0e5),
    "0.5B": Shape("qwen2", 896, 4864, 24, 14, 2),
    "1.5B": Shape("qwen2", 1536, 8960, 28, 12, 2),
    "1.4B-experts": Shape("qwen3_moe", 1024, 512, 12, 16, 4, num_experts=64, experts_per_token=8),
    "8B": Shape("llama", 4096, 14336, 32, 32, 8, vocab_size=128_256, tied=False, rope_theta=5.0e5),
}


@dataclass(frozen=True)
class Lengths:
    """How long sequences are, in tokens.

    Attributes:
        num_groups: of eight sequences each, which share a prompt.
        prompt, response: least and most.
        total: of the batch, prompts counted for each sequence.
    """

    num_groups: int
    prompt: tuple[int, int]
    response: tuple[int, int]
    total: int


BATCHES = {
    "A": Lengths(8, (60, 240), (100, 760), 33_083),
    "U": Lengths(8, (128, 128), (384, 384), 32_768),
    "B": Lengths(2, (300, 600), (2_100, 4_000), 60_019),
    "C": Lengths(8, (480, 520), (16, 200), 39_100),
}


@dataclass(frozen=True)
class Batch:
    """Sequences of one optimisation step.

    Attributes:
        prompts, responses: token ids of each sequence; those of a group follow each other and have equal prompts.
        logprobs: behaviour log-probabilities of each response, float32.
        rewards: 0 or 1.
        group_ids: 0..num_groups-1.
    """

    prompts: list[Ints]
    responses: list[Ints]
    logprobs: list[npt.NDArray[np.float32]]
    rewards: list[float]
    group_ids: list[int]

    @property
    def num_tokens(self) -> int:
        """Of all sequences, prompts counted for each."""
        return sum(map(len, self.prompts)) + sum(map(len, self.responses))

    def repeated(self, copies: int, vocab_size: int) -> Batch:
        """The batch so many times, each time in groups of its own with other prompts: equal ones would be computed once for all copies."""
        num_groups, num_drawn = max(self.group_ids) + 1, vocab_size - NUM_FIRST_TOKENS
        prompts = [
            NUM_FIRST_TOKENS + (prompt - NUM_FIRST_TOKENS + copy) % num_drawn
            for copy in range(copies)
            for prompt in self.prompts
        ]
        return Batch(
            prompts,
            self.responses * copies,
            self.logprobs * copies,
            self.rewards * copies,
            [copy * num_groups + group for copy in range(copies) for group in self.group_ids],
        )


def make_batch(name: str, shape: Shape, *, scale: float = 1.0, seed: int = 0) -> Batch:
    """One of `BATCHES`, its lengths multiplied by `scale`."""
    lengths = BATCHES[name]
    generator = np.random.default_rng((seed, ord(name)))
    count = lengths.num_groups * _GROUP_SIZE
    prompt_lengths = np.repeat(generator.integers(*lengths.prompt, lengths.num_groups, endpoint=True), _GROUP_SIZE)
    wanted = lengths.total - int(prompt_lengths.sum())
    response_lengths = _summing_to(
        wanted, generator.integers(*lengths.response, count, endpoint=True), lengths.response
    )
    groups = [group for group in range(lengths.num_groups) for _ in range(_GROUP_SIZE)]
    rewards = [float(generator.permutation(_GROUP_SIZE)[0] % 2) for _ in range(count)]
    rewards[::_GROUP_SIZE], rewards[1::_GROUP_SIZE] = [1.0] * lengths.num_groups, [0.0] * lengths.num_groups
    prompts, responses = (
        np.maximum(_SHORTEST, (each * scale).round().astype(np.int64)) for each in (prompt_lengths, response_lengths)
    )
    return _filled(shape, generator, prompts, responses, rewards, groups)


def make_sequence(num_tokens: int, shape: Shape, *, seed: int = 0) -> Batch:
    """One sequence of so many tokens, nearly all of them its response."""
    generator = np.random.default_rng((seed, num_tokens))
    prompt = min(16, num_tokens // 2)
    return _filled(shape, generator, np.array([prompt]), np.array([num_tokens - prompt]), [1.0], [0])


def _filled(
    shape: Shape,
    generator: np.random.Generator,
    prompt_lengths: Ints,
    response_lengths: Ints,
    rewards: list[float],
    groups: list[int],
) -> Batch:
    def tokens(length: int) -> Ints:
        return generator.integers(NUM_FIRST_TOKENS, shape.vocab_size, length)

    by_group = {group: tokens(length) for group, length in zip(groups, prompt_lengths, strict=True)}
    responses = [tokens(length) for length in response_lengths]
    logprobs = [
        (shape.mean_logprob + _NOISE * generator.standard_normal(len(response))).astype(np.float32)
        for response in responses
    ]
    return Batch([by_group[group] for group in groups], responses, logprobs, rewards, groups)


def _summing_to(total: int, values: Ints, limits: tuple[int, int]) -> Ints:
    """Values within limits whose sum is `total`: as they are, but shifted together."""
    if not limits[0] * len(values) <= total <= limits[1] * len(values):
        raise ValueError(f"{len(values)} values within {limits} cannot sum to {total}")
    while difference := total - int(values.sum()):
        step = math.copysign(max(1, abs(difference) // len(values)), difference)
        movable = np.flatnonzero((values < limits[1]) if difference > 0 else (values > limits[0]))
        values[movable[: abs(difference)]] += int(step)
        values = values.clip(*limits)
    return values


def write_model(shape: Shape, folder: Path) -> None:
    """Write random weights as a Hugging Face folder, in bfloat16. A folder that is there already is left as it is."""
    if folder.exists():
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape.config()), dtype=torch.bfloat16)
    draft = folder.with_suffix(".draft")
    model.save_pretrained(draft)
    draft.rename(folder)


def spacious_folder(num_bytes: int) -> str | None:
    """Memory where it has so much room, for `tempfile`; None for the usual place."""
    return str(_SHM) if os.access(_SHM, os.W_OK) and shutil.disk_usage(_SHM).free > num_bytes else None
