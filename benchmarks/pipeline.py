"""What pipeline stages and the chain around them cost, beside plain `datasets.map`/`filter`, Trinity-RFT's operators and Data-Juicer's own way.

`rft bench pipeline [--rounds N] [--rows N] [--skip-peers] [--skip-data-juicer] [--skip-workers]` prints JSON on stdout, progress on stderr.

- operators: rows a second and core of every built-in stage, through `Chain.run` with nothing else in the chain: checks, reasons and decisions are
  in it. The experiences are those of the buffer benchmark (2 KB responses, groups of 8), as Arrow batches of `--rows`.
- chain_overhead: five stages of at least 20 µs a row, each dropping a few rows, through the chain against the same five functions called by
  hand on the same texts: CPU time of the chain / CPU time by hand − 1.
- peers: the same jobs done by others. Ours start from Arrow and end with a decision, a stage and a reason for every row. `datasets` starts from Arrow, too;
  Trinity-RFT starts from Python objects that were made before the clock runs (`operators`), or that are made from the stored bytes first, as they are when
  they come from its buffer (`operators_with_objects`). Ratios are ours / theirs in rows a second.
- data_juicer, workers: see `benchmarks.pipeline_data_juicer` and `benchmarks.pipeline_workers`.

Rounds go over all measurements in turn. Times are CPU seconds of the process, so what else the machine does counts little; Arrow and DuckDB run on one
thread.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.peers import TRINITY_REQUIREMENTS
from benchmarks.peers.environment import InstallationError, python_of
from benchmarks.workload import GROUP_SIZE, Sample, make_samples
from operators.base import BATCH_SCHEMA, Operator, StageOutcome
from operators.chain.build import build_chain
from operators.chain.chain import Chain
from operators.chain.stage import Stage

_ROOT = Path(__file__).resolve().parent.parent
_PEER_LIMIT_S = 600.0
_SHAPING = "reward + 0.1 * metrics.seconds"

FILTERS: dict[str, dict[str, Any]] = {
    "balance_groups": {"balance_groups": {}},
    "balance_groups_by_metric": {"balance_groups": {"column": "metrics.correct", "correct_above": 0.5}},
    "drop_stale": {"drop_stale": {"max": 3}},
    "drop_truncated": {"drop_truncated": {}},
    "drop_zero_variance_groups": {"drop_zero_variance_groups": {}},
    "mix": {"mix": {"shares": {"sums": 1, "products": 1}}},
    "reward_threshold": {"reward_threshold": {"min": 0.5}},
    "sample": {"sample": {"fraction": 0.5}},
    "threshold": {"threshold": {"column": "num_response_tokens", "max": 900}},
    "threshold_on_metric": {"threshold": {"column": "metrics.seconds", "min": 0.1}},
    "language_filter": {"language_filter": {"keep": ["en"]}},
    "sql_filter": {"sql": "SELECT * FROM batch WHERE num_response_tokens < 900"},
    "sql_filter_by_text": {"sql": "FROM batch WHERE length(response) < 3500"},
    "sql_changes_reward": {
        "sql": "SELECT * REPLACE (reward - 0.1 * (num_response_tokens > 512)::INT AS reward) FROM batch"
    },
}
"""Stages that decide on numbers or by a query: the ones that a bound of 100 thousand rows a second is set for."""

OTHERS: dict[str, dict[str, Any]] = {
    "clip_reward": {"clip_reward": {"max": 0.5}},
    "length_penalty": {"length_penalty": {"max_tokens": 900, "cache_tokens": 200}},
    "normalize_reward": {"normalize_reward": {}},
    "pair_builder": {"pair_builder": {}},
    "pass_rate": {"pass_rate": {}},
    "priority": {"priority": {"formula": "abs(reward - avg(reward) OVER (PARTITION BY group_id))"}},
    "reward_shaping": {"reward_shaping": {"formula": _SHAPING}},
    "tag": {"tag": {"columns": {"is_long": "num_response_tokens > 512"}}},
    "decontaminate": {"decontaminate": {"against": ["evaluation.jsonl"]}},
    "dedup_exact": {"dedup_exact": {}},
    "dedup_near": {"dedup_near": {}},
    "dedup_near_batch": {"dedup_near": {"scope": "batch"}},
    "repetition_score": {"repetition_score": {}},
    "language_score": {"language_score": {}},
}
"""Stages that compute something; the last ones read the texts."""


def make_table(samples: Sequence[Sample]) -> pa.Table:
    """The experiences as a batch of whole groups."""
    num = len(samples)
    lengths = [len(sample.token_ids) - sample.num_prompt_tokens for sample in samples]
    columns: dict[str, Sequence[object]] = {
        "experience_id": [sample.key for sample in samples],
        "group_id": [sample.group for sample in samples],
        "rollout_index": [sample.key % GROUP_SIZE for sample in samples],
        "task_id": [sample.group for sample in samples],
        "taskset": [("sums", "products")[sample.group % 3 > 0] for sample in samples],
        "prompt": [sample.prompt for sample in samples],
        "response": [sample.response for sample in samples],
        "reward": [sample.reward for sample in samples],
        "reward_sampled": [sample.reward for sample in samples],
        "num_prompt_tokens": [sample.num_prompt_tokens for sample in samples],
        "num_response_tokens": lengths,
        "finish_reason": ["length" if length > 900 else "stop" for length in lengths],
        "metrics": [json.dumps(sample.metrics) for sample in samples],
        "staleness": [sample.group % 5 for sample in samples],
        "language": ["en" if sample.key % 50 else "de" for sample in samples],
        "language_probability": [0.9] * num,
    }
    zero = {"turn_index": 0, "group_size": GROUP_SIZE, "source": "explorer", "labelled": False}
    fields = [*BATCH_SCHEMA, pa.field("language", pa.string()), pa.field("language_probability", pa.float64())]
    fields = [field for field in fields if field.name != "priority"]
    return pa.table(
        {field.name: pa.array(columns.get(field.name, [zero.get(field.name)] * num), field.type) for field in fields}
    )


class _Timed:
    """One thing to measure: seconds of CPU and of the clock for each round, and how many rows it goes over."""

    def __init__(self, call: Callable[[], object], rows: int) -> None:
        self.call, self.rows = call, rows
        self.cpu_s: list[float] = []
        self.wall_s: list[float] = []
        call()  # plans, imports and caches

    def round(self) -> None:
        gc.collect()
        gc.disable()
        wall, cpu = time.perf_counter(), time.process_time()
        self.call()
        self.cpu_s.append(time.process_time() - cpu)
        self.wall_s.append(time.perf_counter() - wall)
        gc.enable()

    def figures(self) -> dict[str, Any]:
        rates = [self.rows / seconds for seconds in self.cpu_s]
        return {
            "rows_per_s_per_core": _spread(rates),
            "us_per_row": round(1e6 * statistics.median(self.cpu_s) / self.rows, 3),
            "clock_us_per_row": round(1e6 * statistics.median(self.wall_s) / self.rows, 3),
        }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


# The chain's own cost


class Hashes(Operator):
    """About 20 µs a row of work on the text; drops one row in 64."""

    reads = frozenset({"response"})
    rowwise = True

    def __init__(self, salt: int) -> None:
        super().__init__(self.Config())
        self.salt = salt

    def apply(self, table: pa.Table) -> StageOutcome:
        return StageOutcome.keep_where(
            pa.array(kept_by_hash(table["response"].to_pylist(), self.salt)), "its hash is a multiple of 64"
        )


def kept_by_hash(texts: Sequence[str], salt: int) -> list[bool]:
    """Which texts stay; the work is the same by hand and in the chain."""
    kept = []
    for text in texts:
        digest = f"{salt}".encode()
        for _ in range(14):
            digest = hashlib.sha256(text.encode() + digest).digest()
        kept.append(digest[0] % 64 != 0)
    return kept


def by_hand(table: pa.Table, num_stages: int) -> int:
    """The five functions one after the other, each on what the one before left."""
    texts = table["response"]
    for salt in range(num_stages):
        texts = texts.filter(pa.array(kept_by_hash(texts.to_pylist(), salt)))
    return len(texts)


def chain_by_hash(num_stages: int) -> Chain:
    return Chain([Stage(salt + 1, f"hashes_{salt}", Hashes(salt)) for salt in range(num_stages)], min_group_size=2)


class Overhead:
    """Five stages through the chain against by hand, for one size of batch."""

    STAGES = 5

    def __init__(self, table: pa.Table) -> None:
        chain = chain_by_hash(self.STAGES)
        if chain.run(table, 1).decisions["kept"].to_pylist().count(True) != by_hand(table, self.STAGES):
            raise AssertionError("the chain keeps other rows than the functions")
        self.rows = table.num_rows
        self.chain = _Timed(lambda: chain.run(table), table.num_rows)
        self.hand = _Timed(lambda: by_hand(table, self.STAGES), table.num_rows)

    def round(self) -> None:
        for timed in (self.chain, self.hand) if len(self.chain.cpu_s) % 2 else (self.hand, self.chain):
            timed.round()

    def figures(self) -> dict[str, Any]:
        ratios = [chain / hand - 1 for chain, hand in zip(self.chain.cpu_s, self.hand.cpu_s, strict=True)]
        per_stage = 1e6 * statistics.median(self.hand.cpu_s) / self.rows / self.STAGES
        return {"rows": self.rows, "us_per_row_and_stage": round(per_stage, 2), "overhead": _spread(ratios)}


# Peers


def datasets_jobs(table: pa.Table) -> dict[str, Callable[[], object]]:
    """Plain `datasets.filter` and `map`, a Python function a row, nothing cached."""
    import datasets

    datasets.disable_progress_bars()
    datasets.disable_caching()
    data = datasets.Dataset(table)
    quiet = {"keep_in_memory": True, "load_from_cache_file": False}
    return {
        "reward_threshold": lambda: data.filter(lambda row: row["reward"] >= 0.5, **quiet),
        "sql_filter": lambda: data.filter(lambda row: row["num_response_tokens"] < 900, **quiet),
        "reward_shaping": lambda: data.map(
            lambda row: {"reward": row["reward"] + 0.1 * json.loads(row["metrics"])["seconds"]}, **quiet
        ),
    }


def trinity(rows: int, rounds: int) -> dict[str, Any]:
    """Rows a second of Trinity-RFT's operators, in its own environment; or the error."""
    try:
        python = python_of(TRINITY_REQUIREMENTS)
    except InstallationError as error:
        return {"error": f"not installed: {error}"}
    command = [str(python), "-m", "benchmarks.peers.trinity_operators", str(rows), str(rounds)]
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_PEER_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"did not end within {_PEER_LIMIT_S:.0f} s"}
    if done.returncode:
        return {"error": " | ".join(done.stderr.strip().splitlines()[-3:])[-500:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compared(ours: dict[str, Any], theirs: dict[str, Any], names: dict[str, str]) -> dict[str, float]:
    """Ours / theirs in rows a second, by their name; medians."""
    rate = "rows_per_s_per_core"
    return {
        name: round(ours[names.get(name, name)][rate]["median"] / figures[rate]["median"], 2)
        for name, figures in theirs.items()
        if names.get(name, name) in ours
    }


# All of it


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every measurement, `rounds` times in turn."""
    pa.set_cpu_count(1)
    samples = make_samples(4 * options.rows, seed=11)
    table = make_table(samples[: options.rows])
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as folder:
        _write_evaluation(Path(folder) / "evaluation.jsonl")
        chains = {name: _built(stage, Path(folder), table.schema) for name, stage in {**FILTERS, **OTHERS}.items()}
    stages = {name: _Timed(lambda chain=chain: chain.run(table), table.num_rows) for name, chain in chains.items()}  # type: ignore[misc]
    overheads = [Overhead(table), Overhead(make_table(samples))]
    plain: dict[str, _Timed] = {}
    if not options.skip_peers:
        plain = {name: _Timed(job, table.num_rows) for name, job in datasets_jobs(table).items()}
    load = []
    for number in range(options.rounds):
        load.append(round(os.getloadavg()[0], 2))
        _say(f"round {number + 1} of {options.rounds}, load {load[-1]}")
        timed: list[_Timed | Overhead] = [*stages.values(), *overheads, *plain.values()]
        for one in timed:
            one.round()
    figures = {name: timed.figures() for name, timed in stages.items()}
    slowest = min(FILTERS, key=lambda name: figures[name]["rows_per_s_per_core"]["median"])
    results: dict[str, Any] = {
        "operators": figures,
        "slowest_filter": {"name": slowest, **figures[slowest]["rows_per_s_per_core"]},
        "chain_overhead": [one.figures() for one in overheads],
    }
    results["data_juicer"] = None if options.skip_data_juicer else _part("pipeline_data_juicer")
    results["workers"] = None if options.skip_workers else _part("pipeline_workers")
    return {
        "rows": options.rows,
        "rounds": options.rounds,
        "cores": os.cpu_count(),
        "load": load,
        "results": results,
        "peers": {} if options.skip_peers else _peers(figures, plain, options),
    }


def _built(stage: dict[str, Any], folder: Path, schema: pa.Schema) -> Chain:
    chain = build_chain([stage], folder, min_group_size=2, schema=schema.append(pa.field("priority", pa.float64())))
    chain.prepare()
    return chain


def _write_evaluation(path: Path) -> None:
    prompts = [sample.prompt for sample in make_samples(8 * 512, seed=12)][::8]
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")


def _peers(figures: dict[str, Any], plain: dict[str, _Timed], options: argparse.Namespace) -> dict[str, Any]:
    import datasets

    found = {name: timed.figures() for name, timed in plain.items()}
    peers = {
        "datasets": {"version": datasets.__version__, "operators": found, "ours_compared": compared(figures, found, {})}
    }
    if options.skip_trinity:
        return peers
    _say("Trinity-RFT")
    theirs = trinity(options.rows, options.rounds)
    if "operators" in theirs:
        theirs["ours_compared"] = compared(figures, theirs["operators"], TRINITY_NAMES)
        theirs["ours_compared_with_objects"] = compared(figures, theirs["operators_with_objects"], TRINITY_NAMES)
    return {**peers, "trinity": theirs}


TRINITY_NAMES = {
    "reward_filter": "reward_threshold",
    "reward_std_filter": "drop_zero_variance_groups",
    "dapo_dynamic_sampling": "balance_groups_by_metric",
    "reward_shaping_mapper": "reward_shaping",
}
"""Their operator -> our stage that does the same."""


def _part(name: str) -> dict[str, Any]:
    """What another module measures; or its error, so that the rest is not lost."""
    _say(name)
    try:
        found: dict[str, Any] = importlib.import_module(f"benchmarks.{name}").measure()
    except Exception as error:  # noqa: BLE001 - recorded as data
        return {"error": f"{type(error).__name__}: {error}"}
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="rft bench pipeline", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=1024, help="experiences of a batch, a multiple of 8")
    parser.add_argument("--skip-peers", action="store_true", help="neither datasets nor Trinity-RFT")
    parser.add_argument(
        "--skip-trinity", action="store_true", help="not Trinity-RFT, which is installed when it is needed first"
    )
    parser.add_argument(
        "--skip-data-juicer", action="store_true", help="not what a Data-Juicer operator costs in our chain"
    )
    parser.add_argument("--skip-workers", action="store_true", help="not the workers on a real database")
    parser.add_argument("--json", action="store_true", help="the results are JSON anyway")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.rows < 64 or options.rows % GROUP_SIZE:
        parser.error("--rounds must be at least 1, --rows at least 64 and a multiple of 8")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers and processes are ended on the way out
    print(json.dumps(measure(options), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
