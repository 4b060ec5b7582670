"""Distillation and preference losses through `rft run`, on one buffer: a live run whose rollouts a teacher scores, then runs on what it stored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import rftdata
from rftdata.postgres.embedded import EmbeddedServer
from tests.support.chat_server import ChatServer, Says
from tests.support.command_line import EXAMPLE, Rft, rows
from tests.support.prompt_scores import answer_with
from tests.support.warm_up import Warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SOURCE = f"{EXAMPLE / 'tasks.py'}:numbers"
BASE: dict[str, Any] = {
    "trainer": {"batch_groups": 16, "learning_rate": 1.0e-3, "checkpoint_every": 2, "autocast": "none"},
    "steps": 2,
}
# Two steps on the same batch, so that what they report can be compared. They are short: after one that is too long, a loss may be greater.
ALL_AT_ONCE = {**BASE["trainer"], "batch_groups": 128, "learning_rate": 1.0e-4}
TWICE = {"epochs": 2}
EXPLORER: dict[str, Any] = {
    "engine": "transformers",
    "engine_args": {"dtype": "float32", "context_length": 64},
    "reward": "exact_match",
    "max_tokens": 8,
    "claim_groups": 16,
}


class Buffer:
    """One buffer, and the runs of the tests on it.

    Attributes:
        teacher: a model with the student's tokenizer and other weights, behind `server`.
    """

    def __init__(self, folder: Path, rft: Rft, student: Path, teacher: Path, server: ChatServer) -> None:
        self.folder, self.uri = folder, folder / "buffer"
        self.student, self.teacher, self.server = student, teacher, server
        self._rft = rft

    def run(self, name: str, *, check: bool = True, **sections: Any) -> Any:
        config = {
            **BASE,
            "run": {"name": name},
            "buffer": {"uri": str(self.uri)},
            "model": {"path": str(self.student)},
            **sections,
        }
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(config))
        return self._rft("run", file, "--plain", check=check)

    def live(self, name: str, *, check: bool = True, steps: int = 2, **explorer: Any) -> Any:
        tasks = [{"name": "sort", "source": SOURCE, "args": {"size": 400}, "split": "train"}]
        algorithm = {"name": "on_policy_distillation", "group_size": 4}
        return self.run(
            name, check=check, tasks=tasks, algorithm=algorithm, explorer={**EXPLORER, **explorer}, steps=steps
        )

    def metrics(self, run: str) -> list[dict[str, float]]:
        found = rows(self.uri, f"select metrics from rft.v_train_step where run = '{run}' order by trainer_step")
        return [row["metrics"] if isinstance(row["metrics"], dict) else json.loads(row["metrics"]) for row in found]


@pytest.fixture(scope="module")
def buffer(warm: Warm, rft: Rft, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buffer]:
    """With the live run `scored`, whose teacher is a server."""
    folder = tmp_path_factory.mktemp("distillation")
    teacher = shutil.copytree(warm.model, folder / "teacher")
    model = AutoModelForCausalLM.from_pretrained(teacher)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        model.lm_head.weight.add_(0.3 * torch.randn_like(model.lm_head.weight))
    model.save_pretrained(teacher)
    server = ChatServer(answer_with(teacher))
    made = Buffer(folder, rft, warm.model, teacher, server)
    try:
        made.live("scored", teacher={"endpoint": {"url": server.url, "model": "teacher", "timeout_s": 240}})
        yield made
    finally:
        server.close()
        EmbeddedServer(made.uri).stop()


def sampled_logprobs(model: Path, experiences: list[dict[str, Any]]) -> np.ndarray[Any, Any]:
    """Log-probabilities of the sampled tokens by the model in a folder, one experience after the other."""
    reference, found = AutoModelForCausalLM.from_pretrained(model), []
    for row in experiences:
        tokens, mask = torch.tensor([row["token_ids"]]), np.array(row["loss_mask"], bool)
        with torch.no_grad():
            logprobs = reference(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].numpy()
        found.append(logprobs[mask[1:]])
    return np.concatenate(found)


def test_a_teacher_s_server_scores_every_sampled_token_once(buffer: Buffer) -> None:
    assert all(step["teacher_kl"] > 0.02 and step["skipped"] == 0 for step in buffer.metrics("scored"))
    with rftdata.open(str(buffer.uri)) as opened:
        ids = opened.sql("select experience_id from rft.v_experience where run = 'scored'")["experience_id"].to_pylist()
        table = opened.read_arrays(ids, ["token_ids", "loss_mask", "teacher_logprobs"])
    assert len(ids) == 2 * 16 * 4 == len(buffer.server.requests) - 1, "and one question before the first rollout"
    for row in table.slice(0, 8).to_pylist():
        scored, mask = np.array(row["teacher_logprobs"]), np.array(row["loss_mask"], bool)
        assert (
            scored[mask] == pytest.approx(sampled_logprobs(buffer.teacher, [row]), abs=1e-4) and not scored[~mask].any()
        )


def test_stored_log_probabilities_are_distilled_without_engine_and_teacher(buffer: Buffer) -> None:
    asked = len(buffer.server.requests)
    source = {"source": {"sql": "select experience_id from rft.v_experience where run = 'scored'"}}
    algorithm = {
        "name": "on_policy_distillation",
        "old_logprobs": "recomputed",
        "correction": {"name": "truncate", "high": 2},
    }
    trainer = {**ALL_AT_ONCE, "checkpoint_every": 1}
    buffer.run("offline", algorithm=algorithm, sampling={**source, **TWICE}, trainer=trainer)
    with rftdata.open(str(buffer.uri)) as opened:
        query = "select experience_id from rft.v_consumption where run_id = (select run_id from rft.run where name = 'offline') and trainer_step = 1"
        ids = opened.sql(query)["experience_id"].to_pylist()
        experiences = opened.read_arrays(ids, ["token_ids", "loss_mask", "teacher_logprobs"]).to_pylist()
    [trained] = rows(
        buffer.uri,
        "select uri from rft.checkpoint join rft.run using (run_id) where name = 'offline' and trainer_step = 1",
    )
    teacher = np.concatenate([np.array(e["teacher_logprobs"])[np.array(e["loss_mask"], bool)] for e in experiences])
    before, after = (sampled_logprobs(Path(model), experiences) for model in (buffer.student, trained["uri"]))
    # Each step reports its distance on the same tokens, exactly. That distance may grow by chance, since the tokens are few, but what the
    # teacher finds more likely than the student did has become more likely.
    found = [step["teacher_kl"] for step in buffer.metrics("offline")]
    assert found == pytest.approx([(model - teacher).mean() for model in (before, after)], abs=1e-3)
    assert found[0] > 0.02 and ((teacher - before) * (after - before)).mean() > 0
    assert len(buffer.server.requests) == asked
    assert rows(buffer.uri, "select 1 from rft.v_experience where run = 'offline'") == []


def test_a_teacher_in_the_explorer_s_process_and_one_in_the_trainer(buffer: Buffer) -> None:
    """The trainer computes the whole distribution of its own, and what the explorer's gave is stored for later."""
    tasks = [{"name": "sort", "source": SOURCE, "args": {"size": 400}, "split": "train"}]
    algorithm = {"name": "jsd", "group_size": 4, "teacher": "./teacher"}  # relative to the configuration's folder
    buffer.run("whole", tasks=tasks, algorithm=algorithm, explorer={**EXPLORER, "teacher": "./teacher"})
    assert all(0.001 < step["loss"] < np.log(2) for step in buffer.metrics("whole"))
    with rftdata.open(str(buffer.uri)) as opened:
        ids = opened.sql("select experience_id from rft.v_experience where run = 'whole'")["experience_id"].to_pylist()
        assert all(array is not None and array.any() for array in opened.arrays(ids, "teacher_logprobs"))


