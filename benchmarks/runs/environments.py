"""What the process of an environment costs: a step through it, beside a message to a forked process and back; the start of many; the memory of each.

The environment counts, so that a step itself costs nothing. `pipe_us` is the time of a message through a pipe and back, without an event loop,
checks and records. `starts_s` is the time from the first of many concurrent `open_environment` to the last first
observation, with a warm host. The memory of an environment is what its process does not share (`USS`).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.arguments import argument_parser, integer
from benchmarks.harness.report import write
from rftcore.environments import (
    Environment,
    EnvironmentHandle,
    EnvironmentHosts,
    EnvironmentLimits,
    Observation,
    Step,
    environments_of_rollout,
    open_environment,
)

NAME = f"{__name__}:Counts"


class Counts(Environment):
    """Counts its steps."""

    def reset(self, task: Any, seed: int) -> Observation:
        self.count = seed
        return Observation("0")

    def step(self, action: Any, role: str = "agent") -> Step:
        self.count += 1
        return Step(Observation(f"{self.count}: {action}"), 1.0)


async def steps(num_steps: int) -> dict[str, float]:
    """Return the median microseconds of a step, and of a message through a pipe."""
    async with open_environment(NAME) as environment:
        await environment.reset(None, 0)
        through = [await _seconds(environment) for _ in range(num_steps)]
    ours, theirs = multiprocessing.Pipe()
    echo = multiprocessing.get_context("fork").Process(target=_echo, args=(theirs,))
    echo.start()
    bare = [_message_seconds(ours) for _ in range(num_steps)]
    ours.send(None)
    echo.join()
    step_us, pipe_us = 1e6 * statistics.median(through), 1e6 * statistics.median(bare)
    return {"step_us": round(step_us, 1), "pipe_us": round(pipe_us, 1), "ratio": round(step_us / pipe_us, 2)}


def _echo(connection: Connection) -> None:
    while (message := connection.recv()) is not None:
        connection.send(message)


def _message_seconds(connection: Connection) -> float:
    started = time.perf_counter()
    connection.send("step go")
    connection.recv()
    return time.perf_counter() - started


async def _seconds(environment: EnvironmentHandle) -> float:
    started = time.perf_counter()
    await environment.step("go")
    return time.perf_counter() - started


async def starts(num_environments: int) -> dict[str, float]:
    """Return seconds of the start of the host and of the environments, the median of one alone, and MiB of each."""
    hosts = EnvironmentHosts(Path.cwd(), max_environments=num_environments)
    pids: list[int] = []
    begun = asyncio.Event()

    async def rollout() -> None:
        with environments_of_rollout(hosts, EnvironmentLimits()):
            async with open_environment(NAME) as environment:
                await environment.reset(None, 0)
                pids.append(0)
                if len(pids) == num_environments:
                    begun.set()
                await begun.wait()

    async def alone() -> float:
        started = time.perf_counter()
        with environments_of_rollout(hosts, EnvironmentLimits()):
            async with open_environment(NAME) as environment:
                await environment.reset(None, 0)
                return time.perf_counter() - started

    try:
        host_s = await alone()
        one_s = statistics.median([await alone() for _ in range(20)])
        started = time.perf_counter()
        rollouts = [asyncio.create_task(rollout()) for _ in range(num_environments)]
        await begun.wait()
        all_s = time.perf_counter() - started
        [host] = [each for each in psutil.Process().children() if "rftcore.environments.host" in each.cmdline()]
        sizes = [each.memory_full_info().uss for each in host.children()]
        await asyncio.gather(*rollouts)
    finally:
        await asyncio.to_thread(hosts.close)
    return {
        "host_start_s": round(host_s, 2),
        "one_start_ms": round(1e3 * one_s, 1),
        "starts_s": round(all_s, 3),
        "environment_mib": round(statistics.median(sizes) / 2**20, 1),
    }


def main(arguments: Sequence[str]) -> int:
    """Measure, and write the result as JSON."""
    parser = argument_parser("environments", __doc__)
    parser.add_argument("--steps", type=integer(1), default=20_000, help="number of steps")
    parser.add_argument("--environments", type=integer(1), default=64, help="number of environments started together")
    options = parser.parse_args(arguments)
    write(options, {**asyncio.run(steps(options.steps)), **asyncio.run(starts(options.environments))})
    return 0
