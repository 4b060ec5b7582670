"""A group of two ranks whose loss meets the other rank, fails in one of them, or never ends; by itself: `python -m tests.support.ranks FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rftcore.run.parent_process import end_with_parent
from rftcore.trainer.learner_arguments import LearnerArguments
from rftcore.trainer.ranks import LearnerGroup
from tests.support.learning import config, make_batch, save_model

LOSS = '''
import pathlib
import time

import torch.distributed

from rftcore.algorithms.losses.sft import SFT


class Meeting(SFT):
    """Waits for the other ranks, as collectives do; for ever in a folder that says so, as where a rank of NCCL is missing."""

    def __call__(self, view):
        folder = pathlib.Path(__file__).parent
        if (folder / "hang").exists():
            (folder / f"{torch.distributed.get_rank()} hangs").touch()
            time.sleep(600)
        if torch.distributed.is_initialized():
            if (folder / f"{torch.distributed.get_rank()} fails").exists():
                raise MemoryError("no room for the loss")
            torch.distributed.barrier()
        return super().__call__(view)
'''


def ranks_of(pid: int) -> list[int]:
    """The processes that a trainer started as its ranks."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text().split("\0")
        except OSError:  # it has ended
            continue
        if "rftcore.trainer.rank" in words and words[words.index("rftcore.trainer.rank") + 1] == str(pid):
            found.append(int(process.name))
    return found


def write_folder(folder: Path) -> None:
    """The model and the loss, as a user's own."""
    save_model(folder / "model", tied=True)
    (folder / "losses.py").write_text(LOSS)


def arguments(folder: Path, num_ranks: int) -> LearnerArguments:
    return LearnerArguments(
        model_path=str(folder / "model"), config=config(num_gpus=num_ranks, max_tokens_per_microbatch=2**16), algorithm="sft",
        algorithm_settings={"loss": {"name": "./losses.py:Meeting"}}, base_dir=folder, seed=0,
    )  # fmt: skip


def make_group(folder: Path, num_ranks: int) -> LearnerGroup:
    given = arguments(folder, num_ranks)
    return LearnerGroup(given, given.build_algorithm())


if __name__ == "__main__":
    end_with_parent(os.getppid())
    group = make_group(Path(sys.argv[1]), 2)
    print(*group.pids, flush=True)
    group.update(make_batch(0), 1)
