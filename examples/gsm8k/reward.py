r"""The reward of GSM8K: 1 if the final answer is the right number.

The final answer stands in the last `\boxed{}`, else after the last `####`, else after the last "The answer is". Without any of them
there is no answer. It is compared as a number: `\$1{,}080.00`, `1,080 dollars` and `2160/2` are all 1080.
"""

from __future__ import annotations

import re
from fractions import Fraction

from rftcore.workflows.task import Task, Turn

_MARKS = (re.compile(r"####"), re.compile(r"the (?:final )?answer is:?", re.IGNORECASE))
_FRACTION = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\}|\\,|\\!)+(?=\d{3}(?!\d))")
_NUMBER = re.compile(r"(?:(?<![\d)])-)?\$?\s?(?:\d+(?:\.\d+)?|\.\d+)(?:\s?/\s?\d+)?")
_SENTENCE_END = re.compile(r"\.\s|\n")


def accuracy(turn: Turn, task: Task) -> float:
    """Return 1 if the response's final answer equals the task's answer, else 0."""
    found, wanted = final_answer(turn.response), number(task.answer or "")
    return float(found is not None and found == wanted)


accuracy.needs_answer = True  # type: ignore[attr-defined]  # tells `rft check` that every task must have an answer


def final_answer(response: str) -> Fraction | None:
    """Return the number that a response gives as its answer; None if it gives none."""
    boxed = _last_boxed(response)
    if boxed is not None:
        return number(boxed)
    for mark in _MARKS:
        places = list(mark.finditer(response))
        if places:
            return number(_SENTENCE_END.split(response[places[-1].end() :].strip())[0])
    return None


def number(text: str) -> Fraction | None:
    """Return the first number after the last equals sign of a text, without units and thousands separators; None without one."""
    plain = _FRACTION.sub(r"\1/\2", text.rpartition("=")[2]).replace("\\$", "$")
    found = _NUMBER.search(_THOUSANDS.sub("", plain))
    if found is None:
        return None
    numerator, _, denominator = re.sub(r"[\s$]", "", found[0]).partition("/")
    if denominator and not int(denominator):
        return None
    return Fraction(numerator) / Fraction(denominator or 1)


def _last_boxed(response: str) -> str | None:
    r"""Return the content of the last `\boxed{}`, which may contain braces; None without one that is closed."""
    start = response.rfind("\\boxed{")
    if start < 0:
        return None
    depth, content = 0, response[start + len("\\boxed") :]
    for place, character in enumerate(content):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return content[1:place]
    return None
