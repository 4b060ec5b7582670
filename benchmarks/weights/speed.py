"""How long weights take from trainer ranks into live engines, beside what the same machine copies and broadcasts at most.

Every combination of shape, layout and receivers runs in processes of its own. A layout is engines + ranks of the trainer; `2x2+4` are two engines of
two processes each (tensor parallelism) and four ranks. The trainer is the real learner with random float32 weights; every rank holds its share.
Weights travel in bfloat16, by NCCL between GPUs and by gloo between CPUs. Every rank sends the rows that it holds; tied weights travel once. Receivers
are `engines` (vLLM, sampling meanwhile) or `plain`: processes that receive and hash, and load nothing. A row is one case; times are medians over the
transfers after the first, in seconds:

    first_seconds        the first transfer, with the forming of its group
    seconds              from the plan to the last receiver that has applied the weights
    transfer_seconds     the same with plain receivers: cast, pack, hash, broadcast, unpack, compare
    trainer_seconds      until the trainer's ranks could continue; send_seconds of that from the first bucket to the last
    gb_per_s             bytes of the tensors / transfer_seconds
    of_broadcast         gb_per_s / that of the plain broadcast of one big buffer (`limits`) to as many receivers
    landing_seconds      seconds - transfer_seconds: what loading into the engine adds
    pause_seconds        the longest time for which an engine took no step; open requests are computed again after it
    of_first             seconds / seconds of the same shape and receivers with the first layout

The limits are, between GPUs, a peer copy and NCCL's broadcast; on a CPU a copy in memory and gloo's broadcast. Cases for which the machine has too few
GPUs or too little memory are listed in `not_run`, with the reason.

The exit code is 1 where a case failed, the hashes of a transfer differ, or an engine does not answer like one that was started on the trainer's
weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import argument_parser, integer, kept_folder, names, positive
from benchmarks.harness.layout import layouts, too_few_gpus
from benchmarks.harness.processes import Processes, append_line, read_lines
from benchmarks.harness.report import package_version, say, write
from benchmarks.harness.shapes import SHAPES, spacious_folder
from benchmarks.weights import case as case_process
from benchmarks.weights import results
from benchmarks.weights.case import Case, Folders
from benchmarks.weights.limits import measure_limits
from benchmarks.weights.receivers import Kind
from rftcore.engines.vllm_engine import vllm_version

_SHAPES_ON_GPU = ("135M", "1.5B", "8B")
_LAYOUTS = "1+1,1+2,1+3,2+1,2+2,2+3,1x2+1,1x2+2,1x2+3,2x2+1,2x2+2,2x2+3"
_LIMIT_BYTES = 1 << 30  # largest buffer of the limits
_PROCESS_BYTES = {"plain": 1.0e9, "engines": 3.0e9}  # of a process on a CPU beside the weights
_ENGINE_COPIES = 3  # an engine's own weights, a bucket and its packed copy while they load


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    room = sum(2 * SHAPES[shape].num_parameters for shape in options.shapes or _SHAPES_ON_GPU)
    with kept_folder(options, spacious_folder(room)) as folder:
        result = _Benchmark(options, Processes(folder, [])).measure()
    write(options, result)
    return int(any(results.is_wrong(row) for row in result["rows"]))


class _Benchmark:
    """Runs every case until `--seconds` are over."""

    def __init__(self, options: argparse.Namespace, processes: Processes) -> None:
        self._options, self._processes = options, processes
        self._device = processes.device | {"memory_bytes": _available_memory()}
        self._on_gpu = processes.device["num_gpus"] > 0
        self._deadline = time.monotonic() + options.seconds
        self._rows: list[dict[str, Any]] = []
        self._limits: list[dict[str, Any]] = []
        self._not_run: list[dict[str, Any]] = []

    def measure(self) -> dict[str, Any]:
        shapes = self._options.shapes or (_SHAPES_ON_GPU if self._on_gpu else ["tiny"])
        for shape in shapes:
            fitting = []
            for case in self._cases(shape):
                reason = reason_not_to_run(case, self._device)
                fitting += [] if reason else [case]
                if reason:
                    self._leave_out(case, reason)
            if fitting:
                self._measure_shape(shape, fitting)
        results.complete(self._rows, self._limits)
        packages = ("torch", "transformers")
        return {
            "device": self._device,
            "versions": {name: package_version(name) for name in packages} | {"vllm": vllm_version()},
            "limits": self._limits,
            "rows": self._rows,
            "not_run": self._not_run,
        }

    def _cases(self, shape: str) -> Iterator[Case]:
        options = self._options
        kinds: Sequence[Kind] = options.receivers or (["plain", "engines"] if vllm_version() else ["plain"])
        for layout in options.layouts:
            for kind in kinds:
                yield Case(
                    shape,
                    layout.ranks,
                    layout.engines,
                    layout.tensor_parallel,
                    kind,
                    following=options.following,
                    bucket_mib=options.bucket_mib,
                    threads=self._device["threads"],
                    on_gpu=self._on_gpu,
                )

    def _measure_shape(self, shape: str, cases: Sequence[Case]) -> None:
        parent = self._processes.folder
        folders = Folders(parent / shape, parent / f"{shape}-blank", parent / f"{shape}-reference.json")
        log = parent / "log.txt"
        with_engines = any(case.receivers == "engines" for case in cases)
        self._must(f"the model {shape}", case_process.prepare, shape, folders, with_engines)
        self._limit(shape, cases)
        if with_engines:
            case = next(case for case in cases if case.receivers == "engines")
            self._must(f"the reference of {shape}", case_process.write_reference_of, case, folders, log)
        for case in cases:
            if time.monotonic() > self._deadline:
                self._leave_out(case, "no time left")
                continue
            self._run(case, folders, log)

    def _limit(self, shape: str, cases: Sequence[Case]) -> None:
        file = self._processes.folder / "limit.json"
        num_bytes = min(2 * SHAPES[shape].num_parameters, _LIMIT_BYTES)
        for num_ranks in sorted({1 + case.num_receivers for case in cases}):
            work = (num_bytes, num_ranks, self._device["threads"], self._on_gpu, self._options.following, file)
            self._must("the limits of this machine", measure_limits, *work)
            self._limits.append({"shape": shape, **json.loads(file.read_text())})

    def _run(self, case: Case, folders: Folders, log: Path) -> None:
        output = self._processes.folder / "transfers.jsonl"
        for file in (output, log):
            file.unlink(missing_ok=True)
        limit_s = min(self._options.case_seconds, max(1.0, self._deadline - time.monotonic()))
        started = time.monotonic()
        problem = self._processes.run(case_process.run_case, case, folders, output, log, limit_s=limit_s)
        lines = read_lines(output)
        end = lines.pop() if lines and "status" in lines[-1] else {"status": "failed", "error": problem}
        if end["status"] != "ok":
            sys.stderr.write(log.read_text(errors="replace")[-3000:] if log.exists() else "")
        row = results.row_of(case, lines) | end | {"case_seconds": round(time.monotonic() - started, 1)}
        self._rows.append(row)
        results.complete(self._rows, self._limits)
        say(json.dumps({name: value for name, value in row.items() if name != "transfers"}))
        if self._options.output:
            append_line(self._options.output, row)

    def _must(self, what: str, work: Any, *arguments: Any) -> None:
        if problem := self._processes.run(work, *arguments, limit_s=self._options.case_seconds):
            log = self._processes.folder / "log.txt"
            sys.stderr.write(log.read_text(errors="replace")[-3000:] if log.exists() else "")
            raise RuntimeError(f"{what} could not be made: {problem}")

    def _leave_out(self, case: Case, reason: str) -> None:
        setting = ("shape", "ranks", "engines", "tensor_parallel", "receivers")
        self._not_run.append({name: getattr(case, name) for name in setting} | {"reason": reason})


def reason_not_to_run(case: Case, device: dict[str, Any]) -> str | None:
    """Return why a case does not fit the machine, None if it does."""
    if case.receivers == "engines" and (reason := _reason_without_engine(case)) is not None:
        return reason
    if case.on_gpu:
        return too_few_gpus(case.num_devices, device["num_gpus"])
    num_parameters = SHAPES[case.shape].num_parameters
    # Every rank opens the whole model in float32, and together they keep one copy.
    trainer = 4 * num_parameters * (case.ranks + 1)
    copies = _ENGINE_COPIES if case.receivers == "engines" else 0
    needed = trainer + case.num_receivers * (_PROCESS_BYTES[case.receivers] + copies * 2 * num_parameters)
    if needed > device["memory_bytes"]:
        return f"needs {needed / 1e9:.0f} GB of memory, {device['memory_bytes'] / 1e9:.0f} GB are free"
    return None


def _reason_without_engine(case: Case) -> str | None:
    """Return why vLLM does not start on the shape of a case, None if it does."""
    if vllm_version() is None:
        return "vLLM is not installed"
    if case.shape == "tiny":
        return "vLLM's attention does not support heads of 16"
    heads, parts = SHAPES[case.shape].num_heads, case.tensor_parallel
    return f"{heads} heads cannot be divided among {parts} processes" if heads % parts else None


def _available_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def _parser() -> argparse.ArgumentParser:
    parser = argument_parser("weights", __doc__)
    parser.add_argument("--shapes", type=names(*SHAPES), help="by default 135M,1.5B,8B on GPUs, tiny on a CPU")
    parser.add_argument("--layouts", type=layouts, default=_LAYOUTS, help=f"by default {_LAYOUTS}")
    parser.add_argument("--receivers", type=names("plain", "engines"), help="by default both if vLLM is installed")
    parser.add_argument("--following", type=integer(), default=5, help="timed transfers after the first")
    parser.add_argument("--bucket-mib", type=integer(), default=256, help="sync.bucket_mib")
    parser.add_argument(
        "--seconds", type=positive, default=1e9, help="of all cases; a case that is running then is killed"
    )
    parser.add_argument("--case-seconds", type=positive, default=300.0, help="after which a case is killed")
    parser.add_argument("--output", type=Path, help="file to which rows are appended as cases end")
    return parser
