"""Frequency of Python's garbage collection in the processes of a run.

Importing torch and transformers creates about a million objects that stay. Python searches those of a generation for reference cycles after every
700 new objects. That takes a sixth of the processor time until a role works, and continues with every batch of rows. At the end of the process
Python searches all of them once more, which takes a second in the trainer.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_OBJECTS = 50_000


def collect_rarely() -> None:
    """Search for cycles only after `_NEW_OBJECTS` new objects; call it before the large imports."""
    gc.set_threshold(_NEW_OBJECTS)


@contextmanager
def large_imports() -> Iterator[None]:
    """Search for no cycles while modules are imported, and never among the objects that exist afterwards, since modules stay.

    Do not import modules of users in it: their global files would not be closed at the end of the process.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
