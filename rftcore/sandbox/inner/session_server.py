"""Runs commands and reads and writes files for the caller, as long as the session lives. A command that takes too long is ended, the session is not."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from typing import Any

from rftcore.sandbox.inner.plain_values import read_message, write_message

FOLDER = os.path.dirname(os.path.abspath(__file__))

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
        found = dict(poll.poll(max(0.0, 1000 * (until - time.monotonic()))))
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
    return {"code": None if timed_out else process.wait(), "output": text(output), "missing": missing}


def read(message: dict[str, Any]) -> dict[str, Any]:
    """Return the beginning of a file."""
    with open(os.path.join(current_folder(), message["path"]), "rb") as file:
        data = file.read(message["most_bytes"] + 1)
    return {"data": base64.b64encode(data).decode()}


def write(message: dict[str, Any]) -> dict[str, Any]:
    """Write a file, and make its folder."""
    path = os.path.join(current_folder(), message["path"])
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as file:
        file.write(base64.b64decode(message["data"]))
    return {}


def current_folder() -> str:
    """Return the folder in which the next command begins."""
    try:
        with open(os.path.join(STATE, "folder"), encoding="utf-8") as file:
            return file.read().rstrip("\n")
    except OSError:
        return START


def text(data: bytes | bytearray) -> str:
    """Return output as text."""
    return data.decode(errors="replace")


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
            answer = {"error": str(error)}
        write_message(writes, json.dumps(answer).encode())


if __name__ == "__main__":
    main()
