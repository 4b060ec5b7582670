"""An explorer on a buffer, for `rft bench rollouts`: `python -m benchmarks.runs.rollouts_explorer FOLDER OUTPUT`.

One engine serves all cases. Each case is a run of one step with all its answers, and the trainer is this program, which publishes the first weights.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

import rftdata
from benchmarks.harness.processes import append_line
from benchmarks.runs.rollouts import GROUP_SIZE
from rftcore.config.run import RunConfig, parse_config
from rftcore.engines.vllm_engine import VllmEngine
from rftcore.explorer.role import Explorer
from rftcore.resolved import ResolvedRun
from rftcore.run.join import JoinedRun
from rftcore.workflows.task import Model, Score, Scorer, Task, Turn
from rftdata.experience import Sequence
from rftdata.workers.worker import Worker


async def worked(task: Task, model: Model, score: Scorer, *, milliseconds: float) -> Score:
    """Answer the task, then run Python code for so long."""
    turn = await model.chat([{"role": "user", "content": task.prompt}])
    end = time.thread_time() + milliseconds / 1000
    while time.thread_time() < end:
        sum(range(200))
    return await score(turn, task)


def score(turn: Turn, task: Task) -> float:
    """Return 1 for an answer of an even number of characters."""
    return float(len(turn.response) % 2 == 0)


def main(folder: Path, output: Path) -> None:
    """Run the cases of `folder`/work.json; append a line for each."""
    work: dict[str, Any] = json.loads((folder / "work.json").read_text())
    prompts: dict[str, Any] = json.loads((folder / "prompts.json").read_text())
    work["context_length"] = max(map(len, prompts["token_ids"])) + work["max_tokens"]
    resolved = ResolvedRun(_config(folder, work, work["cases"][0], 0))
    config = resolved.engine(0)
    os.environ.update(VllmEngine.process_environment(config))
    engine = VllmEngine(resolved.model_folder, config)
    with rftdata.open(str(folder / f"buffer-{work['max_num_seqs']}")) as buffer:
        warm_up = {**work["cases"][0], "answers": work["max_num_seqs"], "tokens": 16, "work_ms": 0}
        for number, case in enumerate([warm_up, *work["cases"]]):
            texts = prompts["texts"][: case["answers"] // GROUP_SIZE]
            row = _explore(buffer, engine, ResolvedRun(_config(folder, work, case, number)), case, texts)
            if number:
                append_line(output, {**case, **row})
    engine.close()


def _config(folder: Path, work: dict[str, Any], case: dict[str, Any], number: int) -> RunConfig:
    here = Path(__file__).resolve()
    engine = {
        "dtype": "bfloat16",
        "context_length": work["context_length"],
        "max_num_seqs": work["max_num_seqs"],
        "gpu_memory_utilization": work["gpu_memory"],
        **{name: yaml.safe_load(value) for name, _, value in (text.partition("=") for text in work["settings"])},
    }
    explorer = {
        "engine_args": engine,
        "workflow": f"{here}:worked",
        "workflow_args": {"milliseconds": case["work_ms"]},
        "reward": f"{here}:score",
        "max_tokens": case["tokens"],
        "max_refill": 0,
        "claim_groups": max(1, 2 * work["max_num_seqs"] // GROUP_SIZE),
    }
    text = {
        "run": {"name": "rollouts", "seed": 1},
        "model": {"path": str(folder / "model")},
        "tasks": [{"name": f"texts-{number}", "source": "none"}],
        "algorithm": {"name": "grpo", "group_size": GROUP_SIZE},
        "explorer": explorer,
        "trainer": {"batch_groups": case["answers"] // GROUP_SIZE},
        "steps": 1,
    }
    return parse_config(text, folder, "rft bench rollouts")


def _explore(
    buffer: rftdata.Buffer, engine: VllmEngine, resolved: ResolvedRun, case: dict[str, Any], prompts: list[str]
) -> dict[str, Any]:
    """Sample, score and store all answers of a case; return its seconds and speed."""
    run = buffer.create_run(name="rollouts", config={}, seed=1, steps=1, pipeline_version="none")
    _store_tasks(buffer, resolved.config.tasks[0].name, prompts)
    with buffer.attempt(run) as attempt:
        engine.set_policy_version(attempt.publish(0, method="memory", uri="/weights/0", num_bytes=1, checksum="0"))
        with Worker(run, "explorer") as worker:
            explorer = Explorer(JoinedRun(buffer, run, resolved), worker, engine)
            started, seconds = asyncio.run(_sample(explorer, buffer, run.run_id, case["answers"]))
        found = buffer.sql(
            "SELECT sum(num_trained_tokens)::bigint AS tokens, extract(epoch FROM max(created_at))::float8 AS ended"
            " FROM rft.experience WHERE run_id = %s",
            [run.run_id],
        ).to_pylist()[0]
    elapsed = found["ended"] - started
    return {"seconds": round(elapsed, 3), "tokens_per_s": round(found["tokens"] / elapsed), "processor_s": seconds}


def _store_tasks(buffer: rftdata.Buffer, taskset: str, prompts: list[str]) -> None:
    buffer.sql(
        "INSERT INTO rft.task (taskset, task_key, payload)"
        " SELECT %s, n::text, jsonb_build_object('prompt', prompt) FROM unnest(%s::text[]) WITH ORDINALITY AS t (prompt, n)"
        " ON CONFLICT DO NOTHING",  # of an earlier call in the same folder
        [taskset, prompts],
    )


async def _sample(
    explorer: Explorer, buffer: rftdata.Buffer, run_id: int, answers: int
) -> tuple[float, dict[str, float]]:
    """Explore until all answers are stored; return the time of the start, and the processor seconds of each thread."""
    turn = Turn(
        [], "", "stop", Sequence(prompt="", response="", token_ids=[0, 0], num_prompt_tokens=1, finish_reason="stop")
    )
    # A run starts its reward process once.
    await explorer.runners.default.runner.scorer(turn, Task(0, "texts", "0", "", None))
    before, started = _thread_seconds(), time.time()
    task = asyncio.create_task(explorer.explore())
    while not task.done():
        await asyncio.wait([task], timeout=0.2)
        rows = await asyncio.to_thread(
            buffer.sql, "SELECT count(*) AS n FROM rft.experience WHERE run_id = %s", [run_id]
        )
        if rows["n"][0].as_py() >= answers:
            break
    seconds = {name: round(value - before.get(name, 0.0), 2) for name, value in _thread_seconds().items()}
    buffer.sql("UPDATE rft.run SET stop_requested = true WHERE run_id = %s", [run_id])
    await task
    return started, {name: value for name, value in seconds.items() if value > 0}


def _thread_seconds() -> dict[str, float]:
    """Return the processor seconds of this process's threads, by the first word of their names."""
    names = {thread.native_id: thread.name.split("_")[0] for thread in threading.enumerate()}
    found: dict[str, float] = {}
    for thread in psutil.Process().threads():
        name = names.get(thread.id, "other")
        found[name] = found.get(name, 0.0) + thread.user_time + thread.system_time
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
