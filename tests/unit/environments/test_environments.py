"""Environments run in processes that end with their rollout; whatever they do is an outcome with its reason."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from rftcore.environments import (
    EnvironmentFailedError,
    EnvironmentHandle,
    EnvironmentHosts,
    EnvironmentLimits,
    InfrastructureError,
    check_environment,
    environments_of_rollout,
    load_environment,
    open_environment,
)
from rftdata.errors import ConfigError, RftError
from rftdata.processes import process_lives
from tests.support.waiting import PATIENCE_S

HERE = Path(__file__).parent
ACTING = "./acting.py:Acting"
LIMITS = EnvironmentLimits(step_timeout_s=1.0, close_s=0.5)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def hosts(loop: asyncio.Runner) -> Iterator[EnvironmentHosts]:
    hosts = EnvironmentHosts(HERE, max_environments=20)
    yield hosts
    hosts.close()


@pytest.fixture
def run(loop: asyncio.Runner, hosts: EnvironmentHosts) -> Callable[[Callable[[], Awaitable[object]]], object]:
    """Run a test's coroutine as a rollout."""

    def run(test: Callable[[], Awaitable[object]]) -> object:
        async def rollout() -> object:
            with environments_of_rollout(hosts, LIMITS):
                return await test()

        return loop.run(rollout())

    return run


@asynccontextmanager
async def begun(name: str = ACTING, **args: object) -> AsyncIterator[EnvironmentHandle]:
    async with open_environment(name, args) as environment:
        await environment.reset("task", 7)
        yield environment


def test_an_episode_takes_its_actions_in_a_process_of_its_own(run):
    async def test():
        async with open_environment(ACTING, {"limit": 2}) as environment:
            first = await environment.reset("task", 7)
            one, two = await environment.step("a"), await environment.step("b", "other")
            pid = int(one.observation.text.split()[1])
            assert pid != os.getpid() and process_lives(pid)
            with pytest.raises(RftError, match="called after the end of the episode"):
                await environment.step("c")
        await until(lambda: not process_lives(pid))
        return first, one, two

    first, one, two = run(test)
    assert (first.state, one.state, one.observation.state, two.reward) == ("0", "1", "1", 1.0)
    assert not one.ended and two.terminated and two.next_role == "agent"


def test_an_episode_in_uvloop_which_ray_s_processes_use():
    async def test():
        async with open_environment(ACTING, base_dir=HERE) as environment:
            await environment.reset("task", 7)
            return await environment.step("a")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(test()).observation.state == "1"


def test_hundreds_that_are_asked_for_and_end_at_once_are_all_reported(tmp_path):
    # More requests and reports than a socket holds: neither side may wait for the other to read.
    (tmp_path / "gone.py").write_text(
        "import os\nfrom rftcore.environments import Environment\n"
        "class Gone(Environment):\n    def __init__(self):\n        os._exit(3)\n"
    )

    async def one(hosts):
        with (
            environments_of_rollout(hosts, EnvironmentLimits()),
            pytest.raises(EnvironmentFailedError, match="exit code 3 in its"),
        ):
            async with open_environment("./gone.py:Gone"):
                raise AssertionError("not reached")

    async def test():
        hosts = EnvironmentHosts(tmp_path, max_environments=400)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(one(hosts) for _ in range(400)))
        await asyncio.to_thread(hosts.close)

    asyncio.run(test())


def test_equal_seeds_begin_alike_though_random_is_global(run):
    async def first(seed):
        async with open_environment(ACTING) as environment:
            return (await environment.reset("task", seed)).text

    async def test():
        return await asyncio.gather(first(1), first(2), first(1))

    one, two, three = run(test)
    assert one == three != two


@pytest.mark.parametrize(
    ("action", "error", "text"),
    [
        ("exits", EnvironmentFailedError, "ended its process with exit code 3 in step 1"),
        ("quits", EnvironmentFailedError, r"SystemExit: 4 \(acting.py, line \d+, in quits\)"),
        ("crashes", EnvironmentFailedError, r"signal 11 \(Segmentation fault\) in step 1 \(acting.py, line \d+, in crashes\)"),
        ("hangs", EnvironmentFailedError, r"longer than step_timeout_s = 1 s in step 1 \(acting.py, line \d+, in hangs\)"),
        ("is_killed", InfrastructureError, "killed by the system in step 1, which may lack memory"),
        ("loses_its_connection", InfrastructureError, "ConnectionResetError: the server is gone"),
        ("raises_what_has_no_text", EnvironmentFailedError, "WithoutTextError, whose message cannot be written"),
        ("returns_nothing", EnvironmentFailedError, r"step returned nothing \(None\); allowed: a Step"),
        ("returns_nan", EnvironmentFailedError, "returned nan, which is not finite, as the reward"),
        ("returns_a_number", EnvironmentFailedError, "an Observation whose text is 7 of type int"),
        ("names_another_role", EnvironmentFailedError, "named 'third' .*allowed: its roles: agent, other"),
        ("is_huge", EnvironmentFailedError, "an observation of 1,000,001 characters"),
        ("has_an_object", EnvironmentFailedError, "returned an info that is not JSON"),
    ],
)  # fmt: skip
def test_what_an_environment_does_wrong_is_its_error(run, action, error, text):
    async def test():
        async with begun() as environment:
            with pytest.raises(error, match=text) as raised:
                await environment.step(action)
        assert not isinstance(raised.value, EnvironmentFailedError) or raised.value.timed_out == (action == "hangs")
        if action in ("quits", "crashes", "hangs"):
            assert f"in {action}\n" in raised.value.stack

    run(test)


