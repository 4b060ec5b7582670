"""Runs commands and reads and writes files for the caller, as long as the session lives. A command that takes too long is ended, the session is not."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import resource
import select
import shutil
import signal
import stat
import subprocess
import time
from typing import IO, Any

from rftcore.sandbox.inner.plain_values import read_message, write_message

FOLDER = os.path.dirname(os.path.abspath(__file__))

LONGEST_POLL = 2**31 - 1  # milliseconds
LONGEST_PATH = 4096
START = os.getcwd()
STATE = os.path.join(FOLDER, ".shell")
SHELL = shutil.which("bash") or "/bin/sh"
# Variables and the current folder are kept from command to command.
SCRIPT = """
[ -f "$RFT_STATE/exports" ] && . "$RFT_STATE/exports"
cd "$(cat "$RFT_STATE/folder" 2>/dev/null || echo .)" 2>/dev/null
trap 'export -p > "$RFT_STATE/exports"; pwd > "$RFT_STATE/folder"' EXIT
eval "$1"
"""


def shell(message: dict[str, Any]) -> dict[str, Any]:
    """Run a command; its output is read until it ends, not until what it left in the background does."""
    environment = {**os.environ, "RFT_STATE": STATE}
    arguments = [SHELL, "-c", SCRIPT, "shell", message["command"]]
    process = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: limit_processor_time(message["cpu_s"]),
    )
    assert process.stdout is not None
    output, most = bytearray(), message["most_bytes"]
    reads, ends = process.stdout.fileno(), os.pidfd_open(process.pid)
    os.set_blocking(reads, False)
    until, missing = time.monotonic() + message["timeout_s"], 0
    poll = select.poll()
    poll.register(reads, select.POLLIN)
    poll.register(ends, select.POLLIN)
    has_ended = timed_out = False
    while not (has_ended or timed_out):
        found = dict(poll.poll(min(LONGEST_POLL, max(0.0, 1000 * (until - time.monotonic())))))
        timed_out, has_ended = not found or time.monotonic() > until, ends in found
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(reads, 1 << 20)
        if not data and reads in found:
            poll.unregister(reads)
        taken = data[: most - len(output)]
        output += taken
        missing += len(data) - len(taken)
    if timed_out:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    os.close(ends)
    process.stdout.close()
    return {
        "code": None if timed_out else process.wait(),
        "output": base64.b64encode(output).decode(),
        "missing": missing,
    }


def limit_processor_time(seconds: int) -> None:
    """Limit a command, and what it starts, but not this server, which lives longer."""
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    hard = seconds + 1 if most == resource.RLIM_INFINITY else min(seconds + 1, most)
    resource.setrlimit(resource.RLIMIT_CPU, (min(seconds, hard), hard))


def read(message: dict[str, Any]) -> dict[str, Any]:
    """Return the beginning of a file."""
    folder = START if message["from_start"] else current_folder()
    with open_file(os.path.join(folder, message["path"]), os.O_RDONLY) as file:
        data = file.read(message["most_bytes"] + 1)
    return {"data": base64.b64encode(data).decode()}


def write(message: dict[str, Any]) -> dict[str, Any]:
    """Write a file, and make its folder."""
    path = os.path.join(current_folder(), message["path"])
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open_file(path, os.O_WRONLY | os.O_CREAT) as file:
        file.truncate(0)
        file.write(base64.b64decode(message["data"]))
    return {}


def open_file(path: str, flags: int) -> IO[bytes]:
    """Open a regular file; another, such as a pipe, could stop this server."""
    number = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    file = os.fdopen(number, "rb" if flags == os.O_RDONLY else "wb")
    if not stat.S_ISREG(os.fstat(number).st_mode):
        file.close()
        raise OSError(f"not a regular file: {path!r}")
    return file


def current_folder() -> str:
    """Return the folder in which the next command begins."""
    try:
        with open_file(os.path.join(STATE, "folder"), os.O_RDONLY) as file:
            return os.fsdecode(file.read(LONGEST_PATH)).rstrip("\n")
    except OSError:
        return START


def main() -> None:
    """Answer messages until they end."""
    reads, writes = os.fdopen(3, "rb"), os.fdopen(4, "wb")
    os.set_inheritable(3, False)
    os.set_inheritable(4, False)
    os.makedirs(STATE, exist_ok=True)
    while (data := read_message(reads)) is not None:
        message = json.loads(data)
        try:
            answer = {"shell": shell, "read": read, "write": write}[message["do"]](message)
        except (OSError, ValueError) as error:
            answer = {"error": str(error)[:2000]}
        write_message(writes, json.dumps(answer).encode())


if __name__ == "__main__":
    main()
