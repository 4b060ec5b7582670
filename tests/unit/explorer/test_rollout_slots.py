"""Rollouts begin when the engine has room, whatever other rollouts wait for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from rftcore.engines.base import Decoding, Generation
from rftcore.explorer import rollout_slots
from rftcore.explorer.rollout_slots import RolloutSlots


@dataclass
class Gates:
    """An engine, and an environment, that answer when they are told to."""

    tokenizer: Any = None
    asked: list[asyncio.Event] = field(default_factory=list)
    stepping: list[asyncio.Event] = field(default_factory=list)

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        await self._wait(self.asked)
        return Generation([], [], "", "stop", [])

    async def step(self) -> None:
        await self._wait(self.stepping)

    async def _wait(self, waiting: list[asyncio.Event]) -> None:
        event = asyncio.Event()
        waiting.append(event)
        try:
            await event.wait()
        finally:
            waiting.remove(event)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def release(waiting: list[asyncio.Event], count: int) -> None:
    for event in waiting[:count]:
        event.set()
    await settle()


async def play(slots: RolloutSlots, gates: Gates, turns: int = 1) -> None:
    async with slots.rollout() as slot:
        sampler = slot.sampler(gates)
        for _ in range(turns):
            await sampler.generate([1], Decoding())
            await gates.step()


def test_rollouts_that_wait_for_their_environment_leave_the_engine_to_others() -> None:
    async def run() -> None:
        slots, gates = RolloutSlots(2, 5), Gates()
        tasks = [asyncio.create_task(play(slots, gates, turns=2)) for _ in range(8)]
        await settle()
        assert (len(gates.asked), slots.num_running, slots.num_elsewhere) == (2, 2, 0)
        await release(gates.asked, 2)  # two steps of the environment: two more rollouts begin
        assert (len(gates.asked), len(gates.stepping), slots.num_running, slots.num_elsewhere) == (2, 2, 4, 2)
        await release(gates.asked, 2)
        assert (len(gates.asked), slots.num_running, slots.num_elsewhere) == (1, 5, 4), "the largest number"
        await release(gates.stepping, 4)  # all come back: the engine has more requests than it wants
        assert (len(gates.asked), slots.num_running, slots.num_elsewhere) == (5, 5, 0)
        await release(gates.asked, 4)
        await release(gates.stepping, 4)  # four have ended
        assert (len(gates.asked), slots.num_running, slots.num_elsewhere) == (2, 2, 0)
        while not all(task.done() for task in tasks):
            await release(gates.asked, 8)
            await release(gates.stepping, 8)
        await asyncio.gather(*tasks)
        assert (slots.num_running, slots.num_elsewhere, slots._load) == (0, 0, 0)

    asyncio.run(run())


def test_requests_of_one_rollout_count_one_by_one() -> None:
    async def several(slots: RolloutSlots, gates: Gates) -> None:
        async with slots.rollout() as slot:
            sampler = slot.sampler(gates)
            await asyncio.gather(*(sampler.generate([1], Decoding()) for _ in range(3)))

    async def run() -> None:
        slots, gates = RolloutSlots(2, 9), Gates()
        first = asyncio.create_task(several(slots, gates))
        await settle()
        second = asyncio.create_task(several(slots, gates))
        await release(gates.asked, 1)
        assert len(gates.asked) == 2 and slots.num_running == 1, "two requests of the first are still open"
        await release(gates.asked, 1)
        assert len(gates.asked) == 4 and slots.num_running == 2
        while not (first.done() and second.done()):
            await release(gates.asked, 4)
        assert (slots.num_running, slots.num_elsewhere, slots._load) == (0, 0, 0)

    asyncio.run(run())


def test_a_rollout_that_asks_nothing_holds_no_place_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        slots, reset = RolloutSlots(1, 2), asyncio.Event()

        async def slow() -> None:
            async with slots.rollout():
                await reset.wait()

        tasks = [asyncio.create_task(slow()) for _ in range(3)]
        while slots.num_elsewhere < 2:
            await asyncio.sleep(0)
        reset.set()
        await asyncio.gather(*tasks)
        assert (slots.num_running, slots.num_elsewhere, slots._load) == (0, 0, 0)

    monkeypatch.setattr(rollout_slots, "_STARTS_WITHIN_S", 0.0)
    asyncio.run(run())


def test_cancelled_rollouts_give_their_places_to_others() -> None:
    async def run() -> None:
        slots, gates = RolloutSlots(1, 9), Gates()
        first, second, third = (asyncio.create_task(play(slots, gates)) for _ in range(3))
        await settle()
        second.cancel()  # while it waits
        await settle()
        first.cancel()  # in the engine; the third is admitted, and cancelled before it runs
        await asyncio.sleep(0)
        third.cancel()
        await asyncio.gather(first, second, third, return_exceptions=True)
        assert (slots.num_running, slots.num_elsewhere, slots._load) == (0, 0, 0)
        last = asyncio.create_task(play(slots, gates))
        await settle()
        await release(gates.asked, 1)
        await release(gates.stepping, 1)
        await last

    asyncio.run(run())
