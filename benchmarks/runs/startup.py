"""Time from `rft run` to the first sampled answer, beside vLLM alone.

Two programs run one after the other on a model with random weights: a real `rft run` (PostgreSQL, explorer, pipeline worker, trainer), and vLLM
alone with the same engine (import, `LLM(…)`, one token). In the first round each has empty caches of compiled code (vLLM's, Inductor's and Triton's);
in later rounds its caches are filled, as for a user who has started a run before. `rft run` comes first, so on a fresh machine it also reads every
library from the disk.

Seconds count from the call of the program. `first answer` is the time at which the first experience was stored, which is later than its first token.
`difference_s` is that less vLLM's `first token` in the same round, and `ratio` that divided by it. The phases are those that the buffer recorded
(`rft.worker_span`): of each process without gaps from its begin to the first answer. A table of each round shows them. Until the fork server has imported
what all roles share, no role has begun.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import rftdata
from benchmarks.harness.arguments import argument_parser, integer, kept_folder
from benchmarks.harness.report import say, write
from benchmarks.harness.rft import call, command, environment
from benchmarks.harness.shapes import SHAPES, write_model
from rftdata.postgres.embedded import EmbeddedServer
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
# The same engine alone, with the wall-clock time after each part.
_ALONE = f"""
import json, sys, time

def main():
    times = {{"python": time.time()}}
    from vllm import LLM, SamplingParams
    times["import"] = time.time()
    import torch
    if not torch.cuda.is_available():
        torch.cpu._init_amx()  # vLLM's attention uses it without asking the system for it, which ends the process
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
    """Return seconds from the start of the program to the end of each of its parts."""
    (folder / "alone.py").write_text(_ALONE)
    found = folder / "alone.json"
    # vLLM computes in the process itself, which saves the start of another one.
    variables = {**os.environ, **caches, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    started = time.time()
    program = [sys.executable, str(folder / "alone.py"), str(folder / "model"), str(found)]
    call(program, folder, folder / "alone.log", limit_s=_LIMIT_S, environment=variables)
    times: dict[str, float] = json.loads(found.read_text())
    return {name: round(at - started, 2) for name, at in times.items()}


def rft_run(folder: Path, number: int, caches: dict[str, str], settings: Sequence[str]) -> dict[str, Any]:
    """Return seconds from the start of `rft run` to the events that the buffer recorded."""
    (folder / "work.py").write_text(_TASKS)
    (folder / "config.yaml").write_text(_CONFIG)
    buffer = folder / f"buffer-{number}"
    options = [part for setting in settings for part in ("--set", setting)]
    started = time.time()
    run = command("run", folder / "config.yaml", "--plain", "--buffer", buffer, *options)
    call(run, folder, folder / f"run-{number}.log", limit_s=_LIMIT_S, environment=environment(**caches))
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
            " FROM rft.worker_span s JOIN rft.worker USING (worker_id) ORDER BY s.worker_id, s.started_at"
        ).to_pylist()
    phases = [
        {
            "role": span["role"],
            "activity": span["activity"],
            "detail": span["detail"],
            "from": max(0.0, round(span["began"] - started, 2)),
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


def measure(folder: Path, rounds: int, settings: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}: rft run")
        ours = rft_run(folder, number, _caches(folder / "caches-run"), settings)
        say(f"round {number + 1} of {rounds}: vLLM alone")
        alone = vllm_alone(folder, _caches(folder / "caches-alone"))
        row = {"caches": "filled" if number else "empty", "rft run": ours, "vLLM alone": alone}
        answer, token = ours["first answer"], alone["first token"]
        rows.append({**row, "difference_s": round(answer - token, 2), "ratio": round(answer / token, 2)})
        say(json.dumps(rows[-1]))
        say("\n".join(table(rows[-1])))
    return rows


def table(row: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a round's table: what each process did until when."""
    yield f"{'caches ' + row['caches']:<64}" + "".join(f"{name:>10}" for name in ("from", "to", "seconds"))
    ours, parts = row["rft run"], list(row["vLLM alone"].items())
    for (_, begun), (name, ended) in itertools.pairwise([("", 0.0), *parts]):
        yield _line("vLLM alone", name, begun, ended)
    for role in dict.fromkeys(phase["role"] for phase in ours["phases"]):
        phases, until = [phase for phase in ours["phases"] if phase["role"] == role], 0.0
        for phase in phases:
            if phase["from"] > until:
                yield _line(role, "not begun" if phase is phases[0] else "not recorded", until, phase["from"])
            until = min(phase["to"] or ours["first answer"], ours["first answer"])
            what = " ".join(filter(None, (phase["activity"], phase["detail"])))
            yield _line(role, what, phase["from"], until)
    yield f"first answer {ours['first answer']:.2f} s, vLLM alone {parts[-1][1]:.2f} s: {row['difference_s']:+.2f} s, {row['ratio']:.2f} times"


def _line(process: str, what: str, begun: float, ended: float) -> str:
    return f"{process:<12}{what:<52}{begun:>10.2f}{ended:>10.2f}{ended - begun:>10.2f}"


def _caches(folder: Path) -> dict[str, str]:
    return {variable: str(folder / name) for variable, name in _CACHES.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser("startup", __doc__)
    parser.add_argument("--shape", choices=SHAPES, default="135M", help="shape of the model")
    parser.add_argument("--rounds", type=integer(), default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further settings of `rft run`")
    options = parser.parse_args(arguments)
    with kept_folder(options) as folder:
        write_model(SHAPES[options.shape], folder / "model")
        make_character_tokenizer().save_pretrained(folder / "model")
        write(options, {"rounds": measure(folder, options.rounds, options.set)})
    return 0
