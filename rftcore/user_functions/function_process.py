"""A separate process for plain functions of the user: one call after the other, ended when a call takes too long.

Even a call inside C code that never returns can be ended. The functions run in the process's main thread, because some libraries
(such as math-verify with its signal alarms) work in no other.

The child starts a timer of faulthandler before each call. The timer does not need the interpreter; it writes the
stack and ends the process. The parent reads the stack, reports it, and starts another process for the next call.

Several calls travel in one message, and each answer in its own: the parent reads all that have come at once, and knows which call ended
the process. A thread that waits for the interpreter's lock once for each answer would wait longer than a quick function takes. The child
takes a token from a pipe before each call. If a call takes long, the parent takes the tokens of those behind it, so that another process
can have them, and leaves one token that ends the message.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from rftcore.failures import (
    FunctionFailedError,
    InfrastructureError,
    as_traceback,
    describe,
    dumped_frames,
    user_frames,
    user_line,
    user_stack,
)
from rftcore.parent_process import end_with_parent
from rftcore.user_functions.messages import Messages
from rftdata.errors import RftError
from rftdata.processes import await_exit, kill_group
from rftdata.user_code import held_lock_timer

_START_S = 120.0
_GRACE_S = 5.0
_WITHDRAW_S = 0.3
_CALL, _END = b"c", b"e"  # tokens
_MOST_TOKENS = 1024


@dataclass(frozen=True)
class Functions:
    """The functions of a process, which loads them itself.

    Attributes:
        kind: what they are, for messages, such as "reward".
        load: returns the functions by name. It is a function of a module, and is called in the process. The functions return plain values that
            can be sent to another process, or raise.
        names: functions as named in the configuration: texts, or records that `load` takes.
        base_dir: folder of the configuration file.
    """

    kind: str
    load: Callable[[list[Any], Path], Mapping[str, Callable[..., Any]]]
    names: list[Any]
    base_dir: Path


@dataclass(frozen=True)
class TimeLimit:
    """The longest time of a call.

    Attributes:
        setting: the setting with that value, for messages.
    """

    seconds: float
    setting: str


class Question(NamedTuple):
    """A call of a function.

    Attributes:
        what: the call, for messages.
        arguments: pickled.
    """

    name: str
    what: str
    limit: TimeLimit
    arguments: bytes

    @classmethod
    def of(cls, name: str, what: str, limit: TimeLimit, *arguments: object) -> Question:
        """Return the call of a function with these arguments; raise if they cannot be sent to another process."""
        return cls(name, what, limit, pickle.dumps(arguments))


class Answer(NamedTuple):
    """The outcome of a call.

    Attributes:
        value: the result, or the error, an Exception.
        seconds: that the call took.
    """

    value: Any
    seconds: float


class Answers(NamedTuple):
    """Answers to the next calls of a message.

    Attributes:
        num_withdrawn: calls at the end of the message that were not begun, and get no answer.
    """

    answers: list[Answer]
    num_withdrawn: int = 0


class FunctionProcess:
    """The parent's side, for one thread at a time. The thread that creates it must live as long as the process.

    Attributes:
        usable: whether it can be called; false after a call that exceeded its limit or ended the process.
    """

    usable = True

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._stacks = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - lives as long as the process
        self._tokens, self._give = os.pipe()
        os.set_blocking(self._tokens, False)
        self._num_answered = 0
        fds = (theirs.fileno(), self._stacks.fileno(), self._tokens)
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
        # A process that a function started may keep the socket open.
        self._pidfd = os.pidfd_open(self._process.pid)
        self._messages = Messages(ours, self._pidfd)

    def load(self, functions: Functions) -> None:
        """Load the functions; called once, before the first call.

        Raises:
            RftError: a function cannot be loaded.
            FunctionFailedError: the process does not start.
        """
        self._send((os.getpid(), functions))
        limit = TimeLimit(_START_S, f"{_START_S:g} s")
        [answer] = self._read(limit, f"loading the {functions.kind} functions", most=1)
        self._num_answered = 1
        if isinstance(answer.value, Exception):
            raise answer.value

    def is_alive(self) -> bool:
        """Return whether the process has not ended since the last call."""
        return not await_exit(self._process, 0.0)

    def call(self, questions: Sequence[Question]) -> Iterator[Answers]:
        """Yield the answers to questions, in their order, as they come. Errors are answers.

        If a call takes longer than 0.3 s, those behind it are withdrawn. After one that took too long or ended the process, with a
        FunctionFailedError as its answer, those behind it are withdrawn, too, and this object is unusable.
        """
        os.write(self._give, _CALL * len(questions))
        self._send((self._num_answered, questions))
        num_answered, num_asked = 0, len(questions)
        while num_answered < num_asked:
            if num_asked - num_answered > 1 and not self._messages.wait(_WITHDRAW_S) and (num := self._withdraw()):
                num_asked -= num
                yield Answers([], num)
            question = questions[num_answered]
            answers = self._read(question.limit, question.what, most=num_asked - num_answered)
            num_answered += len(answers)
            self._num_answered += len(answers)
            yield Answers(answers, 0 if self.usable else num_asked - num_answered)
            if not self.usable:
                return

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
        for file in (self._tokens, self._give, self._pidfd):
            os.close(file)

    def _withdraw(self) -> int:
        """Take back the calls that have not begun; return their number."""
        try:
            num = len(os.read(self._tokens, _MOST_TOKENS))
        except BlockingIOError:
            return 0
        os.write(self._give, _END)
        return num

    def _send(self, question: object) -> None:
        try:
            self._messages.send(question)
        except OSError:  # the process has ended, which the wait for its answer finds
            return

    def _read(self, limit: TimeLimit, what: str, *, most: int) -> list[Answer]:
        """Return the next answers, at least one; if the process does not answer, its failure."""
        patience_s = limit.seconds + _GRACE_S
        try:
            return [
                self._answer(data, number, what)
                for number, data in enumerate(self._messages.receive(patience_s, most), self._num_answered)
            ]
        except TimeoutError:
            outcome = "silent"
        except (EOFError, OSError):
            outcome = "ended"
        if self.is_alive() and outcome == "ended":
            await_exit(self._process, _GRACE_S)  # its exit code is more informative than our signal
        self.kill()
        return [Answer(self._failure(what, limit.setting, self._process.wait(), outcome), patience_s)]

    @staticmethod
    def _answer(data: bytes, number: int, what: str) -> Answer:
        """Return an answer.

        Raises:
            EOFError: it belongs to another call.
        """
        try:
            found, value, seconds = pickle.loads(data)
        except Exception as error:  # noqa: BLE001 - an error of the user's may have parts that exist in its process only
            return Answer(FunctionFailedError(f"what {what} raised cannot be read here: {describe(error)}", ""), 0.0)
        if found != number:
            raise EOFError
        return Answer(value, seconds)

    def _failure(self, what: str, limit: str, code: int, outcome: str) -> FunctionFailedError:
        """Describe why the process ended: its timer ended it and wrote the stack, or a signal ended it."""
        self._stacks.seek(0)
        dumped = self._stacks.read().decode(errors="replace")
        frames = user_frames(dumped_frames(dumped, __file__))
        if dumped.startswith("Timeout") or outcome == "silent":
            text = f"{what} took longer than {limit}{user_line(frames)}"
            return FunctionFailedError(text, as_traceback(frames, text), timed_out=True)
        how = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
        text = f"{what} ended its process with {how}{user_line(frames)}"
        return FunctionFailedError(text, as_traceback(frames, text))


def main(socket_fd: int, stacks_fd: int, tokens_fd: int) -> None:
    """Run the child: answer calls until the parent closes the connection."""
    messages = Messages(socket.socket(fileno=socket_fd))
    with open(stacks_fd, "wb", buffering=0) as stacks:
        faulthandler.enable(stacks)
        parent, given = pickle.loads(messages.receive(None, 1)[0])
        end_with_parent(parent)
        functions = _load(messages, given)
        held_lock_timer.hand_over()  # from here on the timer is that of the calls
        while True:
            try:
                number, questions = pickle.loads(messages.receive(None, 1)[0])
            except (EOFError, ConnectionResetError):
                return
            for place, question in enumerate(questions):
                if _token(tokens_fd) != _CALL:
                    break
                started = time.monotonic()
                value = _answer(functions[question.name], question, stacks)
                messages.send((number + place, value, time.monotonic() - started))


def _token(tokens_fd: int) -> bytes:
    """Wait for the next token, and take it; empty if the parent has closed. The parent does not block when it takes tokens, and the pipe is the same."""
    while True:
        try:
            return os.read(tokens_fd, 1)
        except BlockingIOError:
            poll = select.poll()
            poll.register(tokens_fd, select.POLLIN)
            poll.poll()


def _load(messages: Messages, given: Functions) -> Mapping[str, Callable[..., Any]]:
    try:
        functions = given.load(given.names, given.base_dir)
    except RftError as error:
        messages.send((0, error, 0.0))
        raise SystemExit(1) from error
    messages.send((0, 0.0, 0.0))
    return functions


def _answer(function: Callable[..., Any], question: Question, stacks: IO[bytes]) -> Any:
    process = os.getpid()
    faulthandler.dump_traceback_later(question.limit.seconds, exit=True, file=stacks)
    try:
        found = function(*pickle.loads(question.arguments))
    except BaseException as error:  # noqa: BLE001 - the boundary: errors of a user's code are data
        found = error
    if os.getpid() != process:
        _end_fork(found)
    faulthandler.cancel_dump_traceback_later()
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0.0)  # a limit of the function's own must not reach the next call
    if not isinstance(found, BaseException):
        return found
    if isinstance(found, RftError) and found.can_be_sent():
        return found
    if isinstance(found, InfrastructureError):
        return InfrastructureError(describe(found))
    return FunctionFailedError(describe(found), user_stack(found))


def _end_fork(found: object) -> NoReturn:
    """End a process that a function has forked, and that has left the function: as a program would, without an answer."""
    code: object = 0
    if isinstance(found, SystemExit):
        code = found.code
    elif isinstance(found, BaseException):
        traceback.print_exception(found)
        code = 1
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
