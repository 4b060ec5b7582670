"""Raising an exception in another thread. Standard library only."""

from __future__ import annotations

import ctypes


def raise_in(thread_id: int, exception: type[BaseException] | None) -> None:
    """Raise an exception in a thread at its next Python instruction; None cancels one that is still pending.

    It does not interrupt a C function.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread_id), ctypes.py_object(exception) if exception else None
    )
