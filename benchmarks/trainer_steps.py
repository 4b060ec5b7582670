"""What one process of `rft bench trainer` does: a case, from the model's folder to a line of JSON for every optimisation step.

Lines are appended as steps end, so a process that is killed loses only the step that it was in. The last line says how the case ended.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from benchmarks.trainer_shapes import SHAPES, Batch, make_batch, make_sequence

if TYPE_CHECKING:
    from rftcore.trainer.batches.train_batch import TrainBatch
    from rftcore.trainer.processes.learner_group import LearnerGroup

System = Literal["ours", "trl", "trl-liger"]
DType = Literal["mixed", "bfloat16", "float32"]
LADDER = "ladder"
# Learning rates and the like do not change what a step costs; both systems have the same, so that their weights stay together.
LEARNING_RATE = 1.0e-6
CLIP = (0.2, 0.28)
ADVANTAGE_EPS = 1.0e-4  # TRL's
_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")


@dataclass(frozen=True)
class Case:
    """One process.

    Attributes:
        batch: a name of `BATCHES`, or `LADDER`: one sequence a step, longer in every step, until memory is full.
        dtype: mixed is float32 weights and bfloat16 matrix products.
        micro_batch: tokens for ours, sequences for TRL.
        copies: of the batch, in every step but the first, whose loss and gradients so stay those of one copy.
        steps, warm_up: timed steps and those before them.
        rungs: lengths of the ladder, tokens.
        trainer: keys of `TrainerConfig` that replace ours.
    """

    shape: str
    batch: str
    system: System
    dtype: DType
    checkpointing: bool
    micro_batch: int
    ranks: int = 1
    copies: int = 1
    steps: int = 3
    warm_up: int = 2
    scale: float = 1.0
    rungs: tuple[int, ...] = ()
    trainer: tuple[tuple[str, Any], ...] = ()

    def batches(self) -> list[Batch]:
        """What is trained on, step by step."""
        shape = SHAPES[self.shape]
        if self.batch == LADDER:
            return [make_sequence(length, shape) for length in self.rungs]
        batch = make_batch(self.batch, shape, scale=self.scale)
        return [batch, *[batch.repeated(self.copies, shape.vocab_size)] * (self.warm_up + self.steps - 1)]


class Recorder:
    """Times steps and appends them to a file. A step is `begin`, the work, `end`."""

    def __init__(self, file: Path, batches: Sequence[Batch]) -> None:
        import torch

        self._cuda = torch.cuda if torch.cuda.is_available() else None
        self._file = file
        self._tokens = [batch.num_tokens for batch in batches]
        self._step = 0
        self._begun = self._paused = 0.0

    def now(self) -> float:
        """Seconds, after all work on the device has ended."""
        if self._cuda:
            self._cuda.synchronize()
        return time.perf_counter()

    def begin(self) -> None:
        if self._cuda:
            self._cuda.reset_peak_memory_stats()
        self._paused = 0.0
        self._begun = self.now()

    def pause(self, seconds: float) -> None:
        """Leave out time that is not of the optimisation step."""
        self._paused += seconds

    def end(self) -> dict[str, Any]:
        """Seconds and memory of the step; `write` appends them with what else is known."""
        return {"seconds": self.now() - self._begun - self._paused, "peak_gib": self._peak_bytes() / 2**30}

    def write(
        self, measured: dict[str, Any], *, loss: float, grad_norm: float, computed_tokens: float | None = None
    ) -> None:
        """Append a step; `computed_tokens` where not every token of the batch is computed."""
        num_tokens = self._tokens[self._step]
        known = {
            "num_tokens": num_tokens,
            "computed_tokens": computed_tokens or num_tokens,
            "loss": loss,
            "grad_norm": grad_norm,
        }
        self.append(known | measured)
        self._step += 1

    def append(self, line: dict[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _peak_bytes(self) -> int:
        if self._cuda:
            return int(self._cuda.max_memory_allocated())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_case(case: Case, model: Path, output: Path, log: Path) -> None:
    """Run a case in this process, which it changes for good (descriptors, patches of Liger): its output goes to `log`, its lines to `output`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if case.ranks == 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = (
            "0"  # with several, transformers' trainer would spread every micro-batch over them
        )
    batches = case.batches()
    recorder = Recorder(output, batches)
    train: Callable[[Case, str, list[Batch], Recorder], None] = _train_ours
    if case.system != "ours":
        from benchmarks.trainer_trl import train
    end: dict[str, Any] = {"status": "ok", "error": None}
    try:
        train(case, str(model), batches, recorder)
    except Exception as error:  # noqa: BLE001 - a failure is a row of the table
        traceback.print_exc()
        text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        is_memory = isinstance(error, MemoryError) or any(each in str(error) for each in _OUT_OF_MEMORY)
        end = {"status": "out of memory" if is_memory else "failed", "error": text[:300]}
    recorder.append(end)
    if end["error"]:
        sys.stderr.flush()
        os._exit(0)  # a process whose GPU ran out of memory may hang in what libraries do at exit


