"""Inputs of algorithms that a turn may record besides its tokens: each is an array of the experience with a fixed name and type.

A turn of T tokens, prompt and response, carries

    token_rewards      float32 [T]   rewards of single tokens, in addition to the reward of the rollout; 0 on the prompt
    teacher_logprobs   float32 [T]   log-probability of each response token under a teacher, nats; 0 on the prompt
    step_reward        float32 [1]   reward of the turn alone
    state_hash         int64 [1]     hash of the environment's state before the turn

Turns that no policy sampled (an expert's) need none of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rftdata.errors import RftError

PER_TOKEN: Mapping[str, Any] = {"token_rewards": np.float32, "teacher_logprobs": np.float32}
PER_TURN: Mapping[str, Any] = {"step_reward": np.float32, "state_hash": np.int64}

Array = npt.NDArray[Any]


def token_array(name: str, values: Sequence[float] | Array, num_prompt_tokens: int, num_response_tokens: int) -> Array:
    """Return the array of one value per token, from values of the response's tokens.

    Raises:
        RftError: another number of values, or one that is not a number.
    """
    given = np.asarray(values, dtype=np.float64)
    if given.shape != (num_response_tokens,):
        raise RftError(
            f"{name} must have one value for each token of the response",
            value=list(given.shape),
            allowed=f"{num_response_tokens} values, as many as turn.response_token_ids",
        )
    # A teacher may exclude a token; a reward is a number.
    if np.isnan(given).any() or (name == "token_rewards" and np.isinf(given).any()):
        index = int(np.flatnonzero(~np.isfinite(given))[0])
        raise RftError(
            f"{name} of the response's token {index} is not a number",
            value=float(given[index]),
            allowed="finite numbers",
        )
    values_T: Array = np.concatenate([np.zeros(num_prompt_tokens), given]).astype(PER_TOKEN[name])
    return values_T


def step_reward(value: object) -> Array:
    """Return the array of a turn's own reward.

    Raises:
        RftError: the reward is not a finite number.
    """
    if not isinstance(value, int | float | np.number) or not math.isfinite(value):
        raise RftError("the step_reward of a turn is not a finite number", value=value, allowed="a finite number")
    return np.array([value], PER_TURN["step_reward"])


def state_hash(state: object) -> Array:
    """Return the array of a state's hash: equal states have equal hashes, in every process. An int is its own hash.

    Raises:
        RftError: the state is of another type, or a number of more than 64 bits.
    """
    if isinstance(state, str):
        state = state.encode()
    if isinstance(state, bytes):
        return np.array([xxhash.xxh3_64_intdigest(state)], np.uint64).view(PER_TURN["state_hash"])
    if isinstance(state, int) and -(2**63) <= state < 2**63:
        return np.array([state], PER_TURN["state_hash"])
    raise RftError(
        "a state must be text, bytes or a 64-bit integer",
        value=type(state).__name__,
        todo="write it as text, such as json.dumps(state, sort_keys=True)",
    )
