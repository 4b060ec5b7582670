"""Build preference pairs from the rewards of a group: a better answer over a worse one to the same prompt.

    - pair_builder: {margin: 0.5}
    - pair_builder: {margin: 0.2, max_pairs: 2, ties: order, max_length_ratio: 1.5}

Of two rollouts of a group with rewards r_a ≥ r_b, a over b is a pair when r_a − r_b ≥ `margin` (within 1e-9, so that 0.3 over
0.1 has a margin of 0.2). Answers whose rewards are equal, or closer than that, are a tie and form no pair: which one is better is
unknown, so such a pair would only add noise.

A group has at most `max_pairs` pairs. They are selected one by one: first those with the largest difference; of equal ones (with
rewards 0 and 1 all are) those whose two rollouts are in the fewest pairs so far, so that the pairs differ; and of these by
`ties`. With `ties: length` it is the pair whose answers are closest in length, so that length distinguishes chosen from rejected as
little as possible: a policy trained on pairs whose chosen answer is the longer one learns to be long (Park et al. 2024,
"Disentangling Length from Quality in Direct Preference Optimization", arXiv 2403.19159). With `ties: order` it is the pair of the
earliest rollouts. `max_length_ratio` is stricter: a pair whose longer answer has more than that many times the tokens of the shorter
one is never built.

Rollouts of several rows are left out, since these answer different prompts, and so are rows without a finite reward.

The operator has two uses. `pairs` returns the pairs of a batch; `rft pairs build` stores them. As a stage of a pipeline it drops
the rows that are in no pair of their group, with a reason, and changes nothing else. `algorithm.pairs` forms pairs by the same rules
(`chosen_over_rejected`) in the trainer.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import pyarrow as pa
from pydantic import Field

from operators.base import Operator, StageConfig, StageOutcome

_TOLERANCE = 1e-9


class PairRules(Protocol):
    """Which pairs of a group, and how many; see the module."""

    @property
    def margin(self) -> float: ...
    @property
    def max_pairs(self) -> int: ...
    @property
    def ties(self) -> Literal["length", "order"]: ...
    @property
    def max_length_ratio(self) -> float | None: ...


@dataclass(frozen=True)
class Answer:
    """One answer of a group: its key, the place of its rollout in the group, a finite reward, and its length in tokens."""

    key: int
    index: int
    reward: float
    num_tokens: int


@dataclass(frozen=True)
class Pair:
    """`chosen_id` over `rejected_id`, two experiences of one group, with their rewards and response lengths in tokens."""

    group_id: int
    chosen_id: int
    rejected_id: int
    chosen_reward: float
    rejected_reward: float
    chosen_tokens: int
    rejected_tokens: int


class PairBuilder(Operator, revision=1):
    """Builds preference pairs from group rewards; as a stage it drops the rows that are in no pair."""

    class Config(StageConfig):
        """Which pairs, and how many."""

        margin: float = Field(0.5, gt=0, description="Smallest difference of rewards.")
        max_pairs: int = Field(4, ge=1, description="Largest number of pairs of a group.")
        ties: Literal["length", "order"] = Field(
            "length",
            description="Which of equally good pairs is taken: the one closest in length, or the one of the earliest rollouts.",
        )
        max_length_ratio: float | None = Field(
            None, ge=1, description="Largest ratio of the longer answer's tokens to the shorter one's."
        )

    reads = frozenset(
        {"experience_id", "group_id", "rollout_index", "turn_index", "prompt", "reward", "num_trained_tokens"}
    )

    def pairs(self, table: pa.Table) -> list[Pair]:
        """Return the pairs of a batch of whole groups, in the order of the groups' first rows."""
        return [
            Pair(group_id, better.key, worse.key, better.reward, worse.reward, better.num_tokens, worse.num_tokens)
            for group_id, answers in _groups(table).items()
            for better, worse in chosen_over_rejected(answers, self.config)
        ]

    def apply(self, table: pa.Table) -> StageOutcome:
        used = {key for pair in self.pairs(table) for key in (pair.chosen_id, pair.rejected_id)}
        reason = f"no pair of its group uses it (margin {self.config.margin:g}, at most {self.config.max_pairs} pairs)"
        reasons = [None if key in used else reason for key in table["experience_id"].to_pylist()]
        return StageOutcome(pa.array(reasons, pa.string()))


def chosen_over_rejected(answers: Sequence[Answer], rules: PairRules) -> Iterator[tuple[Answer, Answer]]:
    """Yield the pairs of one group, chosen and rejected, as `rules` select them; see the module.

    Args:
        answers: to one prompt.
    """
    candidates = [(a, b) for a in answers for b in answers if _is_pair(a, b, rules)]
    uses: Counter[int] = Counter()
    for _ in range(min(rules.max_pairs, len(candidates))):
        best = min(candidates, key=lambda pair: _rank(pair[0], pair[1], rules, uses))
        candidates.remove(best)
        uses.update(answer.index for answer in best)
        yield best


def _is_pair(better: Answer, worse: Answer, rules: PairRules) -> bool:
    difference = better.reward - worse.reward
    if difference <= _TOLERANCE or difference < rules.margin - _TOLERANCE:
        return False
    shorter, longer = sorted((better.num_tokens, worse.num_tokens))
    limit = rules.max_length_ratio
    return limit is None or longer <= limit * shorter


def _rank(better: Answer, worse: Answer, rules: PairRules, uses: Counter[int]) -> tuple[Any, ...]:
    """Return a sort key, lowest first. Differences are rounded, so that they compare equal up to rounding errors."""
    distance = abs(better.num_tokens - worse.num_tokens) if rules.ties == "length" else 0
    difference = round((better.reward - worse.reward) / _TOLERANCE)
    return -difference, uses[better.index] + uses[worse.index], distance, better.index, worse.index


def _groups(table: pa.Table) -> dict[int, list[Answer]]:
    """Return the comparable answers by group, in the order of the groups' first rows."""
    columns = ["experience_id", "group_id", "rollout_index", "turn_index", "prompt", "reward", "num_trained_tokens"]
    rows = table.select(columns).to_pylist()
    sequences = Counter((row["group_id"], row["rollout_index"]) for row in rows)
    groups: dict[int, list[Answer]] = defaultdict(list)
    prompts: dict[int, str] = {}
    for row in rows:
        single = sequences[row["group_id"], row["rollout_index"]] == 1 and row["turn_index"] == 0
        if not single or row["reward"] is None or not math.isfinite(row["reward"]):
            continue
        # Only answers to the same prompt are comparable: a workflow may have changed the prompt of a rollout.
        if prompts.setdefault(row["group_id"], row["prompt"]) == row["prompt"]:
            groups[row["group_id"]].append(
                Answer(row["experience_id"], row["rollout_index"], row["reward"], row["num_trained_tokens"])
            )
    return groups
