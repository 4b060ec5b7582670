"""Tokens of an experience with their log-probabilities, for the heat map."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rftcore.reporting.stored_rollout import tokenizer_of
from rftdata.reports.stored_rollouts import StoredExperience

MOST_TOKENS = 6000
_CONTEXT = 4  # earlier tokens with which one is decoded, since some tokenizers change a text at its beginning
_LONGEST_CHARACTER = 8  # tokens of one character, at most
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class HeatToken:
    """A token of a response.

    Attributes:
        text: empty for all tokens of a character but the last.
        logprob: of the policy that sampled it; None if none did.
        is_trained: whether it is trained on.
        reward: its own reward; None without any.
    """

    token_id: int
    text: str
    logprob: float | None
    is_trained: bool
    reward: float | None


def decoder_of(config: Mapping[str, Any]) -> tuple[Decode, str | None]:
    """Return what turns tokens of a run into text, and why it shows ids instead (None: it does not)."""
    if importlib.util.find_spec("tokenizers") is None:
        return _as_ids, "the package tokenizers is not installed"
    model = config.get("model")
    path = model.get("path") if isinstance(model, Mapping) else None
    return _decoder(str(path), str(config.get("base_dir", ".")))


@lru_cache(maxsize=8)
def _decoder(path: str, base_dir: str) -> tuple[Decode, str | None]:
    tokenizer, reason = tokenizer_of({"model": {"path": path}, "base_dir": base_dir})
    if tokenizer is None:
        return _as_ids, reason
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)), None


def _as_ids(ids: Sequence[int]) -> str:
    return "".join(f"{token_id} " for token_id in ids)


def heat_tokens(experience: StoredExperience, decode: Decode) -> list[HeatToken]:
    """Return the first tokens of a response, at most `MOST_TOKENS`; none if the arrays were purged."""
    if experience.token_ids is None:
        return []
    begin = experience.num_prompt_tokens
    ids = experience.token_ids[begin : begin + MOST_TOKENS]
    texts = _texts(experience.token_ids[max(0, begin - _CONTEXT) : begin], ids, decode)
    return [
        HeatToken(
            token_id,
            texts[i],
            _at(experience.behavior_logprobs, i),
            _at(experience.loss_mask, i) != 0.0,
            _at(experience.token_rewards, i),
        )
        for i, token_id in enumerate(ids)
    ]


def _at(values: Sequence[float] | None, i: int) -> float | None:
    value = values[i] if values is not None and i < len(values) else None
    return None if value is None or math.isnan(value) else float(value)


def _texts(before: Sequence[int], ids: Sequence[int], decode: Decode) -> list[str]:
    """Return the text of each token; a character of several tokens belongs to the last of them."""
    texts, pending, context = [], list[int](), list(before)
    for token_id in ids:
        pending.append(token_id)
        text = decode([*context, *pending])[len(decode(context)) :]
        if text.endswith("\ufffd") and len(pending) < _LONGEST_CHARACTER:
            texts.append("")
            continue
        texts.append(text)
        context = [*context, *pending][-_CONTEXT:]
        pending = []
    return texts
