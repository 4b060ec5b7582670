"""One optimisation step of our trainer, beside one of TRL's GRPO trainer: the same device, tensors, weights and precision, in one run.

Models have random weights (Qwen2.5 and Llama-3.1 shapes), batches are made from a seed, and the loss is DAPO's, with AdamW:

    A       64 sequences of varied lengths, 33,083 tokens
    U       64 sequences of 512 tokens: nothing to pad
    B       16 sequences of 2,400 to 4,600 tokens, 60,019 tokens
    C       64 sequences, prompts of about 500 tokens shared by eight, answers of 16 to 200
    ladder  one sequence a step, longer every time, until memory is full; with and without activation checkpointing

`trl` is `GRPOTrainer.train()` with its rollouts replaced (loss_type dapo, beta 0), `trl-liger` the same with Liger's layers. Each system is measured
with several sizes of its micro-batches; the fastest is compared. Every case is a process of its own. Running out of memory is a result.

`--ranks 1,4,8` trains on so many GPUs, in this order, and compares each with the fewest (`scaling`). TRL has one GPU. Without `--grow` the batch stays
the same and is soon too small to be divided evenly: in A at 8B, counted in tokens, eight GPUs cannot make more than 6.8 times one. With `--grow` the
batch is repeated for every GPU, each time with other prompts, so that each GPU has the same work. The first step, which is not timed, has one copy of
the batch on any number of GPUs, so that its loss and gradients are the same. Cases that need more GPUs than exist are listed in `not_run`. A row is
one case:

    seconds            median of the timed steps; the first steps, which compile and allocate, do not count
    tokens_per_second  tokens of the batch, a prompt counted for each of its sequences
    peak_gib           most memory of tensors on the GPU in any step (the first device); on a CPU that of the process
    mfu                6 · parameters · tokens / seconds / peak FLOP/s of the device, without attention and recomputation
    computed_mfu       the same with the tokens that the model computes: a prompt shared by several sequences counts once
    step_records       of each step, among others collection_ms: Python's garbage collections
    profile            with `--profile`: milliseconds of one more step by class of kernels, its longest kernels, its matrix products by shape, and how
                       long the device is idle before the first kernel, between kernels and after the last one
    loss, grad_norm    of the first step; `agrees` is false where they differ from TRL's, or without TRL from ours on the fewest GPUs, by more than
                       `tolerance`

The exit code is 1 where a row disagrees, or failed for another reason than memory or time.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from benchmarks.harness.arguments import argument_parser, integer, integers, kept_folder, names, positive
from benchmarks.harness.layout import too_few_gpus
from benchmarks.harness.processes import Processes, append_line, read_lines
from benchmarks.harness.report import package_version, say, write
from benchmarks.harness.shapes import SHAPES, spacious_folder, write_model
from benchmarks.trainer import comparisons
from benchmarks.trainer.batches import BATCHES
from benchmarks.trainer.case import LADDER, Case, DType, System
from benchmarks.trainer.kernels import table
from benchmarks.trainer.steps import run_case

RUNGS = (8192, 16384, 24576, 32768, 65536, 98304, 131_072, 196_608, 262_144)
TRL_SEQUENCES = {"A": (8, 16, 32), "U": (8, 16, 32), "B": (2, 4), "C": (8, 16, 32)}
OUR_TOKENS = (8192, 16384, 32768)
PEAK_FLOP_PER_S = {"H100": 989e12, "H200": 989e12}  # dense bfloat16, by the data sheet
TOLERANCE = {"float32": 1.0e-4, "mixed": 1.0e-2, "bfloat16": 2.0e-2}
_PACKAGES = {"ours": "torch", "trl": "trl", "trl-liger": "liger_kernel"}
_VERSIONS = ("torch", "transformers", "trl", "liger-kernel")
_SHAPES_ON_GPU = ("0.5B", "1.5B")
_PROGRESS = (
    "shape",
    "batch",
    "system",
    "micro_batch",
    "ranks",
    "seconds",
    "tokens_per_second",
    "peak_gib",
    "agrees",
    "status",
)
_DRY_RUN_SCALE = 0.05


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.grow and options.warm_up < 1:
        parser.error("--warm-up 0 would time the first step, whose batch --grow does not repeat; give 1 or more")
    systems = options.systems or [name for name in _PACKAGES if importlib.util.find_spec(_PACKAGES[name])]
    room = sum(3 * SHAPES[shape].num_parameters for shape in options.shapes or _SHAPES_ON_GPU)
    trl = [] if set(systems) <= {"ours"} else ["benchmarks.trainer.trl"]
    with kept_folder(options, spacious_folder(room)) as folder:
        result = measure(options, systems, Processes(folder, ["benchmarks.trainer.steps", *trl]))
    write(options, result)
    return int(any(row["status"] == "failed" or row["agrees"] is False for row in result["rows"]))


def measure(options: argparse.Namespace, systems: Sequence[System], processes: Processes) -> dict[str, Any]:
    """Run every case until `--seconds` are over."""
    on_gpu = processes.device["name"] != "CPU"
    shapes = options.shapes or (_SHAPES_ON_GPU if on_gpu else ["tiny"])
    dtype: DType = options.dtype or ("mixed" if on_gpu else "float32")
    scale = options.scale or (1.0 if on_gpu else _DRY_RUN_SCALE)
    peak = next((rate for name, rate in PEAK_FLOP_PER_S.items() if name in processes.device["name"]), None)
    deadline = time.monotonic() + options.seconds
    rows: list[dict[str, Any]] = []
    not_run: list[dict[str, Any]] = []
    not_started = 0
    for shape in shapes:
        if problem := processes.run(write_model, SHAPES[shape], processes.folder / shape):
            raise RuntimeError(f"the model {shape} cannot be written: {problem}")
        for case in _cases(shape, dtype, scale, systems, options):
            if _too_large(case, rows):
                continue
            if (reason := reason_not_to_run(case, processes.device)) is not None:
                setting = (*comparisons.SETTING, "micro_batch")
                not_run.append({name: getattr(case, name) for name in setting} | {"reason": reason})
                continue
            if time.monotonic() > deadline:
                not_started += 1
                continue
            row = _run(case, processes, peak, min(options.case_seconds, deadline - time.monotonic()))
            rows.append(row)
            say(json.dumps({name: row[name] for name in _PROGRESS}))
            if row["profile"]:
                say(table(row["profile"]))
            if options.output:
                append_line(options.output, row)
    comparisons.compare_first_steps(rows, TOLERANCE)
    return {
        "device": processes.device,
        "versions": {name: package_version(name) for name in _VERSIONS},
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF"),
        "mfu": {
            "formula": "6 * num_active_parameters * num_tokens / seconds / (peak_flop_per_s * ranks)",
            "peak_flop_per_s": peak,
        },
        "tolerance": TOLERANCE[dtype],
        "not_started": not_started,
        "not_run": not_run,
        "rows": rows,
        "comparisons": comparisons.comparisons(rows),
        "scaling": comparisons.scaling(rows),
        "longest": comparisons.longest(rows),
    }


def _cases(
    shape: str, dtype: DType, scale: float, systems: Sequence[System], options: argparse.Namespace
) -> Iterator[Case]:
    for batch in options.cases:
        given = options.checkpointing or ([False, True] if batch == LADDER else [False])
        for checkpointing in given:
            for system in systems:
                sizes: Sequence[int] = (
                    options.tokens if system == "ours" else options.sequences or TRL_SEQUENCES.get(batch, ())
                )
                one_size = 1 if system != "ours" else max(options.tokens)
                of_system = options.ranks if system == "ours" else (1,)
                for ranks, size in itertools.product(of_system, [one_size] if batch == LADDER else sizes):
                    yield Case(
                        shape,
                        batch,
                        system,
                        dtype,
                        checkpointing,
                        size,
                        ranks=ranks,
                        copies=ranks if options.grow and batch != LADDER else 1,
                        steps=options.steps,
                        warm_up=options.warm_up,
                        scale=scale,
                        rungs=tuple(max(32, round(rung * scale)) for rung in options.rungs),
                        trainer=tuple(options.trainer.items()) if system == "ours" else (),
                        profiles=options.profile and batch != LADDER,
                    )


def reason_not_to_run(case: Case, device: dict[str, Any]) -> str | None:
    """Return why a case does not fit the machine, None if it does. On a CPU, ranks are processes."""
    return None if device["name"] == "CPU" else too_few_gpus(case.ranks, device["num_gpus"])


def _too_large(case: Case, rows: Sequence[dict[str, Any]]) -> bool:
    """Return whether the case ran out of memory with a smaller micro-batch."""
    known = ("shape", "batch", "system", "dtype", "checkpointing", "ranks")
    return any(
        row["status"] == "out of memory"
        and row["micro_batch"] < case.micro_batch
        and all(row[name] == getattr(case, name) for name in known)
        for row in rows
    )


def _run(case: Case, processes: Processes, peak_flop_per_s: float | None, limit_s: float) -> dict[str, Any]:
    output, log = processes.folder / "steps.jsonl", processes.folder / "log.txt"
    for file in (output, log):
        file.unlink(missing_ok=True)
    started = time.monotonic()
    problem = processes.run(run_case, case, processes.folder / case.shape, output, log, limit_s=limit_s)
    lines = read_lines(output)
    end = lines.pop() if lines and "status" in lines[-1] else {"status": "failed", "error": problem}
    if end["status"] == "failed":
        if problem and problem.startswith("killed"):
            end["status"] = "out of time"
        sys.stderr.write(log.read_text(errors="replace")[-3000:] if log.exists() else "")
    return row_of(case, lines, peak_flop_per_s) | end | {"case_seconds": round(time.monotonic() - started, 1)}


def row_of(case: Case, lines: Sequence[dict[str, Any]], peak_flop_per_s: float | None) -> dict[str, Any]:
    """Return the row of a case from the lines of its steps; figures are None where too few steps ended."""
    shape = SHAPES[case.shape]
    profile = next((line["profile"] for line in lines if "profile" in line), None)
    lines = [line for line in lines if "profile" not in line]
    timed = lines if case.batch == LADDER else lines[case.warm_up :]
    for line in lines:
        for name, tokens in (("mfu", line["num_tokens"]), ("computed_mfu", line["computed_tokens"])):
            rate = 6 * shape.num_active_parameters * tokens / line["seconds"]
            line[name] = None if peak_flop_per_s is None else rate / (peak_flop_per_s * case.ranks)
    setting = {name: value for name, value in asdict(case).items() if name not in ("rungs", "trainer", "profiles")}
    middle = statistics.median_low([line["seconds"] for line in timed]) if timed else None
    # The longest sequence that fits, for the ladder; otherwise the step whose time is the median.
    chosen: dict[str, Any] = {}
    if timed:
        chosen = timed[-1] if case.batch == LADDER else next(line for line in timed if line["seconds"] == middle)
    return setting | {
        "trainer": dict(case.trainer),
        "num_parameters": shape.num_parameters,
        "num_active_parameters": shape.num_active_parameters,
        "num_tokens": chosen.get("num_tokens"),
        "seconds": chosen.get("seconds"),
        "mfu": chosen.get("mfu"),
        "computed_mfu": chosen.get("computed_mfu"),
        "tokens_per_second": chosen["num_tokens"] / chosen["seconds"] if chosen else None,
        "peak_gib": max((line["peak_gib"] for line in lines), default=None),
        "first_step_seconds": lines[0]["seconds"] if lines else None,
        "loss": lines[0]["loss"] if lines else None,
        "grad_norm": lines[0]["grad_norm"] if lines else None,
        "agrees": None,
        "profile": profile,
        "step_records": list(lines),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argument_parser("trainer", __doc__)
    parser.add_argument("--shapes", type=names(*SHAPES), help="by default 0.5B,1.5B on a GPU, tiny on a CPU")
    parser.add_argument("--cases", type=names(*BATCHES, LADDER), default=[*BATCHES, LADDER])
    parser.add_argument("--systems", type=names(*get_args(System)), help="by default those that are installed")
    parser.add_argument("--steps", type=integer(), default=3, help="timed steps")
    parser.add_argument("--warm-up", type=integer(0), default=2, help="steps before them")
    parser.add_argument(
        "--dtype",
        choices=get_args(DType),
        help="mixed (float32 weights, bfloat16 products; on a GPU the default), bfloat16 or float32 for both",
    )
    parser.add_argument(
        "--checkpointing",
        type=lambda text: [each == "on" for each in names("on", "off")(text)],
        help="on, off or both; by default off, and both for the ladder",
    )
    parser.add_argument(
        "--profile", action="store_true", help="record one more step by kernel (a table on stderr); it is not timed"
    )
    parser.add_argument("--tokens", type=integers(), default=OUR_TOKENS, help="of our micro-batches")
    parser.add_argument("--sequences", type=integers(), help="of TRL's micro-batches; each must divide the batch")
    parser.add_argument("--rungs", type=integers(), default=RUNGS, help="lengths of the ladder, tokens")
    parser.add_argument("--scale", type=positive, help="multiplies all lengths; by default 1, and 0.05 on a CPU")
    parser.add_argument("--ranks", type=integers(), default=(1,), help="GPUs of our learner; TRL has one")
    parser.add_argument("--grow", action="store_true", help="repeat the batch for every GPU in all steps but the first")
    parser.add_argument(
        "--trainer", type=json.loads, default={}, metavar="JSON", help="keys of TrainerConfig for our learner"
    )
    parser.add_argument(
        "--seconds", type=positive, default=1e9, help="of all cases; a case that is running then is killed"
    )
    parser.add_argument("--case-seconds", type=positive, default=300.0, help="after which a case is killed")
    parser.add_argument("--output", type=Path, help="file to which rows are appended as cases end")
    return parser