def test_preferences_of_the_stored_rewards_are_learned_with_and_without_pairs(buffer: Buffer, rft: Rft) -> None:
    rft("pairs", "build", "scored", "--buffer", buffer.uri)
    pairs = {"source": {"sql": "select pair_id from rft.v_pair where run = 'scored' and stands"}}
    single = {"source": {"sql": "select experience_id from rft.v_experience where run = 'scored'"}}
    buffer.run("simpo", algorithm={"name": "simpo"}, sampling={**pairs, **TWICE}, trainer=ALL_AT_ONCE)
    kto = {"name": "kto", "loss": {"threshold": 0.5}}
    buffer.run("kto", algorithm=kto, sampling={**single, **TWICE}, trainer=ALL_AT_ONCE)
    first, last = buffer.metrics("simpo")
    assert last["pair_margin"] > first["pair_margin"] and last["loss"] < first["loss"]
    first, last = buffer.metrics("kto")
    assert first["loss"] == pytest.approx(0.5, abs=1e-4), "0.5 where policy and reference are one"
    assert last["loss"] < first["loss"] - 1e-3


def test_a_server_without_log_probabilities_ends_the_run_at_once(buffer: Buffer) -> None:
    silent = ChatServer(lambda *_: Says(json.dumps({"choices": [{"text": "2"}]}), raw=True))
    try:
        refused = buffer.live("silent", check=False, teacher={"endpoint": {"url": silent.url, "model": "teacher"}})
    finally:
        silent.close()
    assert refused.returncode not in (0, None)
    assert "returns no log-probabilities of the prompt" in refused.stdout + refused.stderr
    (run,) = rows(buffer.uri, "select run_id, status from rft.run where name = 'silent'")
    assert run["status"] == "failed"
    assert rows(buffer.uri, f"select 1 from rft.v_experience where run_id = {run['run_id']}") == []


def test_a_teacher_with_another_tokenizer_is_refused_before_the_run_is_stored(buffer: Buffer) -> None:
    other = shutil.copytree(buffer.teacher, buffer.folder / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"7": 11', '"7": 12').replace('"8": 12', '"8": 11'))
    refused = buffer.live("other", check=False, teacher="./other")
    assert (
        refused.returncode == 2
        and "another tokenizer than the policy: the policy's token '7' (number 11) is number 12" in refused.stderr
    )
    assert rows(buffer.uri, "select 1 from rft.run where name = 'other'") == []
