"""A separate process for reward functions: one call after the other, ended when a call takes too long.

A plain (not async) function may compute, wait or hang. Here it delays neither the explorer's event loops nor the engine,
and even a call inside C code that never returns can be ended. The functions run in the process's main thread, because some libraries
(such as math-verify with its signal alarms) work in no other.

The child starts a timer of faulthandler before each call. The timer does not need the interpreter; it writes the
stack and ends the process. The parent reads the stack, reports it, and starts another process for the next call.

Several calls travel in one message, and each answer in its own: the parent reads all that have come at once, and knows which call ended
the process. A thread that waits for the interpreter's lock once for each answer would wait longer than a quick function takes.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import os
import pickle
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from rftcore.explorer.failures import FunctionFailedError, as_traceback, describe, user_frames, user_line, user_stack
from rftcore.explorer.reward_value import CheckedValue, checked_value
from rftcore.parent_process import end_with_parent
from rftcore.rewards import Reward, load_rewards
from rftcore.workflows.task import Task, Turn
from rftdata.errors import RftError
from rftdata.processes import await_exit, kill_group
from rftdata.user_code import held_lock_timer

_START_S = 120.0
_GRACE_S = 5.0
_LENGTH = struct.Struct("!Q")
_READ_BYTES = 1 << 18
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')


class Question(NamedTuple):
    """A call of a reward.

    Attributes:
        arguments: the turn and the task, pickled.
    """

    name: str
    task_key: str
    arguments: bytes

    @classmethod
    def of(cls, name: str, turn: Turn, task: Task) -> Question:
        """Return the call of a reward with these arguments; raise if they cannot be sent to another process."""
        return cls(name, task.task_key, pickle.dumps((turn, task)))


class Answer(NamedTuple):
    """The outcome of a call.

    Attributes:
        value: the result, or the error.
        seconds: that the call took.
    """

    value: CheckedValue | Exception
    seconds: float


class RewardProcess:
    """The parent's side, for one thread at a time. The thread that creates it must live as long as the process.

    Attributes:
        usable: whether it can be called; false after a call that exceeded its limit or ended the process.
    """

    usable = True

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._messages = _Messages(ours)
        self._stacks = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - lives as long as the process
        fds = (theirs.fileno(), self._stacks.fileno())
        path = os.pathsep.join(folder for folder in sys.path if folder)
        # -P: a file in the current folder must not replace a module of the same name. A separate session, so that processes started by
        # a function end with it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, *map(str, fds)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        theirs.close()

    def load(self, names: list[str], base_dir: Path) -> None:
        """Load the functions; called once, before the first call.

        Args:
            names: rewards as named in the configuration.
            base_dir: folder of the configuration file.

        Raises:
            PluginError: a reward cannot be loaded.
            FunctionFailedError: the process does not start.
        """
        self._send((os.getpid(), names, base_dir))
        [answer] = self._read(_START_S, "loading the reward functions", f"{_START_S:g} s", most=1)
        if isinstance(answer.value, Exception):
            raise answer.value

    def is_alive(self) -> bool:
        """Return whether the process has not ended since the last call."""
        return not await_exit(self._process, 0.0)

    def call(self, questions: Sequence[Question], timeout_s: float, limit: str) -> Iterator[list[Answer]]:
        """Yield the answers to questions, in their order, as they come. Errors are answers.

        After a call that took too long or ended the process, with a FunctionFailedError as its answer, the questions behind it have
        none, no function has been called for them, and this object is unusable.

        Args:
            timeout_s: of each call.
            limit: the setting with that value, for messages.
        """
        self._send((timeout_s, questions))
        num_answered = 0
        while num_answered < len(questions) and self.usable:
            name, task_key, _ = questions[num_answered]
            what = f"the reward {name!r} on task {task_key!r}"
            answers = self._read(timeout_s + _GRACE_S, what, limit, most=len(questions) - num_answered)
            num_answered += len(answers)
            yield answers

    def kill(self) -> None:
        """End the process; a call in flight fails in the thread that waits for it."""
        self.usable = False
        kill_group(self._process)  # it outlives the process if a function started others

    def close(self) -> None:
        """End the process and everything it started, and release its resources."""
        self._messages.close()
        self.kill()
        self._process.wait()
        self._stacks.close()

    def _send(self, question: object) -> None:
        try:
            self._messages.send(question)
        except OSError:  # the process has ended, which the wait for its answer finds
            return

    def _read(self, patience_s: float, what: str, limit: str, *, most: int) -> list[Answer]:
        """Return the next answers, at least one; if the process does not answer, its failure."""
        try:
            return [Answer(*answer) for answer in self._messages.receive(patience_s, most)]
        except TimeoutError:
            outcome = "silent"
        except (EOFError, OSError):
            outcome = "ended"
        if self.is_alive() and outcome == "ended":
            await_exit(self._process, _GRACE_S)  # its exit code is more informative than our signal
        self.kill()
        return [Answer(self._failure(what, limit, self._process.wait(), outcome), 0.0)]

    def _failure(self, what: str, limit: str, code: int, outcome: str) -> FunctionFailedError:
        """Describe why the process ended: its timer ended it and wrote the stack, or a signal ended it."""
        self._stacks.seek(0)
        dumped = self._stacks.read().decode(errors="replace")
        frames = user_frames(_frames_of(dumped))
        if dumped.startswith("Timeout") or outcome == "silent":
            text = f"{what} took longer than {limit}{user_line(frames)}"
            return FunctionFailedError(text, as_traceback(frames, text), timed_out=True)
        how = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
        text = f"{what} ended its process with {how}{user_line(frames)}"
        return FunctionFailedError(text, as_traceback(frames, text))


def _frames_of(dumped: str) -> traceback.StackSummary:
    """Return the main thread's frames from faulthandler's output, outermost first."""
    threads = dumped.split("\n\n")
    # The user's own threads have no frame of this module.
    lines = next((thread for thread in threads if Path(__file__).name in thread), threads[-1]).splitlines()
    matches = [match for line in lines if (match := _FRAME.match(line))]
    return traceback.StackSummary.from_list([(m["file"], int(m["line"]), m["name"], None) for m in reversed(matches)])


class _Messages:
    """Pickled messages over a socket, for one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._read = bytearray()

    def send(self, message: object) -> None:
        data = pickle.dumps(message)
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, patience_s: float | None, most: int) -> list[Any]:
        """Return the messages that have come, at least one and at most so many.

        Raises:
            TimeoutError: none has come.
            EOFError: the other side has closed.
        """
        self._socket.settimeout(patience_s)
        found: list[Any] = []
        while not found:
            while len(found) < most and (data := self._take()) is not None:
                found.append(pickle.loads(data))
            if not found:
                read = self._socket.recv(_READ_BYTES)
                if not read:
                    raise EOFError
                self._read += read
        return found

    def _take(self) -> bytes | None:
        """Remove a whole message from what was read, and return it."""
        if len(self._read) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._read)[0]
        if len(self._read) < end:
            return None
        data = bytes(self._read[_LENGTH.size : end])
        del self._read[:end]
        return data

    def close(self) -> None:
        self._socket.close()


