"""How many rollouts run at a time: as many as keep the engine busy, however long they wait for something else.

A rollout that waits for an environment, a tool or a reward gives the engine nothing to do. So what counts are not rollouts, but requests:
another rollout begins whenever fewer requests are open than the engine can use. With answers of 0.5 s and steps of 2 s, five times as many
rollouts run as without steps, and the number follows when an environment becomes slower or faster.

Three limits are apart: this one, with a largest number of rollouts, which bounds their memory; that of environments in processes
(`rftcore.environments`); and the batch of the engine, which queues further requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from rftcore.engines.base import Decoding, Generation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rftcore.workflows.task import Sampler

# A rollout that has begun and asks nothing for so long waits for something else, such as the reset of its environment.
_STARTS_WITHIN_S = 1.0


class RolloutSlots:
    """Admits rollouts. For one event loop; other threads may read its numbers.

    Args:
        num_requests: rollouts begin while fewer requests are open.
        max_rollouts: largest number of rollouts at a time.
    """

    def __init__(self, num_requests: int, max_rollouts: int) -> None:
        self._num_requests, self.max_rollouts = num_requests, max_rollouts
        self._load = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self.num_running = 0
        self.num_elsewhere = 0

    @asynccontextmanager
    async def rollout(self) -> AsyncIterator[RolloutSlot]:
        """Wait until a rollout may begin, and count it until it ends."""
        await self._wait()
        slot = RolloutSlot(self)
        try:
            yield slot
        finally:
            slot.end()
            self.num_running -= 1
            self._admit()

    def move(self, load: int, elsewhere: int) -> None:
        """Record changes of the numbers of requests and of rollouts that have none open."""
        self._load += load
        self.num_elsewhere += elsewhere
        self._admit()

    async def _wait(self) -> None:
        admitted = asyncio.get_running_loop().create_future()
        self._queue.append(admitted)
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():  # admitted and cancelled at once
                self.num_running -= 1
                self._load -= 1
                self._admit()
            raise

    def _admit(self) -> None:
        while self._queue and self._load < self._num_requests and self.num_running < self.max_rollouts:
            admitted = self._queue.popleft()
            if not admitted.done():
                self.num_running += 1
                self._load += 1  # its first request, which it is about to make
                admitted.set_result(None)


class RolloutSlot:
    """One rollout that runs. It is elsewhere while it has no open request, unless it has just begun."""

    def __init__(self, slots: RolloutSlots) -> None:
        self._slots = slots
        self._num_open = 0
        self._has_ended = False
        self._load, self._is_elsewhere = 1, False
        self._timer = asyncio.get_running_loop().call_later(_STARTS_WITHIN_S, self._count)

    def sampler(self, sampler: Sampler) -> Sampler:
        """Return a view of a sampler whose requests are counted."""
        return _Counted(sampler, self)

    def count(self, requests: int) -> None:
        """Record that a request was opened (1) or has ended (-1)."""
        self._num_open += requests
        self._count()

    def end(self) -> None:
        """Record that the rollout has ended; its requests may end later."""
        self._has_ended = True
        self._count()

    def _count(self) -> None:
        """Stop to count the request that a rollout is expected to begin with, and count those that it has."""
        self._timer.cancel()
        before, was_elsewhere = self._load, self._is_elsewhere
        self._load, self._is_elsewhere = self._num_open, self._num_open == 0 and not self._has_ended
        self._slots.move(self._load - before, self._is_elsewhere - was_elsewhere)


class _Counted:
    """A sampler whose open requests count as one rollout's."""

    def __init__(self, sampler: Sampler, slot: RolloutSlot) -> None:
        self._sampler, self._slot = sampler, slot

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._sampler.tokenizer

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        self._slot.count(1)
        try:
            return await self._sampler.generate(prompt_token_ids, decoding)
        finally:
            self._slot.count(-1)
