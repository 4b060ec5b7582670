"""The tool of the example."""

from __future__ import annotations


async def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b
