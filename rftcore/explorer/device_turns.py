"""The explorer's turns on a device that it shares with the trainer (`explorer.sleep`): its engine sleeps while the trainer has the device.

The trainer asks, and the explorer gives between two steps of its engine, whatever it has open: rollouts wait in the engine and go on. A version that
the trainer sends straight into the engine is taken within the trainer's turn, with room for the weights alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rftcore.engines.base import Engine
from rftcore.explorer.engine_weights import EngineWeights
from rftdata.failpoints import failpoint
from rftdata.workers.device_turns import DeviceTurn
from rftdata.workers.worker import Worker

_ASLEEP = "sleeps while the trainer has the device"


def await_first_turn(turn: DeviceTurn, worker: Worker) -> bool:
    """Wait until the engine may be started; return false if the run was asked to stop before."""
    while not turn.take():
        if worker.should_stop():
            return False
        worker.set_state("waits", "the trainer to load its model")
        turn.wait(0.5)
    return True


class EngineTurn:
    """See the module header.

    Args:
        turn: this explorer's, which it has; None where it takes no turns, so that the engine never sleeps.
        stop_time: called with true before the engine sleeps, and with false when it is awake: rollouts wait through no fault of theirs.
    """

    def __init__(
        self,
        worker: Worker,
        engine: Engine,
        weights: EngineWeights,
        turn: DeviceTurn | None,
        stop_time: Callable[[bool], None],
    ) -> None:
        self._worker, self._engine, self._weights, self._turn = worker, engine, weights, turn
        self._stop_time = stop_time
        self._is_awake = True
        self._news: asyncio.Task[None] | None = None

    async def keep(self) -> bool:
        """Give or take the turn where it is due; return whether the engine is awake and this explorer's turn lasts."""
        if self._turn is None:
            return True
        if self._is_awake:
            if await asyncio.to_thread(self._turn.lasts):
                return True
            await self._sleep(self._turn)
        if not await asyncio.to_thread(self._turn.take):
            await self._weights.take_sent()
            self._worker.set_state(_ASLEEP, activity="asleep")
            return False
        self._worker.set_state("wakes its engine", activity="transferring")
        if not await asyncio.to_thread(self._engine.wake):
            self._weights.lose()
        self._is_awake = True
        self._stop_time(False)
        failpoint("explorer.awake")
        return True

    def news(self) -> list[asyncio.Task[None]]:
        """Return a task that ends when a worker asks or gives, or soon; nothing where there are no turns."""
        if self._turn is None:
            return []
        if self._news is None or self._news.done():
            self._news = asyncio.create_task(asyncio.to_thread(self._turn.wait, 0.5))
        return [self._news]

    async def leave(self) -> None:
        """End the turns."""
        if self._news is not None:
            await self._news

    async def _sleep(self, turn: DeviceTurn) -> None:
        self._worker.set_state("puts its engine to sleep", activity="transferring")
        self._stop_time(True)
        seconds = await asyncio.to_thread(self._engine.sleep)
        self._is_awake = False
        self._worker.progress["sleep_s"] = round(seconds, 3)
        failpoint("explorer.asleep")
        await asyncio.to_thread(turn.give)
        self._worker.set_state(_ASLEEP, activity="asleep")
