"""The explorer's side of a device that it shares with the trainer (`explorer.sleep`): its engine sleeps while the trainer has the device.

The trainer asks for the device, and the explorer hands it over between two steps of its engine, even with open rollouts, which wait in the engine
and continue later. A version that the trainer sends straight into the engine is taken while the trainer has the device, with room for the weights alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rftcore.engines.base import Engine
from rftcore.explorer.engine_weights import EngineWeights
from rftdata.failpoints import failpoint
from rftdata.workers.shared_device import SharedDevice
from rftdata.workers.worker import Worker

_ASLEEP = "sleeps while the trainer has the device"


def await_device(device: SharedDevice, worker: Worker) -> bool:
    """Wait until the engine may start; return False if the run was asked to stop before."""
    while not device.take():
        if worker.should_stop():
            return False
        worker.set_state("waits", "the trainer to load its model")
        device.wait(0.5)
    return True


class EngineDevice:
    """The device of an engine: the engine is awake while the explorer has it, and sleeps otherwise.

    Args:
        device: held by the explorer; None if the engine never sleeps.
        stop_time: called with True before the engine sleeps and with False when it is awake, since rollouts do not cause this wait.
    """

    def __init__(
        self,
        worker: Worker,
        engine: Engine,
        weights: EngineWeights,
        device: SharedDevice | None,
        stop_time: Callable[[bool], None],
    ) -> None:
        self._worker, self._engine, self._weights, self._device = worker, engine, weights, device
        self._stop_time = stop_time
        self._is_awake = True
        self._news: asyncio.Task[None] | None = None

    @property
    def is_shared(self) -> bool:
        """Whether the engine sleeps while another worker has the device."""
        return self._device is not None

    async def keep(self) -> bool:
        """Hand over or take the device if that is due; return whether the engine is awake and keeps it."""
        if self._device is None:
            return True
        if self._is_awake:
            if await asyncio.to_thread(self._device.lasts):
                return True
            await self._sleep(self._device)
        if not await asyncio.to_thread(self._device.take):
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
        """Return a task that ends when another worker asks for the device or hands it over, or after 0.5 s; nothing without a shared device."""
        if self._device is None:
            return []
        if self._news is None or self._news.done():
            self._news = asyncio.create_task(asyncio.to_thread(self._device.wait, 0.5))
        return [self._news]

    async def leave(self) -> None:
        """Stop listening to other workers."""
        if self._news is not None:
            await self._news

    async def _sleep(self, device: SharedDevice) -> None:
        self._worker.set_state("puts its engine to sleep", activity="transferring")
        self._stop_time(True)
        seconds = await asyncio.to_thread(self._engine.sleep)
        self._is_awake = False
        self._worker.progress["sleep_s"] = round(seconds, 3)
        failpoint("explorer.asleep")
        await asyncio.to_thread(device.give)
        self._worker.set_state(_ASLEEP, activity="asleep")
