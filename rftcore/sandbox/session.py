"""`SandboxSession`: a shell and files in a sandbox, for as long as a rollout needs them."""

from __future__ import annotations

import base64
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rftcore.sandbox.config import SandboxConfig
from rftcore.sandbox.program import Program, ProgramEndedError, Sandbox

_INNER = Path(__file__).parent / "inner"
_FILES = {
    f".rft/rftcore/sandbox/inner/{name}.py": (_INNER / f"{name}.py").read_bytes()
    for name in ("session_server", "plain_values")
}
_ANSWER_S = 10.0
_LARGEST_FILE = 1 << 20
_LARGEST_OUTPUT = 1 << 21  # in base64 it fits into a message


class SessionEndedError(Exception):
    """The session has ended: by a limit, or because its code ended it."""


class SessionError(Exception):
    """A file could not be read or written; its text is for the model."""


@dataclass(frozen=True)
class ShellResult:
    """The outcome of a command.

    Attributes:
        code: its exit code; None if it took too long.
        output: standard output and standard error, in the order in which they came.
        num_missing_bytes: of output that is left out.
    """

    code: int | None
    output: str
    num_missing_bytes: int


class SandboxSession:
    """A session; for any thread, one call after the other.

    Args:
        config: limits; `wall_s` is that of a command.
        session_s: seconds after which the session is killed.
        files: texts of its files at the beginning, by relative path.

    Raises:
        SandboxFailedError: it cannot be made.
        RftError: a path leads out of the working folder.
    """

    def __init__(
        self, sandbox: Sandbox, config: SandboxConfig, *, session_s: float, files: Mapping[str, str] | None = None
    ) -> None:
        self._config = config
        self._lock = threading.Lock()
        contents = {path: text.encode() for path, text in (files or {}).items()}
        arguments = ["{python}", "-I", "-c", _BOOT, "{work}/.rft"]
        cpu_s = max(config.cpu_s, math.ceil(session_s))  # of the server; commands have a limit of their own
        limits = replace(config.limits, wall_s=session_s, cpu_s=cpu_s)
        self._running = sandbox.start(Program(arguments, {**contents, **_FILES}, has_channel=True, limits=limits))
        self._has_ended = False

    def shell(self, command: str, timeout_s: float | None = None) -> ShellResult:
        """Run a command in the shell. The current folder, exported variables and files are kept for the next one.

        Args:
            timeout_s: at most `wall_s` of the configuration.

        Raises:
            SessionEndedError: the session has ended.
        """
        limit = min(timeout_s or self._config.wall_s, self._config.wall_s)
        most = min(self._config.output_bytes, _LARGEST_OUTPUT)
        message = {"do": "shell", "command": command, "timeout_s": limit, "most_bytes": most}
        answer = self._asked({**message, "cpu_s": self._config.cpu_s}, limit)
        code, missing = answer.get("code"), answer.get("missing")
        if not (isinstance(code, int | None) and isinstance(missing, int)):
            raise self._ended("it sent no valid answer")
        return ShellResult(code, self._bytes(answer, "output").decode(errors="replace"), missing)

    def read_file(self, path: str, *, from_start: bool = False) -> bytes:
        """Return a file of up to 1 MiB.

        Args:
            path: relative to the current folder.
            from_start: whether it is relative to the folder in which the session began, whatever its commands did since.

        Raises:
            SessionError: it cannot be read.
            SessionEndedError: the session has ended.
        """
        message = {"do": "read", "path": path, "most_bytes": _LARGEST_FILE, "from_start": from_start}
        data = self._bytes(self._asked(message, 0), "data")
        if len(data) > _LARGEST_FILE:
            raise SessionError(f"{path} has more than {_LARGEST_FILE} bytes")
        return data

    def write_file(self, path: str, text: str) -> None:
        """Write a file, and make its folder; see `read_file`."""
        if len(text) > _LARGEST_FILE:
            raise SessionError(f"a file may have {_LARGEST_FILE} characters")
        data = base64.b64encode(text.encode(errors="replace")).decode()
        self._asked({"do": "write", "path": path, "data": data}, 0)

    def close(self) -> None:
        """Kill all that runs in it. Called in any thread, at any time."""
        self._has_ended = True
        self._running.close()

    def _asked(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        with self._lock:
            if self._has_ended:
                raise SessionEndedError("the sandbox has ended")
            until = time.monotonic() + seconds + _ANSWER_S
            try:
                self._running.channel.send(message, until)
                answer = self._running.channel.receive(until)
            except (ProgramEndedError, OSError) as error:
                raise self._ended(str(error)) from error
        if not isinstance(answer, dict):
            raise self._ended("it sent no valid answer")
        if "error" in answer:
            raise SessionError(str(answer["error"]))
        return answer

    def _bytes(self, answer: dict[str, Any], name: str) -> bytes:
        try:
            return base64.b64decode(answer[name], validate=True)
        except (KeyError, TypeError, ValueError) as error:
            raise self._ended("it sent no valid answer") from error

    def _ended(self, why: str) -> SessionEndedError:
        self.close()
        return SessionEndedError(f"the sandbox has ended: {why}")


_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from rftcore.sandbox.inner.session_server import main; main()"
