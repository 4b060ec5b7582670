"""Named places at which a test ends the process like `kill -9`; they do nothing unless one is armed.

A crash at a random moment rarely falls between two neighbouring statements. Each failpoint is at a place where what is durable, what is
committed and what the caller knows differ, so a test can crash exactly there. The environment variable
`RFT_FAILPOINT=name` arms one in a process, `name:3` arms its third passing.
"""

from __future__ import annotations

import os
import signal
from itertools import count

FAILPOINTS = {
    "writer.appended": "a batch's arrays are in the segment file, not on disk; no row of it is stored",
    "writer.synced": "the arrays are on disk; the transaction with their rows has not committed",
    "writer.committed": "rows and arrays are durable; the caller does not know yet",
    "planner.inserted": "selector states and planned groups are written; the transaction has not committed",
    "explorer.claimed": "groups are claimed; nothing was sampled",
    "explorer.weights_acknowledged": "an offer of weights is acknowledged; the members of the group are not known, or just fixed",
    "explorer.weights_half_loaded": "one tensor of an offer is in the engine, the others are not",
    "explorer.weights_loaded": "all tensors of an offer are in the engine; the trainer does not know",
    "explorer.asleep": "the engine sleeps; the device is not given yet",
    "explorer.awake": "the explorer has the device, and the engine is awake without weights",
    "pipeline.claimed": "sealed groups are claimed; nothing was decided",
    "pipeline.decided": "verdicts are written; the transaction has not committed",
    "pipeline.committed": "verdicts are committed; no listener was woken",
    "trainer.started": "a new attempt holds the run; it has published nothing",
    "trainer.drawn": "a batch is drawn, perhaps ahead of its step; nothing of it was trained",
    "trainer.device_taken": "the trainer has the device; its state is still in the memory of the host",
    "trainer.device_freed": "the trainer's state is in the memory of the host again; the device is not given yet",
    "trainer.updated": "the optimizer has stepped; nothing of the step is stored",
    "trainer.weights_offered": "weights are offered to live engines; no member is fixed",
    "trainer.weights_members_fixed": "the members of the weights' group are fixed, and wait; nothing was sent",
    "trainer.weights_half_sent": "a bucket of weights is on its way; others, and the end, are not",
    "trainer.weights_sent": "all members have answered; the transfer is not recorded as ended",
    "trainer.published": "the new weights are announced; the step is not recorded",
    "trainer.checkpoint_written": "the checkpoint's folder is on disk, and its step is recorded; the checkpoint is not",
    "trainer.recorded": "the step is recorded; its checkpoint may be half-written",
    "trainer.checkpoint_committed": "the checkpoint counts; older ones have not been forgotten",
    "trainer.checkpoint_forgotten": "an old checkpoint is recorded as removed; its folder is still there",
    "archive.begun": "it is recorded that an archive is being written; it has no file",
    "archive.written": "an archive's files are durable and verified; no row was moved",
    "archive.moving": "the rows of an archived run are moved; the transaction has not committed",
    "archive.moved": "a run is archived; the space of its rows is not free",
    "restore.appended": "the arrays of an archived run are in segments again; no row refers to them",
    "restore.moving": "the rows of an archived run are whole again; the transaction has not committed",
    "restore.moved": "a run is restored; the files of its archive are still there",
    "restore.removed": "a run is restored, and the files of its archive are gone; its record is still there",
}

_armed: str | None = None
_passings = count(1)
_nth = 1


def arm(name: str | None) -> None:
    """Arm `name` or `name:n` in this process; None disarms all.

    Raises:
        ValueError: the failpoint does not exist.
    """
    global _armed, _nth, _passings
    place, _, nth = (name or "").partition(":")
    if place and place not in FAILPOINTS:
        raise ValueError(f"unknown failpoint {place!r}; allowed: {', '.join(FAILPOINTS)}")
    _armed, _nth, _passings = place or None, int(nth or 1), count(1)


def failpoint(name: str) -> None:
    """End the process here if this failpoint is armed."""
    if _armed == name and next(_passings) == _nth:
        os.kill(os.getpid(), signal.SIGKILL)


arm(os.environ.get("RFT_FAILPOINT"))
