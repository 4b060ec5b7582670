"""The watch over the trainer's steps: a trainer that hangs ends with the stack of every rank, and starts again from its last checkpoint.

A rank that waits in a collective for another one, or a GPU that does not respond, would otherwise be noticed after the hours of a process group's
time limit. `StepProgress` measures how long a step has been without progress, and `HangWatch` looks at it in a thread. `rft run` starts the trainer
again, as after user code that blocks (`rftdata.user_code.blocked_process`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rftcore.run.hang_watch import HangWatch
from rftcore.run.stacks import read_stacks
from rftcore.trainer.processes.learner_group import LearnerGroup
from rftdata.user_code.blocked_process import end_blocked_process


def watch_trainer(
    learner: LearnerGroup, limit_s: float, run_folder: Path, end: Callable[[str, str], None] = end_blocked_process
) -> HangWatch:
    """Watch the steps of all ranks.

    Args:
        limit_s: seconds that one micro-batch may take.
        run_folder: where the ranks write their stacks.
        end: called with a sentence and the stacks; it should end the process.
    """

    def act() -> None:
        sentence = f"the trainer hangs: a step made no progress for more than {limit_s:g} s (trainer.hang_s)"
        ranks = dict(enumerate([os.getpid(), *learner.pids]))
        stacks = read_stacks(run_folder, ranks.values())
        text = "\n".join(
            f"rank {rank} (pid {pid}):\n{stacks.get(pid, 'its stack could not be read')}\n"
            for rank, pid in ranks.items()
        )
        learner.kill_others()  # they would keep their GPUs
        end(sentence, text)

    return HangWatch(learner.stuck_s, limit_s, act)
