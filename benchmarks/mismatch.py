"""What the mismatch of engine and trainer alone clips: the first optimisation step of a real `rft run`, before anything was trained.

`rft bench mismatch [--model PATH] [--lengths 16,64,256] [--presets gspo,gmpo,grpo]` samples responses with vLLM and takes one step on them with each
preset, from the same weights and the same responses. Engine and trainer hold the same weights then, so every ratio that is not 1 is their mismatch:
other kernels, another order of sums, another number format. A clip that acts here decides by rounding, not by what was learned.

A row per preset and length: `clip_fraction` (share of tokens whose gradient the clip removed), `ratio_mean`, `logprob_diff` (mean of
|log π_trainer - log π_engine| per token, nats), with ratios that compare with what the engine recorded (`old_logprobs: behavior`), and in
`recomputed` the same with the trainer's own log-probabilities, whose ratios are 1 in the first update of a step. JSON on stdout, progress on stderr.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rftdata
from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import rft_command, rft_environment

_LIMIT_S = 1200.0
_CLIPPING = ("clip_fraction", "ratio_mean")
# Rewards differ within a group and say nothing: half of the tokens have positive advantages, and half negative ones.
_WORK = """
def questions():
    return ({"question": f"Tell a long story of the number {number} and of all its friends."} for number in range(2000))


def score(turn, task):
    return float(sum(turn.response.encode()) % 2)
"""


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Sample once for each length, and take two steps with each preset, one for each kind of ratio."""
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
                    # An explorer samples ahead: as many groups as make one step, the first ones.
                    source = f"SELECT group_id FROM rft.v_group WHERE run = '{sampled}' ORDER BY group_id LIMIT {options.groups}"
                    stored = {"algorithm": algorithm, "sampling": {"source": {"sql": source}, "epochs": 1}, "steps": 1}
                    if old_logprobs == "behavior":
                        row |= _run(folder, name, stored, (*_CLIPPING, "logprob_diff"), options)
                    else:
                        row["recomputed"] = _run(folder, name, stored, _CLIPPING, options)
                rows.append(row)
                _say(json.dumps(row))
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
    command = rft_command("run", path, "--plain", "--buffer", folder / "buffer")
    done = subprocess.run(command, cwd=folder, env=rft_environment(), capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode != 0:
        raise RuntimeError(f"{name} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    with rftdata.open(str(folder / "buffer")) as buffer:
        query = (
            "SELECT metrics FROM rft.train_step JOIN rft.run USING (run_id) WHERE run.name = %s AND trainer_step = 1"
        )
        metrics = buffer.sql(query, [name])["metrics"][0].as_py()
    return {key: round(metrics[key], 6) for key in names}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument(
        "--lengths", type=_numbers, default=[16, 64, 256], help="largest numbers of tokens of a response"
    )
    parser.add_argument(
        "--presets", type=lambda text: text.split(","), default=["gspo", "gmpo", "grpo"], help="with a clip"
    )
    parser.add_argument("--groups", type=int, default=4, help="of the step")
    parser.add_argument("--group-size", type=int, default=8, help="responses of a group")
    parser.add_argument("--dtype", default="bfloat16", help="the engine's")
    parser.add_argument("--autocast", default="auto", help="the trainer's; none is float32")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as name:
        print(json.dumps(measure(Path(name), options), indent=1))


if __name__ == "__main__":
    main()
