"""Tokens that a clip removes because engine and trainer compute differently: the first optimisation step of a real `rft run`.

vLLM samples responses, and each preset takes one step on them from the same weights. Engine and trainer hold the same weights, so every ratio other than
1 is their mismatch: other kernels, another order of sums, another number format. A clip that acts here is caused by rounding.

A row per preset and length: `clip_fraction` (share of tokens whose gradient the clip removed), `ratio_mean`, `logprob_diff` (mean of
|log π_trainer - log π_engine| per token, nats), with ratios to the log-probabilities of the engine (`old_logprobs: behavior`); in `recomputed` the same
with the trainer's own log-probabilities, whose ratios are 1 in the first update of a step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rftdata
from benchmarks.harness.arguments import argument_parser, integer, integers, names, scratch_folder
from benchmarks.harness.report import say, write
from benchmarks.harness.rft import call, command, environment
from rftcore.algorithms.presets import presets
from rftdata.postgres.embedded import EmbeddedServer

_LIMIT_S = 1200.0
_CLIPPING = ("clip_fraction", "ratio_mean")
# Rewards differ within a group without a meaning: half of the tokens have positive advantages, half negative ones.
_WORK = """
def questions():
    return ({"question": f"Tell a long story of the number {number} and of all its friends."} for number in range(2000))


def score(turn, task):
    return float(sum(turn.response.encode()) % 2)
"""


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Sample once for each length; take two steps with each preset, one for each kind of ratio."""
    (folder / "work.py").write_text(_WORK)
    rows = []
    try:
        for length in options.lengths:
            sampled = f"sampled-{length}"
            _run(folder, sampled, _sampling(length, options), (), options)
            for preset in options.presets:
                row: dict[str, Any] = {"preset": preset, "max_tokens": length}
                for old_logprobs in ("behavior", "recomputed"):
                    name = f"{preset}-{length}-{old_logprobs}"
                    algorithm = {"name": preset, "group_size": options.group_size, "old_logprobs": old_logprobs}
                    # The explorer samples ahead, so the first groups are selected, as many as one step needs.
                    source = f"SELECT group_id FROM rft.v_group WHERE run = '{sampled}' ORDER BY group_id LIMIT {options.groups}"
                    stored = {"algorithm": algorithm, "sampling": {"source": {"sql": source}, "epochs": 1}, "steps": 1}
                    if old_logprobs == "behavior":
                        row |= _run(folder, name, stored, (*_CLIPPING, "logprob_diff"), options)
                    else:
                        row["recomputed"] = _run(folder, name, stored, _CLIPPING, options)
                rows.append(row)
                say(json.dumps(row))
    finally:
        EmbeddedServer(folder / "buffer").stop()
    return {"model": options.model, "engine": options.dtype, "trainer": options.autocast, "rows": rows}


def _sampling(length: int, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "tasks": [{"name": "stories", "source": "./work.py:questions"}],
        "selector": {"type": "shuffle"},
        "algorithm": {"name": "reinforce", "group_size": options.group_size},
        "explorer": {
            "engine": "vllm",
            "engine_args": {"dtype": options.dtype, "context_length": length + 64, "max_num_seqs": 64},
            "reward": "./work.py:score",
            "max_tokens": length,
        },
        "steps": 1,
    }


def _run(
    folder: Path, name: str, parts: dict[str, Any], names: Sequence[str], options: argparse.Namespace
) -> dict[str, float]:
    """Run one step and return its metrics of these names.

    Raises:
        RuntimeError: the run failed.
    """
    trainer = {"batch_groups": options.groups, "learning_rate": 1e-6, "autocast": options.autocast}
    config = {"run": {"name": name, "seed": 1}, "model": {"path": options.model}, "trainer": trainer, **parts}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(config))
    run = command("run", path, "--plain", "--buffer", folder / "buffer")
    call(run, folder, folder / f"{name}.log", limit_s=_LIMIT_S, environment=environment())
    with rftdata.open(str(folder / "buffer")) as buffer:
        query = (
            "SELECT metrics FROM rft.train_step JOIN rft.run USING (run_id) WHERE run.name = %s AND trainer_step = 1"
        )
        metrics = buffer.sql(query, [name])["metrics"][0].as_py()
    return {key: round(metrics[key], 6) for key in names}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser("mismatch", __doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a folder, or a Hugging Face id")
    parser.add_argument("--lengths", type=integers(), default=(16, 64, 256), help="largest numbers of response tokens")
    parser.add_argument(
        "--presets", type=names(*presets()), default=["gspo", "gmpo", "grpo"], help="presets with a clip"
    )
    parser.add_argument("--groups", type=integer(), default=4, help="groups of the step")
    parser.add_argument("--group-size", type=integer(2), default=8, help="responses of a group")
    parser.add_argument("--dtype", default="bfloat16", help="number format of the engine")
    parser.add_argument("--autocast", default="auto", help="number format of the trainer; none is float32")
    options = parser.parse_args(arguments)
    with scratch_folder(options) as folder:
        write(options, measure(folder, options))
    return 0
