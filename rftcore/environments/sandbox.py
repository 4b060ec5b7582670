"""A task of programming in a sandbox: the policy has a shell and files, and what it leaves is graded by unit tests.

The episode ends with an answer without a call of a tool, or after `max_steps` actions. Then the file `solution` is read, and graded in fresh
sandboxes by the task's tests, which the session never contains (`rftcore.sandbox.grading`). A task without tests gets its reward from the reward
functions.

The task's metadata may contain `files` (texts by path, which are there at the beginning), `tests` and `entry_point`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rftcore.environments.base import Environment, Observation, Step
from rftcore.sandbox.actions import ACTIONS, action_of, action_schema
from rftcore.sandbox.config import SandboxConfig
from rftcore.sandbox.grading.forms import UnitTests, unit_tests
from rftcore.sandbox.grading.grade import grade
from rftcore.sandbox.kinds import open_sandbox
from rftcore.sandbox.session import SandboxSession, SessionEndedError, SessionError
from rftdata.config_errors import parse_section
from rftdata.errors import ConfigError


class SandboxTask(Environment):
    """A sandbox for each episode.

    Args:
        solution: path of the file that is graded.
        max_steps: actions after which the episode ends, and the file is graded as it is.
        session_s: seconds after which the sandbox is ended.
        max_chars: longest observation; a longer one is cut in the middle.
        total_s: seconds for grading, below explorer.step_timeout_s.
        sandbox: how the code is confined, and its limits; `wall_s` is that of a command, and of a test.
    """

    tools = tuple(action_schema(name) for name in ACTIONS)

    def __init__(
        self,
        solution: str = "solution.py",
        max_steps: int = 30,
        session_s: float = 3600.0,
        max_chars: int = 4096,
        total_s: float = 20.0,
        sandbox: Mapping[str, Any] | None = None,
    ) -> None:
        if max_steps < 1 or session_s <= 0 or max_chars < 100 or total_s <= 0:
            raise ConfigError(
                "environment_args of sandbox",
                allowed="max_steps of 1 or more, max_chars of 100 or more, session_s and total_s above 0",
            )
        self.solution, self.max_steps, self.session_s = solution, max_steps, session_s
        self.max_chars, self.total_s = max_chars, total_s
        self.config = parse_section(SandboxConfig, sandbox or {}, within="environment_args.sandbox")
        self._sandbox = open_sandbox(self.config)
        self._session: SandboxSession | None = None
        self._tests: UnitTests | None = None
        self._num_steps = 0

    def reset(self, task: Any, seed: int) -> Observation:
        metadata = getattr(task, "metadata", {})
        if metadata.get("tests") is not None:
            self._tests = unit_tests(metadata["tests"], metadata.get("entry_point"))
        files = metadata.get("files") or {}
        self._session = SandboxSession(self._sandbox, self.config, session_s=self.session_s, files=files)
        return Observation(str(task.prompt))

    def step(self, action: Any, role: str = "agent") -> Step:
        self._num_steps += 1
        assert self._session is not None, "reset comes first"
        if isinstance(action, str):
            return self._end("")
        try:
            text = action_of(action.name, action.arguments).perform(self._session)
        except SessionError as error:
            text = f"Error: {error}"
        except SessionEndedError as error:
            return Step(Observation(str(error)), 0.0, terminated=True, info={"error": str(error)})
        if len(text) > self.max_chars:
            half = self.max_chars // 2
            text = f"{text[:half]}\n[{len(text) - self.max_chars} characters left out]\n{text[-half:]}"
        return Step(Observation(text)) if self._num_steps < self.max_steps else self._end(text)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._sandbox.close()

    def _end(self, text: str) -> Step:
        """Grade the solution."""
        if self._tests is None:
            return Step(Observation(text), terminated=True)
        assert self._session is not None
        try:
            code = self._session.read_file(self.solution, from_start=True).decode(errors="replace")
        except (SessionError, SessionEndedError) as error:
            return Step(Observation(text), 0.0, terminated=True, info={"error": str(error)})
        self._session.close()
        outcomes = grade(self._sandbox, self.config, code, self._tests, all_needed=True, total_s=self.total_s)
        failures = [f"{outcome.name}: {outcome.failure}" for outcome in outcomes if not outcome.passed]
        reward = 0.0 if failures else 1.0
        return Step(Observation(text), reward, terminated=True, info={"failures": failures[:10]})
