"""Questions about small databases, and demonstrations of queries: some first attempts answer another question, and are corrected."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from rftcore.environments.sql import Sql
from rftcore.environments.sql_questions import question
from rftcore.workflows.task import Task

LEVELS = (1, 2)


def questions(first: int, size: int, levels: tuple[int, ...] = LEVELS) -> Iterator[dict[str, Any]]:
    """Yield the questions of the seeds from `first` on. Every seed has a database of its own."""
    for seed in range(first, first + size):
        asked = question(seed, tuple(levels))
        yield {"task_key": str(seed), "question": asked.text, "answer": asked.query, "seed": seed}


def demonstrations(
    first: int, size: int, mistakes: float = 0.5, levels: tuple[int, ...] = LEVELS
) -> Iterator[dict[str, Any]]:
    """Yield chats with the environment, a share `mistakes` of them beginning with the query of another question about the same tables."""
    generator = random.Random(first)
    for row in questions(first, size, levels):
        queries = [row["answer"]]
        if generator.random() < mistakes:
            queries.insert(0, other_query(row["seed"], tuple(levels), generator))
        yield {"task_key": row["task_key"], "messages": chat(row, queries, list(levels))}


def other_query(seed: int, levels: tuple[int, ...], generator: random.Random) -> str:
    """Return the query of another question about tables of the same names."""
    tables, query = question(seed, levels).tables, question(seed, levels).query
    while True:
        other = question(generator.randrange(2**40), levels)
        if other.tables == tables and other.query != query:
            return other.query


def chat(row: dict[str, Any], queries: list[str], levels: list[int]) -> list[dict[str, str]]:
    """Return the dialogue with the environment, up to the query that it accepts."""
    environment = Sql(levels=levels)
    task = Task(0, "demonstrations", row["task_key"], row["question"], row["answer"], {"seed": row["seed"]})
    messages = [{"role": "user", "content": environment.reset(task, 0).text}]
    for query in queries:
        step = environment.step(query)
        messages.append({"role": "assistant", "content": query})
        if step.ended:
            break
        messages.append({"role": "user", "content": step.observation.text})
    environment.close()
    return messages
