"""Synthesis of tasks and experiences: their parent rows, the requests to a model, and the parsing of its answers."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from operators.base import CreatedTask
from operators.llm.client import MalformedAnswer, Question, chat, finite, json_object
from operators.llm.endpoint import Chat
from operators.llm.templates import Template, question_of

SOURCE = "synthesis"
"""Value of `source` for a synthesised experience, and the key in a task's metadata."""
GENERATION = "generation"
"""Metric of a synthesised experience, and the key below `SOURCE` in a task's metadata."""

_FORM = 'Reply with a JSON object and nothing else: {"question": "…"'
TEMPLATES: Mapping[str, str] = {
    "rephrase": "Say the task below in other words, so that exactly the same answer is right. Leave nothing out, add nothing, do not solve it.\n\n"
    f"<task>\n{{question}}\n</task>\n\n{_FORM}}}",
    "harder": "Write a new task like the one below that is harder: more steps, or larger numbers. It must have one short right answer.\n\n"
    f'<task>\n{{question}}\n</task>\n<answer>\n{{answer}}\n</answer>\n\n{_FORM}, "answer": "…"}}',
    "easier": "Write a new task like the one below that is easier: fewer steps, or smaller numbers. It must have one short right answer.\n\n"
    f'<task>\n{{question}}\n</task>\n<answer>\n{{answer}}\n</answer>\n\n{_FORM}, "answer": "…"}}',
    "self_correct": "This answer is not right. Find the mistake, and give the whole answer again as you should have given it at first, "
    "without a word about the mistake.",
}
"""Default templates by kind, with {question} (the last user turn) and {answer}."""
_SOLVE = Template(
    'Solve the task. Reply with a JSON object and nothing else: {"answer": "…"}, the answer as short as can be.\n\n<task>\n{question}\n</task>',
    ["question"],
)


@dataclass(frozen=True)
class Parent:
    """A row from which something is created.

    Attributes:
        chat: the chat that the row's response answers.
        key: digest of the row and of the recipe.
    """

    place: int
    row: Mapping[str, Any]
    chat: Sequence[Mapping[str, Any]]
    metadata: Mapping[str, Any]
    generation: int
    key: str

    @property
    def question(self) -> str:
        return question_of(self.chat)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of an answer with this parent."""
        return {GENERATION: float(self.generation + 1)}

    def task(self, kind: str, taskset: str | None, made: Mapping[str, Any], number: int = 0) -> CreatedTask:
        """Return a task with this parent; `made` has prompt, answer, metadata, features."""
        origin = {"kind": kind, GENERATION: self.generation + 1, "parent_id": self.row["experience_id"]}
        payload = {
            "prompt": made["prompt"],
            "answer": made.get("answer"),
            "metadata": {**(made.get("metadata") or {}), SOURCE: origin},
        }
        name = kind.rpartition(":")[2]
        return CreatedTask(
            taskset or str(self.row["taskset"]),
            f"{SOURCE}-{name}-{self.key}" + (f"-{number}" if number else ""),
            payload,
            self.row["experience_id"],
            made.get("features") or {},
        )


def generation_of(row: Mapping[str, Any], metadata: Mapping[str, Any]) -> int:
    """Return how many syntheses led to this row; 0 for an original one.

    A synthesised answer has its own count, since it belongs to the task of its parent.
    """
    own = json.loads(row.get("metrics") or "null") if row.get("source") == SOURCE else None
    noted = own if own and GENERATION in own else metadata.get(SOURCE)
    generation = noted.get(GENERATION) if isinstance(noted, Mapping) else None
    if isinstance(generation, float):
        return int(generation)
    if isinstance(generation, int):
        return generation
    return 1 if row.get("source") == SOURCE else 0


def mean_rewards(rows: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Return the mean reward of each row's group; None if no row of it has one."""
    rewards: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row["reward"] is not None:
            rewards[row["group_id"]].append(row["reward"])
    means = {group: sum(values) / len(values) for group, values in rewards.items()}
    return [means.get(row["group_id"]) for row in rows]


def _object(*keys: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {key: {"type": "string"} for key in keys},
        "required": list(keys),
        "additionalProperties": False,
    }


def retelling(request: str, new_answer: bool) -> Question:
    """Ask for another task; the parsed value has its prompt and, with `new_answer`, its answer."""
    schema = _object("question", "answer") if new_answer else _object("question")
    return Question(chat(None, request, schema), lambda text: _read_retelling(text, new_answer))


def solving(prompt: str) -> Question:
    """Ask for the answer to a task."""
    return Question(chat(None, _SOLVE.fill({"question": prompt}), _object("answer")), _read_answer)


def correction(parent: Parent, request: str) -> Question:
    """Ask for the answer again, after the parent's own."""
    wrong = {"role": "assistant", "content": parent.row["response"] or ""}
    return Question(Chat([*parent.chat, wrong, {"role": "user", "content": request}]), _not_empty)


def _read_retelling(text: str, new_answer: bool) -> dict[str, str]:
    answer = json_object(text, "question") or {}
    question = answer.get("question")
    task = {"prompt": question.strip() if isinstance(question, str) else ""}
    if new_answer:
        task["answer"] = str(answer.get("answer") if answer.get("answer") is not None else "").strip()
    missing = [name for name, value in task.items() if not value]
    if missing:
        raise MalformedAnswer(f"it contains no {'question' if missing[0] == 'prompt' else 'answer'}")
    return task


def _read_answer(text: str) -> str:
    answer = json_object(text, "answer")
    if answer is None or answer["answer"] in (None, ""):
        raise MalformedAnswer("it contains no answer")
    return str(answer["answer"])


def _not_empty(text: str) -> str:
    if not text:
        raise MalformedAnswer("it is empty")
    return text


def same_answer(one: str, other: str) -> bool:
    """Return whether two short answers are equal, as numbers or as words."""
    plain = [" ".join(text.lower().replace(",", "").split()).strip(" .$") for text in (one, other)]
    left, right = finite(plain[0]), finite(plain[1])
    if left is not None and right is not None:
        return abs(left - right) <= 1e-9 * max(1.0, abs(left))
    return plain[0] == plain[1]
