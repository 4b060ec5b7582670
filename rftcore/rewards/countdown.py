"""The numbers game countdown: an arithmetic expression of given numbers that equals a target.

    - countdown
    - {name: countdown, use: at_most_once, partial: 0.1}

1 if the expression equals the target and uses the numbers as `use` says. `partial` if it is an expression of the given numbers with another value.
Else 0: other numbers, other operations than + − × ÷ and brackets, a division by zero, no expression, a response that was cut off.

The expression is the text in the last `<answer>…</answer>`, else all of the response after its thoughts. `= 24` at its end may repeat the target. The
expression is parsed, never evaluated as code, and computed with fractions.

Numbers and target come from the task's metadata, as reasoning_gym's `countdown` and the data set Countdown-Tasks-3to4 have them: `numbers` or `nums`, and
`target` (else the task's answer).
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field

from rftcore.rewards.answer_text import final_text
from rftcore.workflows.task import Task, Turn
from rftdata.errors import RftError

_EXPRESSION = re.compile(r"[\d\s()+*/-]{1,400}")
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")"})


def countdown(
    turn: Turn,
    task: Task,
    *,
    tag: str | None = "answer",
    use: Literal["exactly_once", "at_most_once"] = "exactly_once",
    partial: Annotated[float, Field(ge=0, le=1)] = 0.0,
) -> float:
    """Return the reward of the expression.

    Args:
        tag: name of tags around the expression; without them it is all of the response after its thoughts.
        use: whether each number must be used, or may be left out.
        partial: reward of an expression of the given numbers with another value.

    Raises:
        RftError: the task has no numbers or no target.
    """
    numbers, target = _given(task)
    text, equals, end = final_text(turn, tag).translate(_SIGNS).partition("=")
    try:
        value, used = evaluated(text)
        repeated = evaluated(end)[0] if equals else target
    except (ValueError, ZeroDivisionError):
        return 0.0
    fits = used == numbers if use == "exactly_once" else used <= numbers
    if not fits or not used:
        return 0.0
    return 1.0 if value == target == repeated else partial


def evaluated(text: str) -> tuple[Fraction, Counter[int]]:
    """Return the value of an arithmetic expression, and how often it uses each whole number.

    Raises:
        ValueError: it is none.
        ZeroDivisionError: it divides by zero.
    """
    if not _EXPRESSION.fullmatch(text):
        raise ValueError("other signs, or too many")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("no expression") from error
    used: Counter[int] = Counter()
    return _value(tree.body, used), used


def _value(node: ast.AST, used: Counter[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left, used), _value(node.right, used))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    raise ValueError("an operation that is not allowed")


def _given(task: Task) -> tuple[Counter[int], Fraction]:
    """Return the numbers and the target of a task.

    Raises:
        RftError: it lacks them, or they are not numbers.
    """
    numbers = task.metadata.get("numbers", task.metadata.get("nums"))
    target = task.metadata.get("target", task.answer)
    try:
        given = json.loads(numbers) if isinstance(numbers, str) else numbers
        if not given:
            raise ValueError("no numbers")
        return Counter(_whole(number) for number in given), Fraction(str(target))
    except (ValueError, TypeError) as error:
        raise RftError(
            f"the task {task.task_key!r} of {task.taskset!r} is no countdown",
            value={"numbers": numbers, "target": target},
            allowed="whole numbers in its metadata as numbers or nums, and a number as target or as its answer",
            todo="correct the task, or use another reward for its taskset",
        ) from error


def _whole(number: object) -> int:
    """Return a whole number, also from a text.

    Raises:
        ValueError: it is none.
    """
    exact = Fraction(str(number))
    if exact.denominator != 1:
        raise ValueError("not a whole number")
    return exact.numerator


countdown.runs_in_explorer = True  # type: ignore[attr-defined]  # functions declare no attributes; expressions are short
