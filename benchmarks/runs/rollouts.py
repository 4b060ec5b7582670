"""Answers a second of an explorer, beside `LLM.generate` of vLLM alone on the same prompts.

Two programs run one after the other on one model with random weights, and each starts one engine for every number of sequences in `--concurrent`:

- `LLM.generate`, as vLLM starts it by default (its engine in a process of its own), with the log-probabilities of the sampled tokens, with texts and without;
- an explorer: claims groups of eight from a PostgreSQL buffer, samples them with an async workflow and a reward that is a plain function, keeps partial tokens,
  and stores every group. `--work-ms` adds Python code to each answer, in the workflow.

Answers have `--tokens` tokens (random weights end an answer early once in about 50,000 tokens). A case has `--waves` times as many answers as sequences.
Its seconds of `LLM.generate` are those of the call; those of the explorer count from the first claim to the last commit. `ratio` is the explorer's
tokens a second over those of `LLM.generate` without texts, which is the faster one. The exit code is 1 where a program failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import argument_parser, integer, integers, kept_folder
from benchmarks.harness.processes import read_lines
from benchmarks.harness.report import say, write
from benchmarks.harness.rft import call, environment
from benchmarks.harness.shapes import SHAPES, write_model
from rftcore.engines.vllm_arguments import graph_sizes
from rftcore.workflows.chat_encoding import chat_encoder

_LIMIT_S = 500.0
_SYSTEMS = ("alone", "explorer")
GROUP_SIZE = 8
_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    with kept_folder(options) as folder:
        write_model(SHAPES[options.shape], folder / "model")
        _write_tokenizer(options.tokenizer, folder / "model")
        rows: list[dict[str, Any]] = []
        failures: list[str] = []
        for concurrent in options.concurrent:
            cases = _cases(options, concurrent)
            _write_prompts(options, folder, options.waves * concurrent)
            found = {
                system: _run(f"rollouts_{system}", folder, {**_engine(options, concurrent), "cases": cases}, failures)
                for system in _SYSTEMS
                if options.only in (None, system)
            }
            rows += _rows(found.get("alone", []), found.get("explorer", []))
        write(options, {"rows": rows, "failed": failures})
    return int(bool(failures))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser("rollouts", __doc__)
    parser.add_argument("--shape", choices=SHAPES, default="135M", help="shape of the model")
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer; by default one token per character")
    parser.add_argument(
        "--concurrent", type=integers(), default=(64, 1024), help="sequences that an engine samples at once"
    )
    parser.add_argument("--tokens", type=integers(), default=(256, 2048), help="tokens of an answer")
    parser.add_argument(
        "--work-ms", type=integers(0), default=(0, 1, 10), help="milliseconds of Python for each answer"
    )
    parser.add_argument("--waves", type=integer(), default=3, help="answers of a case, as a multiple of the sequences")
    parser.add_argument("--prompt-characters", type=integer(), default=64)
    parser.add_argument("--gpu-memory", type=float, default=0.8, help="share of the GPU's memory")
    parser.add_argument(
        "--same-graphs",
        action="store_true",
        help="LLM.generate on a GPU captures the CUDA graphs that explorers do by default",
    )
    parser.add_argument("--only", choices=_SYSTEMS, help="one of the two programs")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="settings of explorer.engine_args"
    )
    return parser.parse_args(arguments)


def _cases(options: argparse.Namespace, concurrent: int) -> list[dict[str, int]]:
    """Return the cases of one engine. Python code is added to the shortest answers only: more of them end in a second."""
    return [
        {"concurrent": concurrent, "tokens": tokens, "answers": options.waves * concurrent, "work_ms": work_ms}
        for tokens in options.tokens
        for work_ms in (options.work_ms if tokens == min(options.tokens) else (min(options.work_ms),))
    ]


def _engine(options: argparse.Namespace, concurrent: int) -> dict[str, Any]:
    return {
        "max_num_seqs": concurrent,
        "max_tokens": max(options.tokens),
        "gpu_memory": options.gpu_memory,
        "settings": options.set,
        "graph_sizes": graph_sizes(concurrent, {}) if options.same_graphs else None,
    }


def _write_prompts(options: argparse.Namespace, folder: Path, num_answers: int) -> None:
    """Write the prompts of a case: texts for the explorer, and their tokens, with the chat template, for `LLM.generate`."""
    from transformers import AutoTokenizer

    tokenizer, numbers = AutoTokenizer.from_pretrained(str(folder / "model")), random.Random(num_answers)
    num = math.ceil(num_answers / GROUP_SIZE)
    texts = ["".join(numbers.choices(_CHARACTERS, k=options.prompt_characters)) for _ in range(num)]
    token_ids = [chat_encoder(tokenizer).prompt([{"role": "user", "content": text}]).token_ids for text in texts]
    (folder / "prompts.json").write_text(json.dumps({"texts": texts, "token_ids": token_ids}))


def _write_tokenizer(tokenizer: Path | None, folder: Path) -> None:
    if tokenizer is None:
        from tests.support.models import make_character_tokenizer

        make_character_tokenizer().save_pretrained(folder)
    else:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(str(tokenizer)).save_pretrained(folder)


def _run(program: str, folder: Path, work: dict[str, Any], failures: list[str]) -> list[dict[str, Any]]:
    """Return the rows that a program of this folder wrote, those of the cases before its failure; append the failure."""
    say(f"{program}: {work['max_num_seqs']} sequences")
    file, output = folder / "work.json", folder / f"{program}-{work['max_num_seqs']}.jsonl"
    file.write_text(json.dumps(work))
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"benchmarks.runs.{program}", str(folder), str(output)]
    log = folder / f"{program}-{work['max_num_seqs']}.log"
    variables = {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # A core that vLLM forks, as by default, has answered nothing on a GPU machine.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }
    try:
        call(command, folder, log, limit_s=_LIMIT_S, environment=environment(**variables))
    except Exception as error:  # noqa: BLE001 - the rows of the cases before stay
        say(str(error))
        failures.append(str(error))
    rows = read_lines(output)
    for row in rows:
        say(json.dumps(row))
    return rows


def _rows(alone: list[dict[str, Any]], ours: list[dict[str, Any]]) -> list[dict[str, Any]]:
    speeds = {(row["concurrent"], row["tokens"]): row["tokens_per_s"] for row in alone if not row["detokenize"]}
    rows = [{"system": "LLM.generate", **row} for row in alone]
    for row in ours:
        beside = speeds.get((row["concurrent"], row["tokens"]))
        ratio = None if beside is None else round(row["tokens_per_s"] / beside, 3)
        rows.append({"system": "explorer", **row, "ratio": ratio})
    return rows
