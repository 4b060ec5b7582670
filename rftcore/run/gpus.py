"""The GPUs of this machine as its driver lists them, without torch, whose import takes seconds."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Sequence

from rftcore.run.placement import Machine

_MIB = 2**20
_ANSWER_S = 20.0


def local_gpus() -> list[int]:
    """Return the bytes of each GPU that processes of this machine may use; empty without a driver that answers."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        answer = _answer(program, os.stat(program).st_mtime_ns)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[field.strip() for field in line.split(",")] for line in answer.splitlines() if line.count(",") == 2]
    return _visible(rows, os.environ.get("CUDA_VISIBLE_DEVICES"))


@functools.lru_cache(maxsize=1)
def _answer(program: str, changed_at: int) -> str:
    """Ask the driver once in a process: an answer takes a second where no other process keeps the driver awake.

    Args:
        changed_at: when the program was changed.
    """
    query = [program, "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    return subprocess.run(query, capture_output=True, text=True, timeout=_ANSWER_S, check=True).stdout


def _visible(rows: Sequence[Sequence[str]], visible: str | None) -> list[int]:
    """Return the bytes of the GPUs that CUDA_VISIBLE_DEVICES names, by number or the beginning of a UUID; all if it is not set."""
    sizes = [(index, uuid, int(size) * _MIB) for index, uuid, size in rows if size.isdigit()]
    if visible is None:
        return [size for _, _, size in sizes]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return [size for name in names for index, uuid, size in sizes if name == index or uuid.startswith(name)]


def this_machine(num_gpus: int) -> Machine:
    """Return this machine with a number of GPUs."""
    return Machine("this machine", num_gpus)
