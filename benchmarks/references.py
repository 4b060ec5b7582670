"""What foreign keys would cost: writes with one on every reference that `rft doctor` compares instead, against writes without.

`rft bench references` prints JSON. Two buffers; in the second, every column of `rft.unenforced_references` is a foreign key. Groups of 8
experiences of about 8 KB go to both in turns, so each round gives one ratio of experiences per second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import rftdata
from benchmarks.workload import GROUP_SIZE, Sample, make_samples
from rftdata import Buffer, Group, Rollout
from rftdata import Sequence as Experience


def enforce(buffer: Buffer) -> int:
    """Make every reference a foreign key, checked at the end of a transaction, since a write stores children first; return their number."""
    references = buffer.sql("SELECT * FROM rft.unenforced_references()").to_pylist()
    for r in references:
        buffer.sql(
            f"ALTER TABLE rft.{r['child']} ADD FOREIGN KEY ({r['referring']}) REFERENCES rft.{r['parent']} ({r['key']}) DEFERRABLE INITIALLY DEFERRED"
        )
    return len(references)


def make_experience(sample: Sample) -> Experience:
    return Experience(
        sample.prompt,
        sample.response,
        sample.token_ids,
        sample.num_prompt_tokens,
        "stop",
        behavior_logprobs=sample.logprobs[sample.num_prompt_tokens :],
        reward=sample.reward,
    )


def make_groups(num: int, first: int) -> list[Group]:
    samples = make_samples(num * GROUP_SIZE, seed=first, first_key=first * GROUP_SIZE)
    groups = []
    for start in range(0, len(samples), GROUP_SIZE):
        rollouts = [
            Rollout(index, "ok", sample.reward, [make_experience(sample)])
            for index, sample in enumerate(samples[start : start + GROUP_SIZE])
        ]
        groups.append(Group(rollouts, source="import", taskset="bench", task_key=str(samples[start].key)))
    return groups


def rate(buffer: Buffer, groups: Sequence[Group], at_once: int) -> float:
    """Experiences per second."""
    with buffer.writer("bench") as writer:
        began = time.perf_counter()
        for start in range(0, len(groups), at_once):
            writer.insert(*groups[start : start + at_once])
        return len(groups) * GROUP_SIZE / (time.perf_counter() - began)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="rft bench references", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--groups", type=int, default=256, help=f"groups of {GROUP_SIZE} experiences in each round")
    parser.add_argument("--at-once", type=int, default=8, help="groups in one write")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="rft-bench-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)  # the database may run as another user
        with (
            rftdata.open(str(Path(folder) / "without")) as without,
            rftdata.open(str(Path(folder) / "with")) as with_keys,
        ):
            try:
                for buffer in (without, with_keys):
                    buffer.create_run(name="bench", config={}, seed=0, steps=1, pipeline_version="none")
                num_keys = enforce(with_keys)
                rates: list[tuple[float, float]] = []
                for number in range(options.rounds + 1):
                    groups = make_groups(options.groups, number * options.groups)
                    pair = {
                        buffer: rate(buffer, groups, options.at_once)
                        for buffer in ((without, with_keys) if number % 2 else (with_keys, without))
                    }
                    rates.append((pair[without], pair[with_keys]))
            finally:
                for buffer in (without, with_keys):
                    if buffer.server:
                        buffer.server.stop()
    ratios = [b / a for a, b in rates[1:]]  # the first round warms up
    print(
        json.dumps(
            {
                **vars(options),
                "num_keys": num_keys,
                "experiences_per_s": round(statistics.median(a for a, _ in rates[1:])),
                "ratio_with_keys": round(statistics.median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in ratios],
            },
            indent=2,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
