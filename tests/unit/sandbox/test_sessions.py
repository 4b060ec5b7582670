"""A shell and files for the time of a rollout: as a session, as tools, and as an environment."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rftcore.environments import open_environment
from rftcore.sandbox.config import SandboxConfig
from rftcore.sandbox.local import LocalSandbox
from rftcore.sandbox.program import Channel, ProgramEndedError
from rftcore.sandbox.session import SandboxSession, SessionEndedError, SessionError
from rftcore.tools.calls import ToolCall
from rftcore.tools.tool_boxes import ToolSettings, open_tools
from rftcore.workflows.task import Task
from rftdata.errors import ConfigError, RftError
from tests.support.sandboxes import sandbox_here, strongest_level_here
from tests.support.waiting import PATIENCE_S, wait_until

CONFIG = SandboxConfig(wall_s=PATIENCE_S)
SANDBOX = {"wall_s": PATIENCE_S}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[LocalSandbox]:
    with sandbox_here(CONFIG) as opened:
        yield opened


def test_a_shell_keeps_folder_variables_files_and_what_runs_in_the_background(sandbox: LocalSandbox) -> None:
    session = SandboxSession(sandbox, CONFIG, session_s=3e6, files={"data/words.txt": "one two\n"})
    try:
        assert session.shell("cat data/words.txt; cd data; export N=5; false").output == "one two\n"
        assert session.shell("pwd; echo $N; exit 7") == session.shell("pwd; echo $N; exit 7")
        result = session.shell("echo $N >&2; exit 7")
        assert (result.code, result.output, result.num_missing_bytes) == (7, "5\n", 0)
        assert session.shell("sleep 1000 & echo begun").output == "begun\n"
        assert session.shell("sleep 1000", timeout_s=0.5).code is None
        session.write_file("new/code.py", "print(6 * 7)")
        assert session.shell("python3 new/code.py || echo 42").output == "42\n"
        assert session.read_file("../data/new/code.py") == b"print(6 * 7)"
        flood = session.shell("head -c 3000000 /dev/zero")
        assert (len(flood.output), flood.num_missing_bytes) == (CONFIG.output_bytes, 3_000_000 - CONFIG.output_bytes)
        with pytest.raises(SessionError, match="No such file"):
            session.read_file("nothing")
        files = session.shell(
            "ulimit -t; mkfifo pipe; for n in 3 4 5 6 7 8 9; do (: >&$n) 2>/dev/null && echo open; done; true"
        )
        assert files.output == f"{CONFIG.cpu_s}\n", "a command has a limit of its own, and no file of the server"
        with pytest.raises(SessionError, match="not a regular file"):
            session.read_file("pipe")
        with pytest.raises(SessionError, match="No such device"):
            session.write_file("pipe", "text")
    finally:
        session.close()
    with pytest.raises(SessionEndedError):
        session.shell("true")


def test_a_session_that_its_code_ends_or_that_lives_too_long_is_over(sandbox: LocalSandbox) -> None:
    session = SandboxSession(sandbox, CONFIG, session_s=PATIENCE_S)
    with pytest.raises(SessionEndedError, match="the sandbox has ended"):
        session.shell("kill -9 $PPID; sleep 10")
    short = SandboxSession(sandbox, CONFIG, session_s=1)
    time.sleep(1.5)
    with pytest.raises(SessionEndedError):
        short.shell("true")
    with pytest.raises(RftError, match="leads out of the sandbox's working folder"):
        SandboxSession(sandbox, CONFIG, session_s=1, files={"../x": ""})


def test_a_channel_that_is_closed_keeps_its_files_while_a_thread_uses_them() -> None:
    (reads, others_write), (others_read, writes) = os.pipe(), os.pipe()
    channel = Channel(reads, writes)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(channel.receive, time.monotonic() + PATIENCE_S)
        wait_until(lambda: channel._num_users == 2, "it reads")
        channel.close()
        os.fstat(reads)
        os.close(others_write)
        assert isinstance(received.exception(), ProgramEndedError)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(reads)
    with pytest.raises(ProgramEndedError, match="it has ended"):
        channel.send({}, time.monotonic())
    os.close(others_read)


def test_tools_share_the_sandbox_of_a_rollout_and_no_other(sandbox: LocalSandbox) -> None:
    settings = ToolSettings([{"sandbox": SANDBOX, "prefix": "box_", "timeout_s": PATIENCE_S}])

    async def two_rollouts() -> list[list[str]]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        task = Task(1, "set", "one", "?", None, {"files": {"a.txt": "text"}})
        found = []
        for name in ("first", "second"):
            async with open_tools(settings, task) as tools:
                names = [schema["function"]["name"] for schema in tools.box.schemas]
                assert names == ["box_shell", "box_read_file", "box_write_file"]
                calls = [
                    ToolCall("box_shell", {"command": f"ls; touch {name}; cat a.txt"}, 1),
                    ToolCall("box_shell", {"command": "ls"}, 2),
                    ToolCall("box_read_file", {"path": "nothing"}, 3),
                    ToolCall("box_shell", {"line": "ls"}, 4),
                ]
                release = threading.Event()
                others = loop.run_in_executor(None, release.wait, PATIENCE_S)  # they take all threads of the loop
                found.append([result.text for result in await tools.run(calls)])
                assert not others.done()
                release.set()
        return found

    first, second = asyncio.run(two_rollouts())
    assert first[:2] == ["exit code 0\na.txt\ntext", "exit code 0\na.txt\nfirst\n"]
    assert second[:2] == ["exit code 0\na.txt\ntext", "exit code 0\na.txt\nsecond\n"]
    assert "No such file" in first[2]
    assert "command: Field required" in first[3]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"sandbox": {"wall": 1}}, "an entry of tools is not valid: sandbox.wall"),
        ({"sandbox": {"wall_s": 60}}, r"timeout_s \(30\) is less than sandbox.wall_s \(60\)"),
        ({"sandbox": {}, "tools": ["python"]}, "an entry of tools is not valid: tools.0"),
        ({"sandbox": {}, "tool": "./x.py:f"}, "neither a function nor an MCP server nor a sandbox"),
    ],
)
def test_an_entry_that_is_not_valid_is_refused(entry: dict[str, Any], message: str, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        ToolSettings([entry]).box(tmp_path)


def test_an_environment_grades_what_the_policy_leaves() -> None:
    strongest_level_here()
    task = Task(1, "set", "one", "Write f.", None, {"files": {"notes.txt": "square"}, "tests": ["assert f(3) == 9"]})

    async def play(*actions: Any) -> Any:
        async with open_environment("sandbox", {"sandbox": SANDBOX, "max_steps": 4}) as opened:
            first = await opened.reset(task, 1)
            assert first.text == "Write f."
            for action in actions:
                step = await opened.step(action)
            return step

    async def episodes() -> list[Any]:
        look = ToolCall("shell", {"command": "cat notes.txt; grep -rs 'f(3)' /work /tmp /etc | head"}, 1)
        write = ToolCall("write_file", {"path": "solution.py", "text": "def f(x): return x * x"}, 2)
        cheat = ToolCall("shell", {"command": "ln -s /etc/passwd solution.py"}, 3)
        leave = ToolCall("shell", {"command": "cd /tmp"}, 4)
        return [
            await play(look, write, leave, "Done."),
            await play(look, cheat, look, look),
            await play("Done."),
            await play(look),
        ]

    right, cheated, nothing, open_ = asyncio.run(episodes())
    assert (right.reward, right.terminated, right.info["failures"]) == (1.0, True, [])
    assert (cheated.reward, cheated.terminated) == (0.0, True), "after max_steps the file is graded as it is"
    assert nothing.reward == 0.0
    assert "No such file" in nothing.info["error"]
    assert (open_.terminated, open_.observation.text) == (False, "exit code 0\nsquare")
