"""Rollouts that were tried without a run, as `rft try` prints them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rftcore.reporting.rollout_text import RolloutPrinter, ShownSequence, ShownTurn, finite, named, number
from rftcore.workflows.task import Task
from rftdata.experience import TURNS, Rollout
from rftdata.experience import Sequence as Experience


@dataclass(frozen=True, kw_only=True)
class TriedRollout:
    """A rollout of a task, one of `num_rollouts`; `stack`: the user's frames of its error."""

    task: Task
    rollout: Rollout
    num_rollouts: int
    stack: str = ""


def print_tried(printer: RolloutPrinter, tried: TriedRollout) -> None:
    """Print a rollout with its sequences, or its error with the user's stack."""
    task, rollout = tried.task, tried.rollout
    which = f", rollout {rollout.index + 1} of {tried.num_rollouts}" if tried.num_rollouts > 1 else ""
    printer.line(f"task {task.taskset}/{task.task_key}{which}", "bold")
    stopped = f", stopped by {rollout.stop_reason}" if rollout.stop_reason else ""
    turns = f"{rollout.num_turns} turn{'' if rollout.num_turns == 1 else 's'}"
    printer.line(f"  {rollout.outcome}{stopped} · reward {number(rollout.reward)} · {turns} · {rollout.seconds:.1f} s")
    if task.answer is not None:
        printer.line(f"  right answer: {task.answer}")
    if rollout.error is not None:
        printer.line(f"  error: {rollout.error}")
    for line in tried.stack.rstrip().splitlines():
        printer.line(f"    {line}")
    if not rollout.sequences:
        printer.line("  it has no answer of the model")
    for place, sequence in enumerate(rollout.sequences):
        printer.line("")
        printer.sequence(_shown(sequence, place, len(rollout.sequences)))


def _shown(sequence: Experience, place: int, count: int) -> ShownSequence:
    facts = []
    if sequence.reward_parts:
        facts.append(f"parts: {named(sequence.reward_parts)}")
    if sequence.metrics:
        facts.append(f"metrics: {named(sequence.metrics)}")
    if "token_rewards" in sequence.arrays:
        facts.append(f"rewards of tokens {number(math.fsum(sequence.arrays['token_rewards']))}")
    facts.append(
        f"finish {sequence.finish_reason}" + (f" · forked: {sequence.fork}" if sequence.fork is not None else "")
    )
    return ShownSequence(
        heading=("experience" if count == 1 else f"experience {place + 1} of {count}")
        + (f" · role {sequence.role}" if sequence.role else ""),
        facts=facts,
        messages=sequence.messages,
        prompt=sequence.prompt,
        response=sequence.response,
        token_ids=[int(token) for token in sequence.token_ids],
        num_prompt_tokens=sequence.num_prompt_tokens,
        loss_mask=None if sequence.loss_mask is None else [float(value) for value in sequence.loss_mask],
        logprobs=None if sequence.behavior_logprobs is None else [float(value) for value in sequence.behavior_logprobs],
        turns=_turns(sequence),
    )


def _turns(sequence: Experience) -> list[ShownTurn]:
    whole = [[sequence.num_prompt_tokens, len(sequence.token_ids), sequence.turn_index or 0]]
    bounds: Sequence[Sequence[int]] = sequence.arrays[TURNS].tolist() if TURNS in sequence.arrays else whole
    rewards = sequence.arrays.get("step_reward")
    given = [None] * len(bounds) if rewards is None else [float(value) for value in rewards]
    return [
        ShownTurn(number=turn, start=start, end=end, step_reward=reward)
        for (start, end, turn), reward in zip(bounds, given, strict=True)
    ]


def json_of_tried(tried: TriedRollout) -> dict[str, Any]:
    """Return a rollout as JSON, in which what is not a number is null."""
    task, rollout = tried.task, tried.rollout
    return {
        "taskset": task.taskset,
        "task_key": task.task_key,
        "answer": task.answer,
        "rollout_index": rollout.index,
        "outcome": rollout.outcome,
        "stop_reason": rollout.stop_reason,
        "reward": finite(rollout.reward),
        "num_turns": rollout.num_turns,
        "seconds": rollout.seconds,
        "error": rollout.error,
        "stack": tried.stack,
        "sequences": [_json(sequence) for sequence in rollout.sequences],
    }


def _json(sequence: Experience) -> dict[str, Any]:
    arrays = {name: values.tolist() for name, values in sequence.arrays.items()}
    values = {
        "prompt": sequence.prompt,
        "response": sequence.response,
        "messages": sequence.messages,
        "fork": sequence.fork,
        "role": sequence.role,
        "finish_reason": sequence.finish_reason,
        "reward_parts": sequence.reward_parts,
        "metrics": sequence.metrics,
        "num_prompt_tokens": sequence.num_prompt_tokens,
        "token_ids": list(map(int, sequence.token_ids)),
        "loss_mask": None if sequence.loss_mask is None else list(map(int, sequence.loss_mask)),
        "behavior_logprobs": None
        if sequence.behavior_logprobs is None
        else list(map(float, sequence.behavior_logprobs)),
        **arrays,
    }
    return {name: finite(value) for name, value in values.items()}
