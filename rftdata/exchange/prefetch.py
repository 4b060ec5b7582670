"""Iteration with a prefetch: another thread makes the next item while the caller uses this one."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def prefetched(items: Iterator[T]) -> Generator[T]:
    """Yield the items, which must not be None; two of them are in memory at a time."""
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as thread:
        following = thread.submit(next, items, None)
        while (item := following.result()) is not None:
            following = thread.submit(next, items, None)
            yield item