def main(socket_fd: int, stacks_fd: int) -> None:
    """Run the child: answer calls until the parent closes the connection."""
    messages = _Messages(socket.socket(fileno=socket_fd))
    with open(stacks_fd, "wb", buffering=0) as stacks:
        faulthandler.enable(stacks)
        [(parent, names, base_dir)] = messages.receive(None, 1)
        end_with_parent(parent)
        functions = _load(messages, names, base_dir)
        held_lock_timer.hand_over()  # from here on the timer is that of the calls
        while True:
            try:
                [(timeout_s, questions)] = messages.receive(None, 1)
            except (EOFError, ConnectionResetError):
                return
            for question in questions:
                started = time.monotonic()
                value = _answer(functions[question.name], question, timeout_s, stacks)
                messages.send((value, time.monotonic() - started))


def _load(messages: _Messages, names: list[str], base_dir: Path) -> dict[str, Reward]:
    try:
        functions = load_rewards(names, base_dir)
    except RftError as error:
        messages.send((error, 0.0))
        raise SystemExit(1) from error
    messages.send((0.0, 0.0))
    return functions


def _answer(function: Reward, question: Question, timeout_s: float, stacks: IO[bytes]) -> CheckedValue | Exception:
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=stacks)
    try:
        turn, task = pickle.loads(question.arguments)
        value = function(turn, task)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        return checked_value(question.name, value, task)
    except RftError as error:
        return error if error.can_be_sent() else FunctionFailedError(describe(error), user_stack(error))
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - the boundary: errors of a user's code are data
        return FunctionFailedError(describe(error), user_stack(error))
    finally:
        faulthandler.cancel_dump_traceback_later()


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
