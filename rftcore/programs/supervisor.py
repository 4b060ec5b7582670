"""Runs one program, and ends it with all that it has started. A script of its own, which needs only the standard library and imports nothing else.

Its standard input is the connection to the explorer: first a line of JSON that describes the program, then its end asks for the end of the program.
Its standard output is the report, a line of JSON, once everything has ended. Processes that leave their session become children of this one, and are
killed, too. What the program prints is read all the time, and the end of it is kept.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import Any

_KEPT_BYTES = 65536
_DRAIN_S = 0.5
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class _Tail:
    """The end of what a program has printed."""

    def __init__(self) -> None:
        self.data = b""
        self.num_bytes = 0

    def add(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self.data = (self.data + data)[-_KEPT_BYTES:]

    def text(self) -> str:
        return self.data.decode(errors="replace")


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def _end_with_supervisor() -> None:
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _end_all(program: subprocess.Popen[bytes]) -> int:
    """Kill the program and all that is left of what it has started; return its exit code."""
    if program.returncode is None:
        try:
            os.killpg(program.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            program.kill()
    code = program.wait()
    while True:  # a killed process may leave children to this one
        for child in _children():
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return code


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(number) for number in file.read().split()]
    except OSError:
        return []


def _run(spec: dict[str, Any]) -> dict[str, Any]:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        program = subprocess.Popen(
            spec["argv"],
            cwd=spec["cwd"],
            env=spec["env"],
            stdin=subprocess.PIPE if spec["input"] else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=spec["files"],
            start_new_session=True,
            preexec_fn=_end_with_supervisor,
        )
    except (OSError, ValueError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    for file in spec["files"]:
        os.close(file)
    tails = _watch(program, spec["input"].encode(), spec["explorer"])
    code = _end_all(program)
    return {
        "code": code,
        "stdout": tails[0].text(),
        "stderr": tails[1].text(),
        "num_bytes": [tail.num_bytes for tail in tails],
    }


def _watch(program: subprocess.Popen[bytes], given: bytes, explorer: int) -> list[_Tail]:
    """Pass on the program's input and read its output, until it ends or the explorer asks for its end."""
    assert program.stdout is not None
    assert program.stderr is not None
    tails = [_Tail(), _Tail()]
    ends, asks = os.pidfd_open(program.pid), os.pidfd_open(explorer)
    with selectors.PollSelector() as selector:
        for file, tail in ((program.stdout.fileno(), tails[0]), (program.stderr.fileno(), tails[1])):
            os.set_blocking(file, False)
            selector.register(file, selectors.EVENT_READ, tail)
        for file in (ends, asks, 0):
            selector.register(file, selectors.EVENT_READ)
        if program.stdin is not None:
            os.set_blocking(program.stdin.fileno(), False)
            selector.register(program.stdin, selectors.EVENT_WRITE)
        until: float | None = None
        while until is None or time.monotonic() < until:
            found = selector.select(None if until is None else max(0.0, until - time.monotonic()))
            if not found:
                break
            for key, _ in found:
                if key.fd in (asks, 0):
                    return tails
                if key.fd == ends:  # what it has printed may still be in the pipes
                    selector.unregister(ends)
                    until = time.monotonic() + _DRAIN_S
                elif isinstance(key.data, _Tail):
                    data = _read(key.fd)
                    if data == b"":
                        selector.unregister(key.fd)
                    key.data.add(data or b"")
                else:
                    given = _write(program, given, selector)
            if until is not None and not any(isinstance(key.data, _Tail) for key in selector.get_map().values()):
                break
    return tails


def _read(file: int) -> bytes | None:
    try:
        return os.read(file, _KEPT_BYTES)
    except BlockingIOError:
        return None


def _write(program: subprocess.Popen[bytes], given: bytes, selector: selectors.BaseSelector) -> bytes:
    assert program.stdin is not None
    try:
        given = given[os.write(program.stdin.fileno(), given[:_KEPT_BYTES]) :]
    except BlockingIOError:
        return given
    except BrokenPipeError:
        given = b""
    if not given:
        selector.unregister(program.stdin)
        program.stdin.close()
    return given


def _first_line() -> bytes:
    """Return the first line of the standard input; the explorer sends nothing after it."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(0, 1 << 20)
        if not data:
            sys.exit(1)
        line += data
    return line


if __name__ == "__main__":
    report = _run(json.loads(_first_line()))
    sys.stdout.write(json.dumps(report) + "\n")
