"""Soft overlong punishment: a penalty that grows as a response approaches the limit of its length.

    - {name: overlong, max_tokens: 1024, cache_tokens: 256}

DAPO, arXiv 2503.14476, eq. 13, with L = tokens of the scored answer, the end token included:

    0                                                     if L ≤ max_tokens − cache_tokens
    ((max_tokens − cache_tokens) − L) / cache_tokens      up to L ≤ max_tokens
    −1                                                    beyond

`weight` is the size of the full penalty. The stage `length_penalty` adds the same to rewards that are stored already.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rftcore.workflows.task import Task, Turn
from rftdata.errors import ConfigError


class Overlong:
    """A penalty of −1 … 0.

    Args:
        max_tokens: length from which the full penalty applies.
        cache_tokens: number of tokens before that length over which the penalty grows.

    Raises:
        ConfigError: cache_tokens is more than max_tokens.
    """

    runs_in_explorer = True

    def __init__(self, *, max_tokens: Annotated[int, Field(gt=0)], cache_tokens: Annotated[int, Field(gt=0)]) -> None:
        if cache_tokens > max_tokens:
            raise ConfigError("cache_tokens is more than max_tokens", value=cache_tokens, allowed=f"up to {max_tokens}")
        self._free, self._cache = max_tokens - cache_tokens, cache_tokens

    def __call__(self, turn: Turn, task: Task) -> float:
        """Return the penalty."""
        return min(0.0, max(-1.0, (self._free - len(turn.response_token_ids)) / self._cache))
