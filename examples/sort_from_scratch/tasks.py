"""Sorting of digits: the answer to `372>` is `237`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


def numbers(
    size: int, noise: float = 0.0, seed: int = 0, min_digits: int = 3, max_digits: int = 5
) -> Iterator[dict[str, Any]]:
    """Yield questions with their answers, and demonstrations of which a share `noise` has one wrong digit.

    The split key is the sorted digits, so questions with the same answer stay in the same split.
    """
    generator = random.Random(seed)
    for _ in range(size):
        digits = [generator.choice("0123456789") for _ in range(generator.randint(min_digits, max_digits))]
        answer = "".join(sorted(digits))
        demonstration = list(answer)
        if generator.random() < noise:
            demonstration[generator.randrange(len(demonstration))] = generator.choice("0123456789")
        yield {
            "question": "".join(digits) + ">",
            "answer": answer,
            "demonstration": "".join(demonstration),
            "split_key": answer,
        }
