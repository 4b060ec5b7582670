"""The preparation of a step on the host, while its device has nothing to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Let the operators of torch on the CPU use one thread within the block.

    By default an operator on a few thousand numbers divides them among threads and waits for all of these. Where other threads or processes keep
    the processors busy, such waits make the preparation of a batch of 64 sequences several times longer.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