def test_an_error_in_reset_has_the_users_stack(run):
    async def test():
        async with begun(broken="raises"):
            raise AssertionError

    with pytest.raises(EnvironmentFailedError, match="failed in reset: ValueError: no episode for task") as raised:
        run(test)
    assert 'raise ValueError(f"no episode' in raised.value.stack


def test_ten_megabytes_of_output_are_cut(capfd):
    async def test():
        async with open_environment(ACTING, base_dir=HERE) as environment:
            await environment.reset("task", 7)
            return (await environment.step("prints")).observation.text

    assert asyncio.run(test()) == "printed"
    printed = capfd.readouterr().err
    assert ("prints more; it is left out" in printed, len(printed) < 100_000) == (True, True)


def test_outside_rollouts_an_environment_has_its_own_host():
    async def test():
        async with open_environment(ACTING, base_dir=HERE) as environment:
            await environment.reset("task", 1)
            return int((await environment.step("a")).observation.text.split()[1])

    assert not process_lives(asyncio.run(test()))


def test_processes_that_an_environment_starts_end_with_it(run):
    async def test():
        async with begun() as environment:
            text = (await environment.step("leaves_processes")).observation.text
            assert (await environment.step("forks_and_returns")).observation.text == "forked"
        pids = [int(pid) for pid in text.split()]
        await until(lambda: not any(process_lives(pid) for pid in pids))

    run(test)


def test_a_cancelled_rollout_leaves_no_process_even_if_close_hangs(run, hosts):
    async def test():
        pids = []

        async def rollout():
            async with begun(broken="close") as environment:
                pids.append(int((await environment.step("a")).observation.text.split()[1]))
                await environment.step("hangs")

        task = asyncio.create_task(rollout())
        await until(lambda: pids)
        started = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - started < 0.3
        await until(lambda: not process_lives(pids[0]))

    run(test)


def test_a_step_after_a_cancelled_one_gets_its_own_result(run):
    async def test():
        async with begun() as environment:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await environment.step("is_slow")
            one, two = await environment.step("one"), await environment.step("two")
            return one.observation.text.split()[0], two.observation.text.split()[0]

    assert run(test) == ("one", "two")


def test_a_free_place_is_waited_for_and_a_second_environment_of_a_rollout_waits_for_none(loop):
    async def test():
        hosts, running, most = EnvironmentHosts(HERE, max_environments=2), 0, 0

        async def rollout():
            nonlocal running, most
            with environments_of_rollout(hosts, LIMITS):
                async with begun(), begun():
                    running += 1
                    most = max(most, running)
                    await asyncio.sleep(0.05)
                    running -= 1

        await asyncio.gather(*(rollout() for _ in range(5)))
        assert most == 2
        await asyncio.to_thread(hosts.close)

    loop.run(test())


def test_an_async_environment_runs_in_the_event_loop_with_the_same_limits(run):
    async def test():
        name = "./acting.py:AsyncActing"
        async with open_environment(name) as environment:
            assert environment.deterministic
            assert (await environment.reset("task", 7)).text == f"{os.getpid()}"
            assert (await environment.step("ends")).terminated
        for action, text in (
            ("hangs", r"longer than step_timeout_s = 1 s in step 1 \(acting.py, line \d+, in step\)"),
            ("raises", r"KeyError: 'raises' \(acting.py"),
            ("returns_none", r"step returned nothing \(None\) as the reward"),
        ):
            async with begun(name) as environment:
                with pytest.raises(EnvironmentFailedError, match=text):
                    await environment.step(action)

    run(test)


def test_the_end_of_the_host_is_not_the_environments_error_and_another_one_starts(run, hosts):
    async def test():
        async with begun() as environment:
            parent = int(
                Path(f"/proc/{(await environment.step('a')).observation.text.split()[1]}/stat").read_text().split()[3]
            )
            os.kill(parent, 9)
            with pytest.raises(InfrastructureError, match=r"host process .* ended with signal 9"):
                await environment.step("hangs")
        async with begun() as environment:
            assert (await environment.step("a")).reward == 1.0

    run(test)


KILLED = """
import asyncio, os, sys, time
from pathlib import Path
from rftcore.environments import open_environment

async def main():
    async with open_environment("./acting.py:Acting", base_dir=Path(sys.argv[1])) as environment:
        await environment.reset("task", 1)
        own = (await environment.step("a")).observation.text.split()[1]
        text = (await environment.step("leaves_processes")).observation.text
        if (fork := os.fork()) == 0:  # it holds what the explorer has open
            time.sleep(1000)
        print(fork, own, text, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_killed_explorer_leaves_no_process():
    with subprocess.Popen([sys.executable, "-c", KILLED, str(HERE)], stdout=subprocess.PIPE, text=True) as explorer:
        assert explorer.stdout is not None
        fork, *pids = [int(pid) for pid in explorer.stdout.readline().split()]
        assert len(pids) == 3 and all(process_lives(pid) for pid in pids)
        explorer.kill()
        try:
            asyncio.run(until(lambda: not any(process_lives(pid) for pid in pids)))
        finally:
            os.kill(fork, signal.SIGKILL)


def test_names_and_arguments_are_checked():
    assert check_environment(ACTING, {"limit": 4}, HERE) is load_environment(ACTING, HERE)
    with pytest.raises(ConfigError, match=r"does not accept its environment_args.*allowed: limit, broken"):
        check_environment(ACTING, {"limits": 4}, HERE)
    with pytest.raises(ConfigError, match="is a function and not a class"):
        load_environment("./test_environments.py:begun", HERE)
    with pytest.raises(ConfigError, match="unknown environment"):
        load_environment("frozen_lak")


async def until(condition: Callable[[], object], patience_s: float = 10.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
