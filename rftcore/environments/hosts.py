"""The environments of one explorer, and `open_environment`, with which workflows open them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rftcore.environments.handle import EnvironmentHandle, EnvironmentLimits, Place
from rftcore.environments.host_thread import HostThread
from rftcore.environments.in_loop import LoopPlace
from rftcore.environments.in_process import ProcessPlace
from rftcore.environments.registry import EnvironmentClass, imported_environment, load_environment, runs_in_event_loop
from rftcore.rollout_clock import clock_suspended

_PER_CORE = 64
_BYTES_PER_ENVIRONMENT = 64 << 20


def default_max_environments() -> int:
    """Return how many processes of environments may run by default: 64 for each core, one for each 64 MiB of memory, at least 8."""
    by_memory = psutil.virtual_memory().total // _BYTES_PER_ENVIRONMENT
    return max(8, min(_PER_CORE * (os.cpu_count() or 1), by_memory))


class EnvironmentHosts:
    """The environments of one explorer: a host for each name, and a limit on their processes. For one event loop.

    Args:
        base_dir: folder that paths in names are relative to, that of the configuration file.
        max_environments: number of processes at a time; None: `default_max_environments()`.
        modules: imported by hosts, so that processes share them; that of the tasks.
    """

    def __init__(
        self,
        base_dir: Path,
        *,
        max_environments: int | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        self.base_dir, self._modules = base_dir, modules
        self._places = asyncio.Semaphore(max_environments or default_max_environments())
        self._hosts: dict[str, HostThread] = {}
        self._in_loop: dict[str, EnvironmentClass] = {}

    @asynccontextmanager
    async def open(
        self, name: str, args: Mapping[str, Any], limits: EnvironmentLimits, *, waits: bool = True
    ) -> AsyncIterator[EnvironmentHandle]:
        """Open an environment; close it at the end of the context. Neither its calls nor the wait for a place count as time of the rollout.

        Args:
            waits: whether to wait for a free place. A rollout that holds one must not wait for another.
        """
        with clock_suspended():
            place = await self._place(name, limits, waits=waits)
        try:
            with clock_suspended():
                facts = await place.make(args)
            yield EnvironmentHandle(name, place, facts)
            with clock_suspended():
                await place.close()
        finally:
            place.abandon()

    def close(self) -> None:
        """End all hosts and their processes."""
        for host in self._hosts.values():
            host.close()
        self._hosts.clear()

    async def _place(self, name: str, limits: EnvironmentLimits, *, waits: bool) -> Place:
        host = await self._loaded(name)
        if host is None:
            return LoopPlace(name, self._in_loop[name], limits)
        if not waits:
            return ProcessPlace(name, host, limits, lambda: None)
        await self._places.acquire()
        try:
            host = await self._loaded(name)  # it may have ended meanwhile
            assert host is not None
            return ProcessPlace(name, host, limits, self._places.release)
        except BaseException:
            self._places.release()
            raise

    async def _loaded(self, name: str) -> HostThread | None:
        """Return the host of an environment; None if it runs in the event loop."""
        if name in self._in_loop:
            return None
        imported = imported_environment(name)
        if imported is not None and runs_in_event_loop(imported):
            self._in_loop[name] = imported
            return None
        host = self._hosts.get(name)
        if host is None or host.has_ended:
            host = self._hosts[name] = HostThread(name, self.base_dir, self._modules)
        if await asyncio.wrap_future(host.loaded):
            return host
        self._in_loop[name] = await asyncio.to_thread(load_environment, name, self.base_dir)
        self._hosts.pop(name, None)
        return None


@dataclass
class RolloutEnvironments:
    """The environments of one rollout.

    Attributes:
        num_open: how many it has open.
        changing: names of those that it opened and that are not deterministic.
    """

    hosts: EnvironmentHosts
    limits: EnvironmentLimits = field(default_factory=EnvironmentLimits)
    num_open: int = 0
    changing: set[str] = field(default_factory=set)


_current: ContextVar[RolloutEnvironments | None] = ContextVar("rollout_environments", default=None)


def folder_of_rollout() -> Path:
    """Return the folder that paths in a workflow's settings are relative to: that of the configuration file, the current one outside rollouts."""
    rollout = _current.get()
    return Path.cwd() if rollout is None else rollout.hosts.base_dir


@contextmanager
def environments_of_rollout(hosts: EnvironmentHosts, limits: EnvironmentLimits) -> Iterator[RolloutEnvironments]:
    """Let `open_environment` use these hosts and limits within the block, also in tasks and threads with a copy of its context."""
    rollout = RolloutEnvironments(hosts, limits)
    token = _current.set(rollout)
    try:
        yield rollout
    finally:
        _current.reset(token)


@asynccontextmanager
async def open_environment(
    name: str,
    args: Mapping[str, Any] | None = None,
    *,
    limits: EnvironmentLimits | None = None,
    base_dir: Path | None = None,
) -> AsyncIterator[EnvironmentHandle]:
    """Open an environment; it is closed at the end of the context, however that ends.

    Within a rollout, the explorer's hosts are used. Elsewhere (a test, a notebook), the environment has a host for itself.

    Args:
        name: as in a configuration: a built-in name, `./file.py:Class` or `package.module:Class`.
        args: arguments of its constructor.
        limits: time limits; None: those of the rollout's taskset.
        base_dir: outside rollouts, the folder that a path in the name is relative to; None: the current folder.

    Raises:
        ConfigError: the environment does not exist, does not load or does not accept the arguments.
        EnvironmentFailedError: its constructor failed.
        InfrastructureError: it could not be started.
    """
    rollout = _current.get()
    if rollout is None:
        hosts = EnvironmentHosts(base_dir or Path.cwd())
        try:
            async with hosts.open(name, args or {}, limits or EnvironmentLimits()) as handle:
                yield handle
        finally:
            await asyncio.shield(asyncio.to_thread(hosts.close))
        return
    rollout.num_open += 1
    try:
        async with rollout.hosts.open(
            name, args or {}, limits or rollout.limits, waits=rollout.num_open == 1
        ) as handle:
            if not handle.deterministic:
                rollout.changing.add(name)
            yield handle
    finally:
        rollout.num_open -= 1
