"""The tools `shell`, `read_file` and `write_file`: a sandbox for each rollout, which lives as long as the rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from rftcore.failures import InfrastructureError
from rftcore.sandbox.actions import action_of, action_schema
from rftcore.sandbox.kinds import open_sandbox
from rftcore.sandbox.session import SandboxSession, SessionEndedError, SessionError
from rftcore.tools.observations import cut_in_the_middle
from rftcore.tools.outcome import Outcome, failed
from rftcore.tools.rollout_sessions import RolloutSessions
from rftcore.tools.settings import SandboxEntry, ToolLimits
from rftcore.tools.tool import ToolContext, valid_name

_T = TypeVar("_T")
_FILES = "files"
_MOST_THREADS = 512  # each waits for the command of one rollout


class SandboxServer:
    """Opens the sandboxes of an entry.

    Args:
        base_dir: folder of the configuration file.

    Raises:
        ConfigError: this machine offers no sandbox, and `unsafe_local` is not set.
    """

    is_shared = False

    def __init__(self, entry: SandboxEntry, base_dir: Path) -> None:
        self.entry = entry
        self._sandbox = open_sandbox(entry.sandbox, base_dir)
        self._threads = ThreadPoolExecutor(_MOST_THREADS, "sandbox")

    @property
    def tools(self) -> list[SandboxTool]:
        """Its tools."""
        return [SandboxTool(self, name) for name in self.entry.tools]

    async def session(self) -> RolloutSandbox:
        """Return the sandbox of a rollout, which starts with its first call."""
        return RolloutSandbox(self)

    def opened(self, task: Any) -> SandboxSession:
        """Start a sandbox.

        Raises:
            SandboxFailedError: it cannot be made.
        """
        files = getattr(task, "metadata", {}).get(_FILES)
        texts = {str(path): str(text) for path, text in files.items()} if isinstance(files, dict) else {}
        return SandboxSession(self._sandbox, self.entry.sandbox, session_s=self.entry.session_s, files=texts)

    async def in_thread(self, function: Callable[..., _T], *arguments: object) -> _T:
        """Return what a function returns that waits for a sandbox."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def close(self) -> None:
        """End all sandboxes."""
        self._sandbox.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


class RolloutSandbox:
    """The sandbox of one rollout."""

    def __init__(self, server: SandboxServer) -> None:
        self._server = server
        self._session: SandboxSession | None = None
        self._lock = asyncio.Lock()

    async def perform(self, name: str, arguments: dict[str, Any], task: Any) -> str:
        """Perform an action.

        Raises:
            SessionError, SessionEndedError: the model's doing.
            SandboxFailedError: the sandbox cannot be made.
        """
        action = action_of(name, arguments)
        async with self._lock:
            if self._session is None:
                self._session = await self._server.in_thread(self._server.opened, task)
            return await self._server.in_thread(action.perform, self._session)

    def close_soon(self) -> None:
        """End the sandbox. A call that runs in a thread fails."""
        if self._session is not None:
            self._session.close()


class SandboxTool:
    """One tool of a sandbox."""

    takes_context = True  # calls of an answer run in its order

    def __init__(self, server: SandboxServer, action: str) -> None:
        self._server, self._action = server, action
        self.limits: ToolLimits = server.entry
        self.name = valid_name(server.entry.prefix + action)
        self.schema = action_schema(action, server.entry.prefix)

    async def call(self, arguments: dict[str, Any], context: ToolContext, sessions: RolloutSessions) -> Outcome:
        """Perform the action; see `BoundTool.call`."""
        sandbox: RolloutSandbox = await sessions.of(self._server)
        limit = asyncio.timeout(self.limits.timeout_s)
        try:
            async with limit:
                text = await sandbox.perform(self._action, arguments, context.task)
        except TimeoutError:
            sandbox.close_soon()  # its thread waits for an answer
            return failed(
                "timeout", f"the tool took longer than {self.limits.timeout_s:g} s, and the sandbox was ended"
            )
        except SessionError as error:
            return failed("exception", str(error))
        except SessionEndedError as error:
            return failed("crash", str(error))
        except InfrastructureError as error:
            return Outcome("", "exception", infrastructure=str(error))
        return Outcome(cut_in_the_middle(text, self.limits.max_chars))
