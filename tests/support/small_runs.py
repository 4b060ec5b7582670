"""The sorting example made small enough for a run in half a minute, and roles started as processes of their own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.command_line import EXAMPLE, rft_environment
from tests.support.preloaded import Preloaded
from tests.support.warm_up import Warm

STEPS = 4
RUN = "sort-grpo"
# Of the 20,000 tasks a short run uses some dozens, and an evaluation is one whatever its size.
FEW_TASKS = (
    "tasks=[{name: sort-train, source: './tasks.py:numbers', args: {size: 2000}, split: train}]",
    "eval.tasks=[{name: sort-validation, source: './tasks.py:numbers', args: {size: 2000, seed: 1}, split: validation, limit: 50}]",
)
_OVERRIDES = (
    *FEW_TASKS,
    "explorer.engine=transformers",
    "explorer.engine_args={dtype: float32, context_length: 64}",
    "trainer.checkpoint_every=2",
    "eval.every=4",
    "trainer.batch_groups=4",
    f"steps={STEPS}",
    "eval.test=[]",
    "explorer.max_refill=64",
)


def settings(warm: Warm, *more: str) -> list[str]:
    """`--set` options that make `grpo.yaml` small; `more` come last and win."""
    overrides = (*_OVERRIDES, f"model.path={warm.model}", *more)
    return [part for override in overrides for part in ("--set", override)]


def start(
    verb: str, *options: object, config: Path | None = EXAMPLE / "grpo.yaml", ray_folder: Path | None = None
) -> subprocess.Popen[str]:
    """Start `rft VERB CONFIG …` and return at once.

    Args:
        config: None where a stored configuration is taken.
        ray_folder: where Ray puts its files; whether it exists afterwards shows whether Ray was started.
    """
    environment = rft_environment() if ray_folder is None else {**rft_environment(), "RAY_TMPDIR": str(ray_folder)}
    return Preloaded(
        [verb, *([] if config is None else [config]), *options],
        env={**environment, "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
