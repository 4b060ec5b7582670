"""One process of `rft bench trainer`: a case, from the model's folder to a line of JSON for every optimisation step.

Lines are appended as steps end, so a process that is killed loses only its current step. The last line says how the case ended.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness.processes import append_line, redirect
from benchmarks.trainer.batches import Batch
from benchmarks.trainer.case import ADVANTAGE_EPS, CLIP, LADDER, LEARNING_RATE, Case, Recorder
from rftcore.garbage import collect_rarely, large_imports

if TYPE_CHECKING:
    from rftcore.trainer.batches.train_batch import TrainBatch
    from rftcore.trainer.processes.learner_group import LearnerGroup

_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")


def run_case(case: Case, model: Path, output: Path, log: Path) -> None:
    """Run a case; its lines go to `output`, its other output to `log`. The process cannot be used for anything else afterwards."""
    redirect(log)
    if case.system == "ours":
        collect_rarely()  # as every process of a run does
    if case.ranks == 1:
        # With several GPUs, transformers' trainer would spread every micro-batch over them.
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    batches = case.batches()
    recorder = Recorder(output, batches, profiles=case.profiles)
    train: Callable[[Case, str, list[Batch], Recorder], None] = _train_ours
    if case.system != "ours":
        from benchmarks.trainer.trl import train
    end: dict[str, Any] = {"status": "ok", "error": None}
    try:
        train(case, str(model), batches, recorder)
    except Exception as error:  # noqa: BLE001 - a failure is a row of the table
        traceback.print_exc()
        text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        is_memory = isinstance(error, MemoryError) or any(each in str(error) for each in _OUT_OF_MEMORY)
        end = {"status": "out of memory" if is_memory else "failed", "error": text[:300]}
    append_line(output, end)
    if end["error"]:
        sys.stderr.flush()
        os._exit(0)  # after a lack of GPU memory, libraries may hang at exit


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
    with large_imports():
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
    # A single sequence has no group to compare with, so its advantage is its reward.
    advantage = {"baseline": "none", "scale": "none"} if case.batch == LADDER else {"eps": ADVANTAGE_EPS}
    changes = {"advantage": {"name": "group", **advantage}, "loss": {"name": "ppo", "clip": list(CLIP)}}
    learner = LearnerArguments(model_path=model, config=config, seed=0)
    arguments = RankArguments(learner=learner, algorithm="dapo", algorithm_settings=changes)
    return LearnerGroup(arguments, arguments.build_algorithm())


def train_batch(batch: Batch) -> TrainBatch:
    """Return the batch as the learner takes it."""
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