def _train_ours(case: Case, model: str, batches: list[Batch], recorder: Recorder) -> None:
    with closing(_open_learner(case, model)) as learner:
        for step, batch in enumerate(batches, start=1):
            packed = train_batch(batch)
            recorder.begin()
            metrics = learner.update(packed, step)
            recorder.write(
                recorder.end(),
                loss=metrics["loss"],
                grad_norm=metrics["grad_norm"],
                computed_tokens=metrics["computed_tokens"],
            )


def _open_learner(case: Case, model: str) -> LearnerGroup:
    from rftcore.config.trainer import TrainerConfig
    from rftcore.trainer.learner_arguments import LearnerArguments
    from rftcore.trainer.processes.learner_group import LearnerGroup
    from rftcore.trainer.processes.rank_arguments import RankArguments

    config = TrainerConfig.model_validate(
        {
            "dtype": "bfloat16" if case.dtype == "bfloat16" else "float32",
            "autocast": "bfloat16" if case.dtype == "mixed" else "none",
            "gradient_checkpointing": case.checkpointing,
            "max_tokens_per_microbatch": case.micro_batch,
            "learning_rate": LEARNING_RATE,
            "num_gpus": case.ranks,
            **dict(case.trainer),
        }
    )
    # A single sequence has no group to be compared with: its advantage is its reward.
    advantage = {"baseline": "none", "scale": "none"} if case.batch == LADDER else {"eps": ADVANTAGE_EPS}
    changes = {"advantage": {"name": "group", **advantage}, "loss": {"name": "ppo", "clip": list(CLIP)}}
    learner = LearnerArguments(model_path=model, config=config, seed=0)
    arguments = RankArguments(learner=learner, algorithm="dapo", algorithm_settings=changes)
    return LearnerGroup(arguments, arguments.build_algorithm())


def train_batch(batch: Batch) -> TrainBatch:
    """The batch as the learner takes it."""
    from rftcore.trainer.batches.padding import PackedColumns, pad_batch

    pairs = list(zip(batch.prompts, batch.responses, strict=True))
    offsets = np.cumsum([0, *(len(prompt) + len(response) for prompt, response in pairs)])
    mask = [np.arange(len(prompt) + len(response)) >= len(prompt) for prompt, response in pairs]
    logprobs = [
        np.concatenate([np.zeros(len(prompt), np.float32), known])
        for prompt, known in zip(batch.prompts, batch.logprobs, strict=True)
    ]
    return pad_batch(
        PackedColumns(
            token_ids=(np.concatenate([np.concatenate(pair) for pair in pairs]), offsets),
            loss_mask=(np.concatenate(mask), offsets),
            behavior_logprobs=(np.concatenate(logprobs), offsets),
            rewards=batch.rewards,
            group_ids=batch.group_ids,
            rollout_index=[batch.group_ids[:index].count(group) for index, group in enumerate(batch.group_ids)],
        )
    )
