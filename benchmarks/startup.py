"""From `rft run` to the first sampled answer, beside vLLM alone.

`rft bench startup [--shape 135M] [--rounds 2] [--json]` starts two programs in turn on a model with random weights: vLLM alone (import,
`LLM(…)`, one token), and a real `rft run` with the same engine (PostgreSQL, explorer, pipeline worker, trainer). In the first round each has
empty caches of compiled code (vLLM's, Inductor's and Triton's) of its own; in later rounds they are filled, as for a user who has started a run
before. The first program of the first round is `rft run`, which therefore also reads every library from the disk if the machine is fresh.

Seconds count from the call of the program. `first answer` is the time at which the first experience was stored, which is later than its
first token; `ratio` is that over vLLM's `first token` in the same round. The phases of `rft run` are those that the buffer recorded
(`rft.worker_span`). JSON on stdout, progress on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rftdata
from benchmarks.trainer_shapes import SHAPES, write_model
from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import rft_command, rft_environment
from tests.support.models import make_character_tokenizer

_LIMIT_S = 400.0
_CONTEXT_LENGTH = 256
_MAX_NUM_SEQS = 1024
_GPU_MEMORY = 0.4
_CACHES = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
_TASKS = """
def questions():
    return ({"question": f"what is {number}?", "answer": str(number)} for number in range(2000))


def score(turn, task):
    return float(len(turn.response) % 2)
"""
_CONFIG = f"""
run: {{name: startup, seed: 1}}
model: {{path: ./model}}
tasks: [{{name: numbers, source: "./work.py:questions"}}]
selector: {{type: shuffle}}
algorithm: {{name: grpo, group_size: 8}}
explorer:
  engine: vllm
  engine_args: {{dtype: bfloat16, context_length: {_CONTEXT_LENGTH}, max_num_seqs: {_MAX_NUM_SEQS}, gpu_memory_utilization: {_GPU_MEMORY}}}
  reward: "./work.py:score"
  max_tokens: 8
trainer: {{batch_groups: 16, checkpoint_every: 2}}
steps: 2
"""
# The same engine without us, with the wall-clock time after each part.
_ALONE = f"""
import json, sys, time

def main():
    times = {{"python": time.time()}}
    from vllm import LLM, SamplingParams
    times["import"] = time.time()
    import torch
    memory = {{"gpu_memory_utilization": {_GPU_MEMORY}}} if torch.cuda.is_available() else {{"kv_cache_memory_bytes": 2**30}}
    llm = LLM(
        model=sys.argv[1], dtype="bfloat16", max_model_len={_CONTEXT_LENGTH}, max_num_seqs={_MAX_NUM_SEQS}, enable_prefix_caching=True,
        enforce_eager=not torch.cuda.is_available(), logprobs_mode="processed_logprobs", **memory,
    )
    times["engine"] = time.time()
    found = llm.generate([{{"prompt_token_ids": [5, 6, 7]}}], SamplingParams(max_tokens=1, logprobs=0), use_tqdm=False)
    assert len(found[0].outputs[0].token_ids) == 1
    times["first token"] = time.time()
    json.dump(times, open(sys.argv[2], "w"))

if __name__ == "__main__":
    main()
"""


def vllm_alone(folder: Path, caches: dict[str, str]) -> dict[str, float]:
    """Seconds from the start of the program to the end of each of its parts."""
    (folder / "alone.py").write_text(_ALONE)
    found = folder / "alone.json"
    # In the process itself, like our engine.
    environment = {**os.environ, **caches, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    started = time.time()
    _call(
        [sys.executable, str(folder / "alone.py"), str(folder / "model"), str(found)],
        folder,
        environment,
        folder / "alone.log",
    )
    times: dict[str, float] = json.loads(found.read_text())
    return {name: round(at - started, 2) for name, at in times.items()}


def rft_run(folder: Path, number: int, caches: dict[str, str], settings: Sequence[str]) -> dict[str, Any]:
    """Seconds from the start of `rft run` to what the buffer recorded of it."""
    (folder / "work.py").write_text(_TASKS)
    (folder / "config.yaml").write_text(_CONFIG)
    buffer = folder / f"buffer-{number}"
    options = [part for setting in settings for part in ("--set", setting)]
    started = time.time()
    _call(
        rft_command("run", folder / "config.yaml", "--plain", "--buffer", buffer, *options),
        folder,
        {**rft_environment(), **caches},
        folder / f"run-{number}.log",
    )
    ended = time.time()
    try:
        return {**_recorded(buffer, started), "end": round(ended - started, 2)}
    finally:
        EmbeddedServer(buffer).stop()


def _recorded(buffer: Path, started: float) -> dict[str, Any]:
    with rftdata.open(str(buffer)) as opened:
        times = opened.sql(
            "SELECT extract(epoch FROM (SELECT min(created_at) FROM rft.run))::float8 AS run,"
            " extract(epoch FROM (SELECT min(created_at) FROM rft.experience))::float8 AS answer"
        ).to_pylist()[0]
        spans = opened.sql(
            "SELECT role, activity, detail, extract(epoch FROM s.started_at)::float8 AS began, extract(epoch FROM ended_at)::float8 AS ended"
            " FROM rft.worker_span s JOIN rft.worker USING (worker_id) ORDER BY s.started_at"
        ).to_pylist()
    phases = [
        {
            "role": span["role"],
            "activity": span["activity"],
            "detail": span["detail"],
            "from": round(span["began"] - started, 2),
            "to": None if span["ended"] is None else round(span["ended"] - started, 2),
        }
        for span in spans
        if span["began"] <= times["answer"]
    ]
    return {
        "run stored": round(times["run"] - started, 2),
        "first answer": round(times["answer"] - started, 2),
        "phases": phases,
    }


def _call(command: list[str], folder: Path, environment: dict[str, str], log: Path) -> None:
    with log.open("wb") as file:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=_LIMIT_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{log.stem} ended with {done.returncode}:\n{log.read_text(errors='replace')[-4000:]}")


def measure(folder: Path, rounds: int, settings: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}: rft run", file=sys.stderr, flush=True)
        ours = rft_run(folder, number, _caches(folder / "caches-run"), settings)
        print(f"round {number + 1} of {rounds}: vLLM alone", file=sys.stderr, flush=True)
        alone = vllm_alone(folder, _caches(folder / "caches-alone"))
        row = {"caches": "filled" if number else "empty", "rft run": ours, "vLLM alone": alone}
        rows.append({**row, "ratio": round(ours["first answer"] / alone["first token"], 2)})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _caches(folder: Path) -> dict[str, str]:
    return {variable: str(folder / name) for variable, name in _CACHES.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="rft bench startup", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="135M", help="of the model")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further settings of `rft run`")
    parser.add_argument("--folder", type=Path, help="keeps models and logs")
    parser.add_argument("--json", action="store_true", help="JSON, as always")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as temporary:
        folder: Path = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_model(SHAPES[options.shape], folder / "model")
        make_character_tokenizer().save_pretrained(folder / "model")
        rows = measure(folder, options.rounds, options.set)
    print(
        json.dumps({"shape": options.shape, "cores": os.cpu_count(), "settings": options.set, "rounds": rows}, indent=2)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
