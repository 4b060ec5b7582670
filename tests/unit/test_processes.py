"""Whether a process has ended, seen from another one."""

from __future__ import annotations

import builtins
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rftdata.processes import await_exit, has_ended, pid_space


def test_a_process_whose_file_under_proc_may_not_be_opened_counts_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the mount option hidepid=1, for processes of other users."""

    def refused(file: Any, *args: Any, **kwargs: Any) -> Any:
        if file == f"/proc/{os.getppid()}/stat":
            raise PermissionError(1, os.strerror(1), file)
        return opened(file, *args, **kwargs)

    opened = builtins.open
    monkeypatch.setattr(builtins, "open", refused)
    assert not has_ended(socket.gethostname(), os.getppid(), pid_space(), 1)


def test_the_end_of_a_child_is_noticed_by_a_process_with_many_open_files() -> None:
    """As a role that reads a thousand segments; `select` takes no number above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    files = []
    try:
        while not files or files[-1] < 1100:
            files.append(os.open(os.devnull, os.O_RDONLY))
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
            assert not await_exit(child, 0.0)
            child.kill()
            assert await_exit(child, 60.0) and child.returncode is None
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# In a container, where the next number can be chosen: a child ends and its exit code is taken, then a stranger gets its number.
REUSED = """
import os, subprocess
from pathlib import Path

def reuse(pid):
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
    stranger = subprocess.Popen(["cat"], start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert stranger.pid == pid, (stranger.pid, pid)
    return stranger
"""
ENDED_CHILD = """
from rftdata.processes import await_exit, kill_group

child = subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!"], stdout=subprocess.PIPE, start_new_session=True)
started = int(child.stdout.readline())
assert await_exit(child, 60.0) and child.returncode is None
kill_group(child)  # what it started still has its group
child.wait()
os.waitpid(started, 0)  # an orphan, whose group has this number until then
"""
FUNCTION_PROCESS = """
from rftcore.failures import FunctionFailedError
from rftcore.user_functions.function_process import FunctionProcess, Functions, Question, TimeLimit
from rftcore.explorer.reward_functions import load_checked
from rftcore.workflows.task import Task, Turn

Path("ends.py").write_text("import os\\ndef score(turn, task): os._exit(3)\\n")
scorer = FunctionProcess()
scorer.load(Functions("reward", load_checked, ["./ends.py:score"], Path.cwd()))
child = scorer._process
questions = [Question.of("./ends.py:score", "a call", TimeLimit(60.0, "60 s"), Turn([], "2", "stop", None), Task(1, "a", "b", "", None))]
[([answer], _)] = scorer.call(questions)
assert isinstance(answer.value, FunctionFailedError) and "exit code 3" in str(answer.value), answer.value
"""


@pytest.mark.parametrize(
    ("ends", "kills"),
    [(ENDED_CHILD, "kill_group(child)"), (FUNCTION_PROCESS, "scorer.close()")],
    ids=["child", "function"],
)
def test_a_kill_after_the_end_does_not_reach_the_next_process_of_that_number(
    ends: str, kills: str, tmp_path: Path
) -> None:
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    lives = "assert stranger.communicate(b'lives')[0] == b'lives', 'a stranger was killed'"
    program = f"{REUSED}{ends}\nstranger = reuse(child.pid)\n{kills}\n{lives}\n"
    container = ["unshare", *as_root, "--pid", "--fork", "--kill-child", "--mount-proc"]
    done = subprocess.run([*container, sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    if done.stderr.startswith("unshare:"):
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
