"""Products of two numbers of three digits, and demonstrations: some with the calculator, others without."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from rftcore.tools import ToolCall
from rftcore.tools.formats import text

OFFER = "CALL multiply"  # the system message where the tool is offered; grpo.yaml has the same


def products(size: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield different questions with their answers. Both orders of two factors have the same split key."""
    generator, seen = random.Random(seed), set[tuple[int, int]]()
    while len(seen) < size:
        factors = generator.randint(100, 999), generator.randint(100, 999)
        if factors not in seen:
            seen.add(factors)
            yield {
                "question": f"{factors[0]}*{factors[1]}=",
                "answer": str(factors[0] * factors[1]),
                "split_key": f"{min(factors)}*{max(factors)}",
            }


def demonstrations(size: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield chats with right answers: in turn one with the tool, one without it although it is offered, and one in which it is not."""
    offer = {"role": "system", "content": OFFER}
    for number, task in enumerate(products(size, seed)):
        chat = [{"role": "user", "content": task["question"]}, {"role": "assistant", "content": task["answer"]}]
        if number % 3 == 0:
            a, b = map(int, task["question"].rstrip("=").split("*"))
            chat[1:1] = [
                {"role": "assistant", "content": text.render([ToolCall("multiply", {"a": a, "b": b})])},
                {"role": "user", "content": text.result("multiply", task["answer"])},
            ]
        yield {"messages": chat if number % 3 == 2 else [offer, *chat], "split_key": task["split_key"]}
