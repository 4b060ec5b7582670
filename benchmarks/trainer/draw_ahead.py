"""How long a trainer waits for its batches, with the next batch drawn ahead and without.

The trainer is the real one with a small model, on stored groups that are all ready. With `order: fifo` the next batch is drawn and prepared while a
step trains; with `order: newest` it is drawn when its step begins. Rounds are interleaved. The first step of each run does not count, since nothing
trains before it. `wait_ms`: median, least and most; `ratio` is the median wait ahead over that at its step.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import rftdata
from benchmarks.harness.arguments import argument_parser, integer, scratch_folder
from benchmarks.harness.report import write
from rftcore.config.run import parse_config
from rftcore.launch.preparation import stored_config
from rftcore.resolved import ResolvedRun
from rftcore.run.join import JoinedRun
from rftcore.trainer.role import TrainerRole
from rftcore.trainer.shared_device import trainer_device_of
from rftdata import Buffer, Group, Rollout
from rftdata import Sequence as Experience
from rftdata.workers.worker import Worker
from tests.support.models import make_tiny_model

GROUPS, GROUP_SIZE, PROMPT_TOKENS = 32, 8, 200


def stored_group(key: int, num_tokens: int) -> Group:
    """Make a group of responses of nearly equal length to one prompt."""
    generator = np.random.default_rng(key)
    rollouts = []
    for index in range(GROUP_SIZE):
        length = num_tokens - int(generator.integers(num_tokens // 20))
        token_ids = np.concatenate([np.full(PROMPT_TOKENS, 7), generator.integers(4, 40, length - PROMPT_TOKENS)])
        sequence = Experience(
            prompt="a prompt",
            response="a response",
            token_ids=token_ids,
            num_prompt_tokens=PROMPT_TOKENS,
            finish_reason="stop",
            reward=float(index % 2),
            behavior_logprobs=generator.normal(-3.5, 0.1, length - PROMPT_TOKENS),
        )
        rollouts.append(Rollout(index, "ok", float(index % 2), [sequence]))
    return Group(rollouts, source="import", taskset="stored", task_key=str(key))


def steps_of_a_run(
    buffer: Buffer, model: Path, name: str, order: str, steps: int, num_tokens: int
) -> list[dict[str, Any]]:
    """Train a run to its end; return its steps except the first."""
    raw = {
        "run": {"name": name},
        "buffer": {"uri": buffer.config.uri},
        "model": {"path": str(model)},
        "tasks": [{"name": "stored", "source": "./none.py:none"}],
        "algorithm": {"name": "grpo", "group_size": GROUP_SIZE},
        "explorer": {"reward": "exact_match"},
        "sampling": {"order": order},
        "sync": {"method": "checkpoint"},
        "trainer": {"batch_groups": GROUPS, "checkpoint_every": steps, "autocast": "none"},
        "steps": steps,
    }
    config = parse_config(raw, model, "the benchmark")
    run = buffer.create_run(
        name=name, config=stored_config(config), seed=1, steps=steps, pipeline_version="none", mode="train"
    )
    with buffer.writer(run) as writer:
        for first in range(0, steps * GROUPS, GROUPS):
            writer.insert(*[stored_group(key, num_tokens) for key in range(first, first + GROUPS)])
    joined = JoinedRun(buffer, run, ResolvedRun(config))
    with Worker(run, "trainer") as worker, buffer.attempt(run, sampling=config.sampling) as attempt:
        TrainerRole(joined, worker, attempt, trainer_device_of(config, attempt, worker)).train()
    query = (
        "SELECT wait_seconds, train_seconds, num_tokens FROM rft.train_step WHERE run_id = %s AND trainer_step > 1"
        " AND outcome = 'trained' AND num_groups = %s"
    )
    found: list[dict[str, Any]] = buffer.sql(query, [run.run_id, GROUPS]).to_pylist()
    assert len(found) == steps - 1, "a step was skipped or short"
    return found


def measure(folder: Path, rounds: int, steps: int, num_tokens: int) -> dict[str, Any]:
    """Train runs of both kinds; return what their steps waited."""
    taken: dict[str, list[dict[str, Any]]] = {"newest": [], "fifo": []}
    with rftdata.open(f"{folder}/buffer") as buffer:
        model = make_tiny_model(folder / "model", context_length=max(256, num_tokens), hidden_size=32, num_layers=1)
        for number in range(rounds):
            for order, rows in taken.items():
                rows += steps_of_a_run(buffer, model, f"{order}-{number}", order, steps, num_tokens)
    tokens = statistics.mean(row["num_tokens"] for rows in taken.values() for row in rows)
    result: dict[str, Any] = {"experiences": GROUPS * GROUP_SIZE, "tokens_per_batch": round(tokens)}
    for order, title in (("newest", "at its step"), ("fifo", "ahead")):
        waits = sorted(row["wait_seconds"] for row in taken[order])
        result[title] = {
            "wait_ms": [round(1000 * f, 1) for f in (statistics.median(waits), waits[0], waits[-1])],
            "train_s": round(statistics.median(row["train_seconds"] for row in taken[order]), 2),
            "steps": len(waits),
        }
    result["ratio"] = round(result["ahead"]["wait_ms"][0] / result["at its step"]["wait_ms"][0], 3)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser("draw_ahead", __doc__)
    parser.add_argument("--rounds", type=integer(), default=2, help="runs of each kind")
    parser.add_argument("--steps", type=integer(2), default=4, help="steps of a run")
    parser.add_argument("--tokens", type=integer(256), default=2000, help="most tokens of an experience")
    options = parser.parse_args(arguments)
    with scratch_folder(options) as folder:
        write(options, measure(folder, options.rounds, options.steps, options.tokens))
    return 0
