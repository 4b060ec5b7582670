"""Limits of a rollout that end it and keep it: of its turns, its tokens, the model's context and its time."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from rftdata.errors import RftError


@dataclass(frozen=True)
class Limits:
    """Limits of one rollout, each with the setting of the same name.

    Attributes:
        max_turns: number of answers.
        max_rollout_tokens: number of sampled tokens of all answers; the last answer is cut there.
    """

    max_turns: int | None = None
    max_rollout_tokens: int | None = None


NO_LIMITS = Limits()


class LimitReachedError(RftError):
    """A limit allows no further answer, and what the model has answered is kept.

    A workflow may catch it to score what there is. If it does not, the reward functions score the last turn. `context_length` is a limit of one
    chat: the model still answers others. The other limits end the rollout.

    Attributes:
        reason: one of `rftdata.experience.STOP_REASONS`.
    """

    def __init__(self, reason: str, what: str) -> None:
        super().__init__(what)
        self.reason = reason


class Allowance:
    """The turns and tokens that a rollout has left. For one event loop.

    An open request reserves all tokens that it may sample, so that requests side by side never sample more than the limit. A request that could
    have more tokens if the open ones sampled fewer waits for them. Requests therefore get the same number of tokens side by side as one after the other.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num_turns = 0
        self._num_left = math.inf if limits.max_rollout_tokens is None else limits.max_rollout_tokens
        self._num_reserved = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._is_chat_full = False
        self.reached: LimitReachedError | None = None

    @property
    def stop_reason(self) -> str | None:
        """The limit that ended the rollout, or otherwise a chat; None if there is none."""
        if self.reached is not None:
            return self.reached.reason
        return "context_length" if self._is_chat_full else None

    async def begin_turn(self, max_tokens: int) -> int:
        """Count a turn, and return the number of tokens that it may sample, which are reserved until `end_turn`.

        Raises:
            LimitReachedError: the rollout has ended, or has no turn or token left.
        """
        self._refuse_if_reached()
        if self._limits.max_turns is not None and self._num_turns >= self._limits.max_turns:
            self._end("max_turns", f"the rollout has had its {self._limits.max_turns} turns (explorer.max_turns)")
        self._num_turns += 1
        while (granted := min(max_tokens, self._num_left)) > self._num_left - self._num_reserved:
            self._waiting.append(ended := asyncio.get_running_loop().create_future())
            try:
                await ended
            except asyncio.CancelledError:
                self._num_turns -= 1
                raise
            self._refuse_if_reached()
        if granted <= 0:
            limit = self._limits.max_rollout_tokens
            self._end("max_rollout_tokens", f"the rollout has sampled its {limit} tokens (explorer.max_rollout_tokens)")
        self._num_reserved += int(granted)
        return int(granted)

    def end_turn(self, reserved: int, num_sampled: int, *, is_refused: bool = False) -> None:
        """Release the tokens that a turn reserved, and count those that it sampled. A request that was refused is no turn."""
        self._num_turns -= is_refused
        self._num_reserved -= reserved
        self._num_left -= num_sampled
        waiting, self._waiting = self._waiting, []
        for ended in waiting:
            if not ended.done():
                ended.set_result(None)

    def fill_chat(self, what: str) -> LimitReachedError:
        """Record that a chat has no room in the context, and return the error for it."""
        self._is_chat_full = True
        return LimitReachedError("context_length", what)

    def _refuse_if_reached(self) -> None:
        if self.reached is not None:
            raise self.reached

    def _end(self, reason: str, what: str) -> None:
        self.reached = LimitReachedError(reason, what)
        raise self.reached
