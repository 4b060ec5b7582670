"""What turns on one GPU cost, and whether they are right: an engine that sleeps while the real learner trains on the same GPU.

`rft bench turns [--shapes 135M,1.5B] [--turns 10] [--json]` runs every shape in processes of its own: the learner with float32 weights and AdamW, and vLLM with
`gpu_memory_utilization` 0.85 and CUDA graphs. A case is a list of sections, each a row as soon as it ends; after a failure the case ends.

    start       bytes of the device in use before and with the engine, and seconds of its start
    sleep       for levels 2 and 1: seconds to sleep and to wake, bytes freed, bytes that stay in use
    empty       an engine without weights computes nothing: after it woke, after a file that is damaged, after a transfer that broke off; then a file heals it
    turn        medians of the turns: sleep, to_device, update, wake_weights, send, receive, leave_device, wake_cache (seconds), and the largest
                number of bytes that the learner allocated; fits_beside: whether the learner would have fitted beside the engine awake
    requests    requests that were open over a turn: all complete, with tokens of both versions
    right       after all turns: no tensor differs from the file of the last version; mean difference of log-probabilities from transformers, nats
    transfer    by ipc, gloo and a file in shared memory, engine awake and sampling: seconds, and its pause; `plain` receives and loads nothing
    killed      a receiver that is killed within a group: the bytes that stay in use, and whether the next transfer succeeds

On a CPU nothing is freed, and the same calls are made: `--shapes small`. The exit code is 1 where a section failed or a check in it is false.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import turns_case
from benchmarks.trainer import Processes, names, version
from benchmarks.trainer_shapes import SHAPES, spacious_folder
from rftcore.engines.vllm_engine import vllm_version


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    deadline = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="rft-bench-turns-", dir=spacious_folder(20 << 30)) as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        processes = Processes(folder, ["ours"])
        on_gpu = processes.device["num_gpus"] > 0
        shapes = options.shapes or (("135M", "1.5B") if on_gpu else ("small",))
        rows: list[dict[str, Any]] = []
        for shape in shapes:
            case = turns_case.Case(shape, options.turns, options.scale, processes.device["threads"], on_gpu)
            rows += _run(processes, case, deadline, options.output)
        result = {
            "device": processes.device,
            "versions": {"torch": version("torch"), "vllm": vllm_version()},
            "rows": rows,
            "wrong": [f"{row['shape']} {row['section']}" for row in rows if turns_case.is_wrong(row)],
        }
    print(json.dumps(result, indent=1))
    return int(bool(result["wrong"]))


def _run(processes: Processes, case: turns_case.Case, deadline: float, output: Path | None) -> list[dict[str, Any]]:
    rows, log = processes.folder / f"{case.shape}.jsonl", processes.folder / f"{case.shape}.log"
    for file in (rows, log):
        file.unlink(missing_ok=True)
    limit_s = deadline - time.monotonic()
    if limit_s < 1.0:
        return [{"shape": case.shape, "section": "all", "error": "no time left"}]
    problem = processes.run(turns_case.run_case, case, processes.folder, rows, log, limit_s=limit_s)
    found = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    if problem:
        found.append({"shape": case.shape, "section": "all", "error": problem})
    if any(turns_case.is_wrong(row) for row in found):
        sys.stderr.write(log.read_text(errors="replace")[-6000:] if log.exists() else "")
    if output is not None:
        with output.open("a") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in found)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rft bench turns", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=names(*SHAPES), help="by default 135M,1.5B on a GPU, small on a CPU")
    parser.add_argument("--turns", type=int, default=10, help="of the first shape; a third of them for larger ones")
    parser.add_argument("--scale", type=float, default=1.0, help="of the lengths of the batch that is trained on")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all; the case that runs then is killed")
    parser.add_argument("--folder", type=Path, help="keeps models and logs")
    parser.add_argument("--output", type=Path, help="file to which rows are appended")
    parser.add_argument("--json", action="store_true", help="JSON, as always")
    return parser


if __name__ == "__main__":
    sys.exit(main())
