"""Chats as JSON: what is kept of a sequence where its tokens are not, in answers of evaluations and in tries that were given up."""

from __future__ import annotations

from typing import Any

from rftdata.experience import STEP_REWARD, TURNS, Sequence


def chat_of(sequence: Sequence) -> dict[str, Any]:
    """Return the messages of a sequence, its fork, role and finish_reason, and its turns with their numbers of tokens and rewards."""
    whole = [[sequence.num_prompt_tokens, len(sequence.token_ids), sequence.turn_index or 0]]
    bounds = sequence.arrays[TURNS].tolist() if TURNS in sequence.arrays else whole
    turns: list[dict[str, Any]] = [{"turn": turn, "num_tokens": end - start} for start, end, turn in bounds]
    if STEP_REWARD in sequence.arrays:
        rewards = sequence.arrays[STEP_REWARD].tolist()
        turns = [{**turn, "step_reward": reward} for turn, reward in zip(turns, rewards, strict=True)]
    return {
        "messages": sequence.messages,
        "fork": sequence.fork,
        "role": sequence.role,
        "finish_reason": sequence.finish_reason,
        "turns": turns,
    }
