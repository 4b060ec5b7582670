"""Ranks of a trainer: functions that several processes call together, and a group of two whose loss meets the other rank, fails, or never ends."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import rftdata
from rftcore.run.stacks import answer_requests
from rftcore.trainer.learner_arguments import LearnerArguments
from rftcore.trainer.processes.learner_group import LearnerGroup
from rftcore.trainer.processes.rank_arguments import RankArguments
from rftcore.trainer.trainer_watch import watch_trainer
from rftdata.config import BufferConfig
from rftdata.user_code.blocked_process import report_to
from tests.support.learning import config, make_batch, save_model
from tests.support.preloaded import PreloadedCall
from tests.support.waiting import wait_until

LOSS = '''
import pathlib
import time

import torch.distributed

from rftcore.algorithms.losses.sft import SFT


class Meeting(SFT):
    """Waits for the other ranks, as collectives do; for ever in a folder that says so: each for nothing, or rank 0 for the others."""

    def __call__(self, view):
        folder = pathlib.Path(__file__).parent
        if (folder / "hang").exists():
            (folder / f"{torch.distributed.get_rank()} hangs").touch()
            if torch.distributed.get_rank() > 0 or not (folder / "0 waits").exists():
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
        if "rftcore.trainer.processes.rank" in words and words[
            words.index("rftcore.trainer.processes.rank") + 1
        ] == str(pid):
            found.append(int(process.name))
    return found


def write_folder(folder: Path) -> None:
    """The model and the loss, as a user's own."""
    save_model(folder / "model", tied=True)
    (folder / "losses.py").write_text(LOSS)


def arguments(folder: Path, num_ranks: int) -> RankArguments:
    settings = config(num_gpus=num_ranks, max_tokens_per_microbatch=2**16)
    return RankArguments(
        learner=LearnerArguments(model_path=str(folder / "model"), config=settings, seed=0, base_dir=folder),
        algorithm="sft",
        algorithm_settings={"loss": {"name": "./losses.py:Meeting"}, "aggregation": "seq-mean-token-mean"},
    )


def make_group(folder: Path, num_ranks: int) -> LearnerGroup:
    given = arguments(folder, num_ranks)
    return LearnerGroup(given, given.build_algorithm())


def update_by_two(folder: Path) -> None:
    """Be rank 0 of two: print the process of the other, and make a step."""
    group = make_group(folder, 2)
    print(*group.pids, flush=True)
    group.update(make_batch(0), 1)


def hang_while_watched(folder: Path) -> None:
    """As `update_by_two`, and watched from when both ranks hang, the first of them in a collective with the other."""
    (folder / "0 waits").touch()
    report_to(folder)
    answer_requests(folder)
    given = replace(arguments(folder, 2), run_folder=folder)
    group = LearnerGroup(given, given.build_algorithm())
    print(*group.pids, flush=True)

    def watch() -> None:
        wait_until(lambda: all((folder / f"{rank} hangs").exists() for rank in range(2)), "both ranks hang")
        watch_trainer(group, 0.1, folder)

    threading.Thread(target=watch, daemon=True).start()
    group.update(make_batch(0), 1)


def draw_as_rank(
    config: BufferConfig, run: str, store: str, rank: int, num_ranks: int, steps: int, stop_after: int
) -> None:
    """Be one rank of a data-parallel trainer up to step `steps`: print what it draws, and at `stop_after` wait for a line.

    Rank 0 holds the attempt and broadcasts its id; nothing else passes between them but the sum that a gradient would be.
    """
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    with rftdata.open(config) as buffer:
        attempt = buffer.attempt(run) if rank == 0 else None
        broadcast = torch.tensor([attempt.attempt_id if attempt else 0])
        dist.broadcast(broadcast, 0)
        attempt = attempt or buffer.join_attempt(run, int(broadcast))
        if rank == 0:
            attempt.publish(attempt.start_step, method="memory", uri="/w", num_bytes=1, checksum="0")
        for step in range(attempt.start_step + 1, steps + 1):
            batch = attempt.draw(step, 4, share=(rank, num_ranks), timeout_s=20)
            tokens = batch.packed("token_ids")
            total = torch.tensor([float(tokens.sum())])
            dist.all_reduce(total)
            if rank == 0:
                attempt.record_step(step, batch, wait_seconds=0, train_seconds=0, publish_seconds=0, metrics={})
                attempt.commit_checkpoint(step, f"/checkpoints/{step}")
            dist.barrier()
            drawn = {
                "attempt": attempt.attempt_id,
                "step": step,
                "rank": rank,
                "rows": batch.rows["experience_id"].to_pylist(),
                "groups": sorted(set(batch.rows["group_id"].to_pylist())),
                "tokens": int(tokens.size),
            }
            print(json.dumps(drawn), flush=True)
            if step == stop_after:
                sys.stdin.readline()  # until the test has done what it wants to
        attempt.close()


def run_ranks(function: Callable[..., None], num_ranks: int, *arguments: object) -> None:
    """Call `function(rank, *arguments)` in as many processes; if it fails in one, end the others."""
    with tempfile.TemporaryFile() as errors:
        ranks = [PreloadedCall(function, rank, *arguments, stderr=errors) for rank in range(num_ranks)]
        try:
            wait_until(
                lambda: all(rank.poll() is not None for rank in ranks) or any(rank.poll() for rank in ranks),
                "the ranks",
            )
            failed = [number for number, rank in enumerate(ranks) if rank.poll() != 0]
            errors.seek(0)
            assert not failed, f"ranks {failed} did not succeed:\n{errors.read().decode()}"
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
