"""How often a process of ours looks for reference cycles.

Importing torch and transformers makes about a million objects that stay. Python looks through those of a generation after every 700 new
objects, which is a sixth of the processor time until a role works, and goes on with every batch of rows.
"""

from __future__ import annotations

import gc

_NEW_OBJECTS = 50_000


def collect_rarely() -> None:
    """Look for cycles after `_NEW_OBJECTS` new objects that may be in one; call it before the large imports."""
    gc.set_threshold(_NEW_OBJECTS)
