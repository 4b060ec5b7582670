r"""Mathematical equivalence, by the package math-verify (github.com/huggingface/Math-Verify).

    - math_verify
    - {name: math_verify, tag: answer, decimals: 4}

1 if the answer of the response is mathematically equal to the task's: `\frac{1}{2}`, `0.5` and `\boxed{2/4}` are, sets in another order are, `12 cm` and `12`
are. The answer is the last `\boxed{…}`, else the last formula, else the last number. 0 if it is another one, if none can be read, if the comparison takes
longer than `seconds`, or if the response was cut off.

The task's answer is LaTeX or a plain number; of an answer with `####` (GSM8K), what follows it. An answer that cannot be read is an error, because no response
could be right.

math-verify limits its time by signal alarms, which work in the main thread only. Rewards run there, in a process of their own.
"""

from __future__ import annotations

import importlib.util
import logging
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field

from rftcore.rewards.answer_text import final_text
from rftcore.workflows.task import Task, Turn
from rftdata.errors import PluginError, RftError


class MathVerify:
    """A reward of 1 for an equivalent answer.

    Args:
        tag: name of tags around the answer; without them the whole response after its thoughts is searched.
        decimals: decimal places in which numbers are compared.
        seconds: longest time of reading an expression, and of one comparison.

    Raises:
        PluginError: math-verify is not installed.
    """

    needs_answer = True

    def __init__(
        self,
        *,
        tag: str | None = "answer",
        decimals: Annotated[int, Field(ge=0, le=50)] = 6,
        seconds: Annotated[int, Field(ge=1)] = 3,
    ) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise PluginError(
                "the package math-verify is not installed",
                todo="pip install 'rftdata[train]', or 'math-verify[antlr4_13_2]'",
            )
        self._tag, self._decimals, self._seconds = tag, decimals, seconds
        self._read = lru_cache(maxsize=4096)(
            self._expressions
        )  # of right answers, which each rollout of a group asks for

    def __call__(self, turn: Turn, task: Task) -> float:
        """Return 1 or 0.

        Raises:
            RftError: the task has no answer that can be read.
        """
        from math_verify import verify

        right = self._right(task)
        answer = self._expressions(final_text(turn, self._tag))
        return float(
            bool(answer) and verify(right, answer, float_rounding=self._decimals, timeout_seconds=self._seconds)
        )

    def _right(self, task: Task) -> list[Any]:
        text = (task.answer or "").rpartition("####")[2].strip()
        # Without marks of a formula, math-verify would take the last number of LaTeX for the answer.
        right = self._read(text if "\\boxed" in text or "$" in text else f"\\boxed{{{text}}}") if text else []
        if not right:
            raise RftError(
                f"the answer of the task {task.task_key!r} of {task.taskset!r} is no mathematical expression",
                value=task.answer,
                allowed="LaTeX or a number",
                todo="correct the task, or use another reward for its taskset",
            )
        return right

    def _expressions(self, text: str) -> list[Any]:
        """Return a text's final expression in the forms that math-verify compares; none if there is none."""
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

        for name in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # a wrong answer is no warning
        # 0: a box comes before any other formula.
        kinds = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
        found: list[Any] = parse(text, kinds, parsing_timeout=self._seconds)
        return found
