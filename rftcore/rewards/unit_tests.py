"""Unit tests of the code in a response, run in sandboxes.

    - unit_tests
    - {name: unit_tests, tests: cases, entry_point: function, score: fraction, sandbox: {wall_s: 20}}

1 if the code passes all tests of the task, else 0; with `score: fraction` the part that it passes. The code is the last block of the response between ``` and
```, or all of it if it has none. A response that was cut off gets 0, as does code that exceeds a limit.

Tests are Python code, inputs and outputs of a program, or arguments and results of a function (`rftcore.sandbox.grading.forms`). The code can neither read them
nor the expected results: `rftcore.sandbox.grading` says how.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field

from rftcore.rewards.answer_text import final_text
from rftcore.sandbox.config import SandboxConfig
from rftcore.sandbox.grading.forms import UnitTests as Tests
from rftcore.sandbox.grading.forms import unit_tests
from rftcore.sandbox.grading.grade import grade
from rftcore.sandbox.kinds import open_sandbox
from rftcore.workflows.task import Task, Turn
from rftdata.config import Section
from rftdata.errors import RftError

_FENCE, _LANGUAGE = "```", re.compile(r"[\w+-]*")


class UnitTests:
    """A reward for passing unit tests.

    Raises:
        ConfigError: this machine offers no sandbox, and `unsafe_local` is not set.
    """

    class Config(Section):
        """Arguments of the reward."""

        tests: str = Field("tests", description="Column of the tests; without it, the task's answer.")
        entry_point: str = Field(
            "entry_point", description="Column of the name of the function that is tested, where tests need it."
        )
        score: Literal["all", "fraction"] = Field(
            "all", description="1 for passing all tests, or the part that passes."
        )
        total_s: float = Field(
            40.0,
            gt=0,
            description="Seconds for all tests of a response, below explorer.reward_timeout_s; those left then have failed.",
        )
        sandbox: SandboxConfig = Field(SandboxConfig(), description="How the code is confined, and its limits.")

    def __init__(self, config: Config, base_dir: Path | None = None) -> None:
        self._config = config
        self._sandbox = open_sandbox(config.sandbox, base_dir)

    @property
    def sandbox_tier(self) -> str:
        """What confines the code."""
        return self._sandbox.tier

    def __call__(self, turn: Turn, task: Task) -> float:
        """Return the reward.

        Raises:
            RftError: the task has no tests, or they have no known form.
            SandboxFailedError: a sandbox could not be made.
        """
        tests = self._tests(task)
        code = code_of(final_text(turn, None))
        if not code.strip():
            return 0.0
        all_needed = self._config.score == "all"
        outcomes = grade(
            self._sandbox, self._config.sandbox, code, tests, all_needed=all_needed, total_s=self._config.total_s
        )
        passed = sum(outcome.passed for outcome in outcomes)
        return float(passed == len(outcomes)) if all_needed else passed / len(outcomes)

    def _tests(self, task: Task) -> Tests:
        value = task.metadata.get(self._config.tests, task.answer)
        try:
            return unit_tests(value, task.metadata.get(self._config.entry_point))
        except RftError as error:
            raise error.about(f"the task {task.task_key!r} of {task.taskset!r}") from error


def code_of(text: str) -> str:
    """Return the last block of code in a text, or all of it without one."""
    last: list[str] | None = None
    block: list[str] | None = None
    for line in text.split("\n"):
        language = _fence_language(line)
        if block is None:
            block = None if language is None else []
        elif language == "":
            last, block = block, None
        else:
            block.append(f"{line}\n")
    return text if last is None else "".join(last)


def _fence_language(line: str) -> str | None:
    """Return the language of a line that begins or ends a block of code; None for other lines."""
    fence = line.lstrip(" ")
    if len(line) - len(fence) > 3 or not fence.startswith(_FENCE):
        return None
    language = fence.removeprefix(_FENCE).strip(" \t\r")
    return language if _LANGUAGE.fullmatch(language) else None
