"""What a Data-Juicer operator costs through our chain, beside the same operator called by hand on the same Arrow table.

By hand, the text column becomes a list, the operator's own methods run, and the result becomes an Arrow table again (statistics as a column and rows
filtered, or the text replaced). `Chain.run` also checks, and records reasons, scores and decisions. In every round all run once, in a shuffled order.
Times are CPU time of the process, ratios those of the medians. `bare` is the operator alone on lists, without any conversion.

Our adapter makes Data-Juicer's names of statistics plain attributes, which speeds up a cheap filter (decision 0023). By hand is measured with
Data-Juicer as it is installed, without that; `ratio_quickened` compares with by hand with it.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from benchmarks.harness.arguments import argument_parser, integer
from benchmarks.harness.report import write
from benchmarks.harness.workload import GROUP_SIZE, make_samples

NUM_ROWS = 1024
ROUNDS = 20
STATS = "__dj__stats__"
CHEAP = ("text_length_filter", "clean_email_mapper")
OPERATORS: dict[str, dict[str, Any]] = {
    "text_length_filter": {"min_len": 1000},
    "words_num_filter": {"min_num": 200},
    "special_characters_filter": {"max_ratio": 0.25},
    "character_repetition_filter": {"max_ratio": 0.5},
    "whitespace_normalization_mapper": {},
    "clean_email_mapper": {},
}


def make_table(num_rows: int = NUM_ROWS) -> pa.Table:
    """Return experiences of the buffer benchmark with the columns that a chain requires."""
    samples = make_samples(num_rows, seed=5)
    return pa.table(
        {
            "experience_id": pa.array([sample.key for sample in samples], pa.int64()),
            "group_id": pa.array([sample.group for sample in samples], pa.int64()),
            "rollout_index": pa.array([sample.key % GROUP_SIZE for sample in samples], pa.int32()),
            "response": pa.array([sample.response for sample in samples], pa.string()),
            "reward": pa.array([sample.reward for sample in samples], pa.float64()),
        }
    )


def by_hand(op: Any, table: pa.Table) -> pa.Table:
    """Apply a filter or a mapper to an Arrow table without our code."""
    samples: dict[str, Any] = {"text": table["response"].to_pylist()}
    place = table.column_names.index("response")
    if not hasattr(op, "compute_stats"):
        return table.set_column(place, "response", pa.array(op.process_batched(samples)["text"]))
    samples[STATS] = [{} for _ in range(table.num_rows)]
    samples = op.compute_stats_batched(samples)
    keep = list(op.process_batched(samples))
    for name in samples[STATS][0]:
        table = table.append_column(name, pa.array([row[name] for row in samples[STATS]]))
    return table.filter(pa.array(keep))


def bare(op: Any, texts: list[str]) -> None:
    """Apply the operator alone to lists."""
    samples: dict[str, Any] = {"text": texts}
    if not hasattr(op, "compute_stats"):
        op.process_batched(samples)
        return
    samples[STATS] = [{} for _ in texts]
    list(op.process_batched(op.compute_stats_batched(samples)))


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    """Return milliseconds per batch of `NUM_ROWS` rows and ratios of each operator, and `worst_ratio` over all."""
    from operators.chain.build import build_chain
    from operators.data_juicer.runtime import make_operator

    table = make_table()
    gc.collect()
    gc.freeze()  # Data-Juicer's modules are a large heap that every collection below would traverse
    results: dict[str, Any] = {}
    for name, args in OPERATORS.items():
        chain = build_chain([{name: args}])
        chain.prepare()
        op = make_operator(name, args)
        _same(chain, op, table)
        ways: dict[str, Callable[[], object]] = {
            "chain": lambda chain=chain: chain.run(table),  # type: ignore[misc]
            "by_hand": lambda op=op: by_hand(op, table),  # type: ignore[misc]
            "by_hand_quickened": lambda op=op: by_hand(op, table),  # type: ignore[misc]
        }
        seconds: dict[str, list[float]] = {way: [] for way in (*ways, "bare")}
        shuffled = random.Random(7)
        # Cheap operators get more rounds: their times are a few tenths of a millisecond.
        for number in range(1 + rounds * (5 if name in CHEAP else 1)):
            texts = table["response"].to_pylist()
            timed = {**ways, "bare": lambda op=op, texts=texts: bare(op, texts)}  # type: ignore[misc]
            order = shuffled.sample(list(timed), len(timed))
            found = {way: _timed(way, timed[way]) for way in order}
            for way in seconds if number else ():  # the first round warms up
                seconds[way].append(found[way])
        medians = {way: statistics.median(values) for way, values in seconds.items()}
        results[name] = {
            **{f"{way}_ms": round(1000 * value, 3) for way, value in medians.items()},
            "ratio": round(medians["chain"] / medians["by_hand"], 3),
            "ratio_quickened": round(medians["chain"] / medians["by_hand_quickened"], 3),
            "ratio_to_bare": round(medians["chain"] / medians["bare"], 3),
        }
    gc.unfreeze()
    ratios = [result["ratio"] for result in results.values()]
    return {
        "rows": NUM_ROWS,
        "rounds": rounds,
        "operators": results,
        "worst_ratio": max(ratios),
        "median_ratio": round(statistics.median(ratios), 3),
    }


def _same(chain: Any, op: Any, table: pa.Table) -> None:
    """Raise if the chain and by hand have different results."""
    ours: list[pa.Table] = []
    chain.run(
        table, watch=lambda stage, before, changed, outcome: ours.append(changed.filter(outcome.reasons.is_null()))
    )
    hand = by_hand(op, table)
    if ours[0]["experience_id"].to_pylist() != hand["experience_id"].to_pylist():
        raise AssertionError("the chain keeps other rows than the operator")
    if ours[0]["response"].to_pylist() != hand["response"].to_pylist():
        raise AssertionError("the chain makes other texts than the operator")


def _timed(way: str, call: Callable[[], object]) -> float:
    """Return the seconds of a call. Only the chain and `by_hand_quickened` have Data-Juicer's names as plain attributes."""
    if way in ("chain", "by_hand_quickened"):
        return _seconds(call)
    from data_juicer.utils.constant import StatsKeys, StatsKeysConstant

    names = {name: value for name, value in vars(StatsKeysConstant).items() if name in vars(StatsKeys)}
    names = {name: value for name, value in names.items() if not name.startswith("_")}
    for name in names:
        delattr(StatsKeys, name)
    try:
        return _seconds(call)
    finally:
        for name, value in names.items():
            setattr(StatsKeys, name, value)


def _seconds(call: Callable[[], object]) -> float:
    gc.collect()
    gc.disable()
    started = time.process_time()
    call()
    ended = time.process_time()
    gc.enable()
    return ended - started


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser("pipeline_data_juicer", __doc__)
    parser.add_argument("--rounds", type=integer(), default=ROUNDS)
    options = parser.parse_args(arguments)
    write(options, measure(options.rounds))
    return 0
