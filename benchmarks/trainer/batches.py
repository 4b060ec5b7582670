"""Batches of `rft bench trainer`, made from a seed.

Tokens are drawn uniformly. Behaviour log-probabilities are those of a model with random weights on average, with noise, so that some ratios are
clipped and the loss is not 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.harness.shapes import Shape

Ints = npt.NDArray[np.int64]

NUM_FIRST_TOKENS = 8  # lower ids are special tokens and are never drawn
_NOISE = 0.1  # standard deviation of behaviour log-probabilities, nats
_GROUP_SIZE = 8
_SHORTEST = 2  # tokens of a prompt or a response after scaling


@dataclass(frozen=True)
class Lengths:
    """Lengths of the sequences of a batch, in tokens.

    Attributes:
        num_groups: groups of eight sequences that share a prompt.
        prompt, response: shortest and longest.
        total: tokens of the batch; a prompt counts for each of its sequences.
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
        prompts, responses: token ids of each sequence; sequences of a group are neighbours and have equal prompts.
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
        """Tokens of all sequences; a prompt counts for each of its sequences."""
        return sum(map(len, self.prompts)) + sum(map(len, self.responses))

    def repeated(self, copies: int, vocab_size: int) -> Batch:
        """Repeat the batch, each copy in new groups with other prompts, since equal prompts would be computed once for all copies."""
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
    """Make one of `BATCHES`, with lengths multiplied by `scale`."""
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
    """Make one sequence of so many tokens, nearly all of them its response."""
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
    """Shift values together, within limits, until their sum is `total`."""
    if not limits[0] * len(values) <= total <= limits[1] * len(values):
        raise ValueError(f"{len(values)} values within {limits} cannot sum to {total}")
    while difference := total - int(values.sum()):
        step = math.copysign(max(1, abs(difference) // len(values)), difference)
        movable = np.flatnonzero((values < limits[1]) if difference > 0 else (values > limits[0]))
        values[movable[: abs(difference)]] += int(step)
        values = values.clip(*limits)
    return values
