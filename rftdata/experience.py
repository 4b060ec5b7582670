"""The data of a write: a task's group of rollouts, each with its trainable sequences; and its validation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rftdata.origin import GroupOrigin, SequenceOrigin

Array = npt.NDArray[Any]
IntegerSequence = list[int] | Array
FloatSequence = list[float] | Array
MaskSequence = list[bool] | Array
OUTCOMES = ("ok", "failed", "timeout", "cancelled")
SOURCES = ("explorer", "human", "import", "synthesis")
FORKS = ("branch", "history", "template", "separate")
"""Why a sequence begins anew in its rollout, see the type `rft.fork`."""
STOP_REASONS = ("max_turns", "max_rollout_tokens", "context_length", "rollout_timeout")
"""Limits that end a rollout and keep it."""
MAX_ROLE = 100
"""Most characters of a role's name."""
TURNS = "turns"
"""Name of the array with the turns of a sequence."""
STEP_REWARD = "step_reward"
"""Name of the array with the reward of each turn of a sequence alone. They are also rows of `rft.turn_reward`."""


@dataclass
class Sequence:
    """One trainable sequence: a rollout of one or several turns, or one branch of it. T = prompt and response tokens.

    A sequence of several turns has the array `turns`, int32 [K, 3]: for each turn its first token, the token after its last, and its number
    in the rollout, all ascending. The tokens between two turns, such as observations, have no behaviour log-probability (NaN) and the
    loss mask 0. A sequence without the array is one turn: its response. The array `step_reward`, of K finite numbers, has the reward of each
    turn alone.

    Attributes:
        prompt, response: texts.
        token_ids: [T].
        num_prompt_tokens: number of tokens before the response.
        behavior_logprobs: [T - num_prompt_tokens] nats, of the response tokens; None if no policy sampled them (demonstrations).
        loss_mask: [T - num_prompt_tokens]; None trains on every response token.
        policy_spans: (index of the first token, policy_version_id), ascending; empty if no policy sampled.
        finish_reason: stop, length or abort.
        reward: reward of the sequence; None while pending.
        reward_parts, metrics: named numbers.
        messages: the chat up to and including the response.
        arrays: further arrays by name, of any type and shape: teacher log-probabilities, token rewards, routed experts, images…
        turn_index: number of its first turn in the rollout; None counts the turns of the sequences before it.
        fork: why it begins anew instead of extending an earlier sequence of its rollout, one of `FORKS`; None if it does not.
        role: the role that the policy played in it; None where the workflow has only one.
        edit_id: annotation_id of the edit that it renders; its parent is the experience that was edited.
        origin: origin of an imported sequence. Its policy spans name versions of another buffer, so no policy of this buffer counts
            as its sampler.
    """

    prompt: str
    response: str
    token_ids: IntegerSequence
    num_prompt_tokens: int
    finish_reason: str
    _: KW_ONLY
    reward: float | None = None
    behavior_logprobs: FloatSequence | None = None
    loss_mask: MaskSequence | None = None
    policy_spans: list[tuple[int, int]] = field(default_factory=list)
    reward_parts: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    messages: list[dict[str, Any]] | None = None
    parent_id: int | None = None
    edit_id: int | None = None
    arrays: Mapping[str, Array] = field(default_factory=dict)
    turn_index: int | None = None
    fork: str | None = None
    role: str | None = None
    origin: SequenceOrigin | None = None

    @property
    def num_turns(self) -> int:
        return len(self.arrays[TURNS]) if TURNS in self.arrays else 1

    def first_turn(self, num_before: int) -> int:
        """Return the number of its first turn in the rollout, whose sequences before it have `num_before` turns."""
        if self.turn_index is not None:
            return self.turn_index
        return int(self.arrays[TURNS][0, 2]) if TURNS in self.arrays else num_before

    def turn_numbers(self, turn_index: int) -> list[int]:
        """Return the number of each of its turns in the rollout; `turn_index` is that of the first."""
        return [int(number) for number in self.arrays[TURNS][:, 2]] if TURNS in self.arrays else [turn_index]

    @property
    def last_answer(self) -> str:
        """The answer of its last turn; of several turns without messages, the whole response."""
        if self.num_turns == 1 or not self.messages or not isinstance(self.messages[-1].get("content"), str):
            return self.response
        return str(self.messages[-1]["content"])

    @property
    def num_trained_tokens(self) -> int:
        """Number of response tokens with the loss mask 1."""
        if self.loss_mask is None:
            return len(self.token_ids) - self.num_prompt_tokens
        return int(np.count_nonzero(self.loss_mask))


