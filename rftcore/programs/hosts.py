"""`ProgramHosts`: what the programs of one explorer share, and `open_programs`, with which workflows use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rftcore.environments.hosts import default_max_environments
from rftcore.rollout_clock import clock_suspended

if TYPE_CHECKING:  # runs without programs need no server
    from rftcore.gateway import Gateway, GatewaySession, SessionSettings
    from rftcore.workflows.task import Model


class Kept(Protocol):
    """Something that is kept until the explorer ends."""

    @property
    def has_ended(self) -> bool:
        """Whether it must be made again."""

    def close(self) -> None:
        """End it; called in any thread."""


K = TypeVar("K", bound=Kept)


class ProgramHosts:
    """The gateway of an explorer, the processes that serve many of its rollouts, and a limit on those that serve one. For one event loop.

    Args:
        base_dir: folder that paths are relative to, and in which programs run: that of the configuration file.
        max_programs: number of programs at a time; None: as of environments.
    """

    def __init__(self, base_dir: Path, *, max_programs: int | None = None) -> None:
        self.base_dir = base_dir
        self._places = asyncio.Semaphore(max_programs or default_max_environments())
        self._gateway: Gateway | None = None
        self._kept: dict[Hashable, Kept] = {}
        self._making: dict[Hashable, asyncio.Task[Any]] = {}

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place for a program; the wait does not count as time of the rollout."""
        with clock_suspended():
            await self._places.acquire()
        try:
            yield
        finally:
            self._places.release()

    @contextmanager
    def session(self, model: Model, settings: SessionSettings) -> Iterator[tuple[GatewaySession, str]]:
        """Open a session of the gateway within the block; yield it with its base URL."""
        from rftcore.gateway import Gateway, GatewaySession

        if self._gateway is None:
            self._gateway = Gateway()
        session = GatewaySession(model, settings)
        try:
            yield session, self._gateway.open(session)
        finally:
            self._gateway.end(session)

    async def kept(self, key: Hashable, make: Callable[[], Awaitable[K]]) -> K:
        """Return what is kept under a key; make it if there is nothing, or what there is has ended. The time does not count as the rollout's."""
        found: Any = self._kept.get(key)
        if found is not None and not found.has_ended:
            return found  # type: ignore[no-any-return]  # a key has one type
        if key not in self._making:
            self._making[key] = asyncio.create_task(self._make(key, make))
        with clock_suspended():
            return await asyncio.shield(self._making[key])

    def close(self) -> None:
        """End the processes; called in any thread. The gateway ends with its event loop."""
        for each in self._kept.values():
            each.close()

    async def close_all(self) -> None:
        """End the processes and the gateway; called in the event loop."""
        await asyncio.to_thread(self.close)
        if self._gateway is not None:
            await self._gateway.close()

    async def _make(self, key: Hashable, make: Callable[[], Awaitable[K]]) -> K:
        try:
            found = self._kept[key] = await make()
            return found
        finally:
            self._making.pop(key, None)


_current: ContextVar[ProgramHosts | None] = ContextVar("program_hosts", default=None)


@contextmanager
def programs_of_rollout(hosts: ProgramHosts) -> Iterator[None]:
    """Let `open_programs` use these hosts within the block."""
    token = _current.set(hosts)
    try:
        yield
    finally:
        _current.reset(token)


@asynccontextmanager
async def open_programs(base_dir: Path | None = None) -> AsyncIterator[ProgramHosts]:
    """Yield the hosts of the rollout's explorer. Elsewhere (a test, a notebook), they are made and ended here.

    Args:
        base_dir: outside rollouts, the folder that paths are relative to; None: the current folder.
    """
    found = _current.get()
    if found is not None:
        yield found
        return
    hosts = ProgramHosts(base_dir or Path.cwd())
    try:
        yield hosts
    finally:
        await asyncio.shield(hosts.close_all())
