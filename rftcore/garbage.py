"""How often a process of ours looks for reference cycles.

Importing torch and transformers makes about a million objects that stay. Python looks through those of a generation after every 700 new
objects, which is a sixth of the processor time until a role works, and goes on with every batch of rows. It looks through all of them once
more when the process ends, which takes a second of the trainer's.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_OBJECTS = 50_000


def collect_rarely() -> None:
    """Look for cycles after `_NEW_OBJECTS` new objects that may be in one; call it before the large imports."""
    gc.set_threshold(_NEW_OBJECTS)


@contextmanager
def large_imports() -> Iterator[None]:
    """Do not look for cycles while modules are imported, and never among the objects that exist afterwards, since modules stay.

    Not for modules of users, whose global files would not be closed at the end.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
