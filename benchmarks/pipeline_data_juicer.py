"""What a Data-Juicer operator costs through our chain, against the same operator called by hand on the same Arrow table.

By hand is what one would write: the text column as a list, the operator's own methods, and the result as an Arrow table again (statistics as a
column and rows filtered, or the text replaced). Through the chain is `Chain.run`, with everything it does: checks, reasons, scores, decisions. In every
round all run once, in a shuffled order; times are CPU time of the process, and the ratio is that of the medians. `bare` is the operator alone
on lists that are ready, without any conversion.

Our adapter makes Data-Juicer's names of statistics plain attributes, which a cheap filter gains from (see decision 0023). By hand is measured
as Data-Juicer is shipped, without that; `ratio_quickened` is against by hand with it.

`python -m benchmarks.pipeline_data_juicer` prints JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from benchmarks.workload import GROUP_SIZE, make_samples

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
    """Experiences of the buffer benchmark, with the columns that a chain insists on."""
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
    """A filter or a mapper on an Arrow table, without our code."""
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
    """The operator alone, on lists that are ready."""
    samples: dict[str, Any] = {"text": texts}
    if not hasattr(op, "compute_stats"):
        op.process_batched(samples)
        return
    samples[STATS] = [{} for _ in texts]
    list(op.process_batched(op.compute_stats_batched(samples)))


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    """Milliseconds per batch of `NUM_ROWS` rows and ratios, per operator; `worst_ratio` over all."""
    from operators.chain.build import build_chain
    from operators.data_juicer.runtime import make_operator

    table = make_table()
    gc.collect()
    gc.freeze()  # Data-Juicer's modules are a large heap, which every collection below would walk
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
        # Cheap operators get more rounds: what is compared there is a few tenths of a millisecond.
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
    """Both ways must come to the same, or their times say nothing."""
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
    """Seconds of a call; only ours and one of those by hand have Data-Juicer's names as plain attributes."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    print(json.dumps(measure(options.rounds), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
