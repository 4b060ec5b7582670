"""What pipeline stages and the chain around them cost, beside plain `datasets.map`/`filter`, Trinity-RFT's operators and Data-Juicer's own way.

- operators: rows a second and core of every built-in stage, through `Chain.run` with nothing else in the chain, so checks, reasons and decisions
  are included. The experiences are those of the buffer benchmark (2 KB responses, groups of 8), as Arrow batches of `--rows`.
- chain_overhead: five stages of at least 20 µs a row, each dropping a few rows, through the chain and by hand on the same texts: CPU time of the
  chain / CPU time by hand − 1.
- peers: the same work done by others. Ours starts from Arrow and ends with a decision, a stage and a reason for every row. `datasets` starts from
  Arrow, too. Trinity-RFT starts from Python objects that exist before the clock starts (`operators`), or that are made from the stored bytes first, as
  when they come from its buffer (`operators_with_objects`). Ratios are ours / theirs in rows a second.
- data_juicer, workers: see `rft bench pipeline_data_juicer` and `rft bench pipeline_workers`.

Each round runs all measurements alternately. Times are CPU seconds of the process, which depend little on other work of the machine. Arrow and DuckDB
use one thread.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.harness.arguments import argument_parser, integer
from benchmarks.harness.report import ROOT, exit_on_sigterm, say, spread, write
from benchmarks.harness.workload import GROUP_SIZE, Sample, make_samples
from benchmarks.peers.catalogue import TRINITY_REQUIREMENTS
from benchmarks.peers.environment import InstallationError, python_of
from operators.base import BATCH_SCHEMA, Operator, StageOutcome
from operators.chain.build import build_chain
from operators.chain.chain import Chain
from operators.chain.stage import Stage

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
"""Stages that decide on numbers or by a query; the goal is 100 thousand rows a second."""

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
"""Stages that compute values; the last ones read the texts."""


def make_table(samples: Sequence[Sample]) -> pa.Table:
    """Return the experiences as a batch of whole groups."""
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
        "num_trained_tokens": lengths,
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
    """A call that is measured: seconds of CPU and of the clock for each round, and the number of rows."""

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
            "rows_per_s_per_core": spread(rates, 3),
            "us_per_row": round(1e6 * statistics.median(self.cpu_s) / self.rows, 3),
            "clock_us_per_row": round(1e6 * statistics.median(self.wall_s) / self.rows, 3),
        }


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
    """Return which texts stay. By hand and in the chain the work is the same."""
    kept = []
    for text in texts:
        digest = f"{salt}".encode()
        for _ in range(14):
            digest = hashlib.sha256(text.encode() + digest).digest()
        kept.append(digest[0] % 64 != 0)
    return kept


def by_hand(table: pa.Table, num_stages: int) -> int:
    """Call the functions one after the other, each on the texts that the one before kept."""
    texts = table["response"]
    for salt in range(num_stages):
        texts = texts.filter(pa.array(kept_by_hash(texts.to_pylist(), salt)))
    return len(texts)


def chain_by_hash(num_stages: int) -> Chain:
    return Chain([Stage(salt + 1, f"hashes_{salt}", Hashes(salt)) for salt in range(num_stages)], min_group_size=2)


class Overhead:
    """Five stages through the chain and by hand, for one size of batch."""

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
        return {"rows": self.rows, "us_per_row_and_stage": round(per_stage, 2), "overhead": spread(ratios, 3)}


def datasets_jobs(table: pa.Table) -> dict[str, Callable[[], object]]:
    """Return calls of plain `datasets.filter` and `map`: a Python function for each row, nothing cached."""
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
    """Return rows a second of Trinity-RFT's operators, measured in its own environment, or the error."""
    try:
        python = python_of(TRINITY_REQUIREMENTS)
    except InstallationError as error:
        return {"error": f"not installed: {error}"}
    command = [str(python), "-m", "benchmarks.peers.trinity_operators", str(rows), str(rounds)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_PEER_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"did not end within {_PEER_LIMIT_S:.0f} s"}
    if done.returncode:
        return {"error": " | ".join(done.stderr.strip().splitlines()[-3:])[-500:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compared(ours: dict[str, Any], theirs: dict[str, Any], names: dict[str, str]) -> dict[str, float]:
    """Return ours / theirs in rows a second by their name; medians."""
    rate = "rows_per_s_per_core"
    return {
        name: round(ours[names.get(name, name)][rate]["median"] / figures[rate]["median"], 2)
        for name, figures in theirs.items()
        if names.get(name, name) in ours
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements alternately, `--rounds` times."""
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
        say(f"round {number + 1} of {options.rounds}, load {load[-1]}")
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
    results["data_juicer"] = None if options.skip_data_juicer else _part("data_juicer")
    results["workers"] = None if options.skip_workers else _part("workers")
    return {"load": load, "results": results, "peers": {} if options.skip_peers else _peers(figures, plain, options)}


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
    say("Trinity-RFT")
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
"""Operator of Trinity-RFT → our stage that does the same."""


def _part(name: str) -> dict[str, Any]:
    """Return what another module measures, or its error, so that the rest is not lost."""
    say(name)
    try:
        found: dict[str, Any] = importlib.import_module(f"benchmarks.pipeline.{name}").measure()
    except Exception as error:  # noqa: BLE001 - recorded as data
        return {"error": f"{type(error).__name__}: {error}"}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser("pipeline", __doc__)
    parser.add_argument("--rounds", type=integer(), default=9)
    parser.add_argument("--rows", type=integer(64), default=1024, help="experiences of a batch, a multiple of 8")
    parser.add_argument("--skip-peers", action="store_true", help="neither datasets nor Trinity-RFT")
    parser.add_argument("--skip-trinity", action="store_true", help="not Trinity-RFT, which its first use installs")
    parser.add_argument("--skip-data-juicer", action="store_true", help="without `pipeline_data_juicer`")
    parser.add_argument("--skip-workers", action="store_true", help="without `pipeline_workers`")
    options = parser.parse_args(arguments)
    if options.rows % GROUP_SIZE:
        parser.error(f"argument --rows: {options.rows} is not a multiple of {GROUP_SIZE}")
    exit_on_sigterm()
    write(options, measure(options))
    return 0