@dataclass(frozen=True)
class AbandonedTry:
    """A try of a rollout that was given up.

    Attributes:
        error: a failure of the infrastructure, or the loss of an explorer whose answers could not all be taken over.
        chats: what it had sampled, see `rftdata.writing.chats`. Of a lost explorer, the answers that were not taken over.
    """

    error: str
    chats: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Rollout:
    """One rollout. A failed one keeps its error and its turns so far.

    Attributes:
        stop_reason: the limit that ended it, one of `STOP_REASONS`; None if its workflow ended it, or it failed.
        tries: those that were given up, the first first.
    """

    index: int
    outcome: str = "ok"
    reward: float | None = None
    sequences: list[Sequence] = field(default_factory=list)
    _: KW_ONLY
    seconds: float = 0.0
    error: str | None = None
    stop_reason: str | None = None
    tries: list[AbandonedTry] = field(default_factory=list)

    @property
    def num_turns(self) -> int:
        return sum(sequence.num_turns for sequence in self.sequences)


def last_sequence(sequences: Iterable[Sequence]) -> Sequence | None:
    """Return the sequence with the last turn of a rollout; None without any. Sequences are in the order of their first turns."""

    def last_turn(numbered: tuple[int, Sequence]) -> int:
        place, sequence = numbered
        if TURNS in sequence.arrays:
            return int(sequence.arrays[TURNS][-1, 2])
        return place if sequence.turn_index is None else sequence.turn_index

    return max(enumerate(sequences), key=last_turn, default=(0, None))[1]


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The greedy rollout of a group: its reward is a baseline for the others, and it is not trained on. Fields as in `rft.group_baseline`.

    Attributes:
        reward: with the rewards of its tokens, as algorithms count that of the other rollouts.
        response, messages, finish_reason: of its last turn.
        num_response_tokens: of all its answers.
        policy_version_min: None if this system did not sample it.
    """

    outcome: str
    reward: float | None
    response: str
    num_turns: int
    num_response_tokens: int
    finish_reason: str
    seconds: float
    reward_parts: dict[str, float] = field(default_factory=dict)
    messages: list[dict[str, Any]] | None = None
    policy_version_min: int | None = None
    error: str | None = None

    @classmethod
    def of(cls, rollout: Rollout) -> Baseline:
        """Return what a group keeps of its greedy rollout."""
        last = last_sequence(rollout.sequences)
        versions = [version for s in rollout.sequences for _, version in s.policy_spans]
        of_tokens = sum(
            float(s.arrays["token_rewards"].sum()) for s in rollout.sequences if "token_rewards" in s.arrays
        )
        reward = None if rollout.reward is None else rollout.reward + of_tokens
        return cls(
            outcome=rollout.outcome,
            reward=reward,
            reward_parts=last.reward_parts if last else {},
            response=last.last_answer if last else "",
            messages=last.messages if last else None,
            num_turns=rollout.num_turns,
            num_response_tokens=sum(s.num_trained_tokens for s in rollout.sequences),
            finish_reason=last.finish_reason if last else "abort",
            policy_version_min=min(versions, default=None),
            seconds=rollout.seconds,
            error=rollout.error,
        )


@dataclass
class Group:
    """The rollouts of one task.

    A claimed group has `group_id` and `claim_token`. An unplanned group (of an import or a person) names the task instead: `taskset`,
    `task_key` and `payload`; it is planned and sealed in one transaction. An imported one also has its `origin`. `baseline`: its greedy
    rollout, for algorithms that subtract that rollout's reward.
    """

    rollouts: list[Rollout]
    group_id: int | None = None
    claim_token: int | None = None
    _: KW_ONLY
    source: str = "explorer"
    taskset: str | None = None
    task_key: str | None = None
    payload: dict[str, Any] = field(default_factory=dict)
    origin: GroupOrigin | None = None
    baseline: Baseline | None = None


def successes_and_trials(group: Group) -> tuple[float, int]:
    """Return successes (rewards clipped to [0, 1]) and trials of a group's successful rollouts, from which selectors learn."""
    rewards = [rollout.reward for rollout in group.rollouts if rollout.outcome == "ok" and rollout.reward is not None]
    return sum((min(max(reward, 0.0), 1.0) for reward in rewards), start=0.0), len(rewards)


def is_complete(group: Group) -> bool:
    """Return whether every rollout succeeded, the greedy one included, every reward is known, and no reward has been labelled."""
    if group.baseline is not None and group.baseline.outcome != "ok":
        return False
    return all(
        rollout.outcome == "ok" and rollout.sequences and all(_is_settled(s) for s in rollout.sequences)
        for rollout in group.rollouts
    )


def _is_settled(sequence: Sequence) -> bool:
    if sequence.origin is not None:
        return sequence.origin.reward is not None and not sequence.origin.labels
    return sequence.reward is not None
