"""Measures of evaluations with several answers to each question: mean@n, best@k and pass@k, with standard errors over questions.

pass@k is the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374, equation 1): of n answers to a question, c that pass, k drawn without
replacement contain one that passes with the probability 1 − C(n−c, k) / C(n, k). best@k is the mean of the greatest reward of k answers
drawn in the same way. Answers to one question depend on each other, so a standard error is that of the mean over questions, clustered
by question; it is None for a single question.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev

from pydantic import BaseModel, ConfigDict


class Estimate(BaseModel):
    """A mean over questions with its standard error."""

    model_config = ConfigDict(frozen=True)

    value: float
    standard_error: float | None


class SeveralAnswers(BaseModel):
    """An evaluation with `num_answers` answers to each question. `pass_at` and `best_at` are by k.

    Attributes:
        checksum: of the weights that answered.
        pass_reward: the reward from which an answer passes.
    """

    model_config = ConfigDict(frozen=True)

    purpose: str
    taskset: str
    decoding: str
    trainer_step: int
    checksum: str
    num_questions: int
    num_answers: int
    pass_reward: float
    mean: Estimate
    pass_at: dict[int, Estimate]
    best_at: dict[int, Estimate]


def pass_at_k(num_answers: int, num_passed: int, k: int) -> float:
    """Return the unbiased estimate of pass@k for one question.

    Args:
        k: at most `num_answers`.
    """
    return 1.0 - math.comb(num_answers - num_passed, k) / math.comb(num_answers, k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Return the mean of the greatest reward of k answers, drawn without replacement.

    Args:
        k: at most the number of answers.
    """
    ordered, draws = sorted(rewards), math.comb(len(rewards), k)
    return math.fsum(reward * math.comb(place, k - 1) / draws for place, reward in enumerate(ordered))


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per question."""
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(value=mean(values), standard_error=error)


def measures(
    rewards: Mapping[int, Sequence[float]], pass_reward: float
) -> tuple[Estimate, dict[int, Estimate], dict[int, Estimate]]:
    """Return mean@n, and pass@k and best@k for k of 1, 2, 4, … and n.

    Args:
        rewards: of the answers to each question, by task.
        pass_reward: the reward from which an answer passes.
    """
    answers = list(rewards.values())
    fewest = min(map(len, answers))
    ks = sorted({2**power for power in range(fewest.bit_length()) if 2**power <= fewest} | {fewest})
    passed = [sum(reward >= pass_reward for reward in each) for each in answers]
    pass_at = {
        k: estimate([pass_at_k(len(each), num, k) for each, num in zip(answers, passed, strict=True)]) for k in ks
    }
    best_at = {k: estimate([best_at_k(each, k) for each in answers]) for k in ks}
    return estimate([mean(each) for each in answers]), pass_at, best_at
