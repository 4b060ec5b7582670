"""An explorer is killed in the third of five turns, and another one goes on with what was kept."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import rftdata
from rftcore.config.run import RunConfig, parse_config
from rftcore.engines.base import Decoding, Engine, Generation
from rftcore.environments import Environment, Observation, Step
from rftcore.explorer.role import Explorer
from rftcore.resolved import ResolvedRun
from rftcore.run.join import JoinedRun
from rftdata.config import BufferConfig
from rftdata.run import Run
from rftdata.workers.leases import release_lost_claims
from rftdata.workers.worker import Worker
from tests.support.models import make_character_tokenizer
from tests.support.preloaded import PreloadedCall
from tests.support.waiting import PATIENCE_S, wait_until

TURNS, TOKENS, HELD = 5, 8, 4


class Writer(Engine):
    """Answers with random letters, as many as are allowed.

    Attributes:
        log: gets a line for each request: its prompt, and what was written.
        holds: whether it stops in the third turn, after `HELD` tokens.
    """

    def __init__(self, log: Path, *, holds: bool) -> None:
        self.tokenizer = make_character_tokenizer()
        self.policy_version_id = self.num_generated_tokens = 0
        self.log, self.holds = log, holds
        self.open: dict[str, Generation] = {}

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        raise AssertionError("rollouts sample through their drafts")

    async def generate_named(self, name: str, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        prompt = self.tokenizer.decode(prompt_token_ids)
        is_held = self.holds and prompt.count("\na:") == 3
        text = os.urandom(TOKENS).hex()[: HELD if is_held else decoding.max_tokens]
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        done = Generation(token_ids, [-0.5] * len(token_ids), text, "length", [(0, self.policy_version_id)])
        with self.log.open("a") as file:
            file.write(json.dumps([prompt, text]) + "\n")
        if is_held:
            self.open[name] = done
            await asyncio.Event().wait()
        return done

    def unfinished(self, first_tokens: Mapping[str, int]) -> dict[str, Generation]:
        found = {name: (self.open[name], first) for name, first in first_tokens.items() if name in self.open}
        return {
            name: Generation(g.token_ids[first:], g.logprobs[first:], "", "abort", g.version_spans)
            for name, (g, first) in found.items()
        }

    def load_weights(self, uri: str, policy_version_id: int, checksum: str | None = None) -> float:
        self.policy_version_id = policy_version_id
        return 0.0

    def close(self) -> None:
        pass


class Same(Environment):
    """Repeats each action."""

    deterministic = True

    async def reset(self, task: Any, seed: int) -> Observation:
        self.count = 0
        return Observation(f"begin {seed}")

    async def step(self, action: Any, role: str = "agent") -> Step:
        self.count += 1
        return Step(Observation(self.text(action)), 1.0, terminated=self.count == TURNS)

    def text(self, action: str) -> str:
        return f"{self.count} {action}"


class Changing(Same):
    """Observations of other processes are others."""

    deterministic = False

    def text(self, action: str) -> str:
        return f"{os.getpid()} {action}"


def config_of(folder: Path, environment: str) -> RunConfig:
    text = {
        "run": {"name": "lost"},
        "model": {"path": "nowhere"},
        "tasks": [{"name": "train", "source": "none"}],
        "algorithm": {"name": "grpo", "group_size": 2},
        "trainer": {"batch_groups": 1},
        "steps": 4,
        "explorer": {
            "workflow": "environment",
            "workflow_args": {"environment": f"{__file__}:{environment}"},
            "keep_partial_s": 0.05,
            "max_tokens": TOKENS,
        },
    }
    return parse_config(text, folder, "test")


async def explore(buffer: rftdata.Buffer, run: Run, config: RunConfig, engine: Engine) -> None:
    """Explore until the first group is sealed."""
    with Worker(run, "explorer") as worker:
        explorer = asyncio.create_task(Explorer(JoinedRun(buffer, run, ResolvedRun(config)), worker, engine).explore())
        while not explorer.done() and not num(buffer, "rft.rollout_group WHERE status = 'sealed'"):
            await asyncio.sleep(0.02)
        buffer.sql("UPDATE rft.run SET stop_requested = true")
        await asyncio.wait_for(explorer, PATIENCE_S)


def num(buffer: rftdata.Buffer, what: str) -> int:
    return int(buffer.sql(f"SELECT count(*) AS n FROM {what}")["n"][0].as_py())


def be_killed(uri: str, folder: Path, environment: str) -> None:
    """Be the first explorer."""
    with rftdata.open(BufferConfig(uri=uri, segments=str(folder / "segments"), min_free_bytes=0)) as buffer:
        engine = Writer(folder / "first.jsonl", holds=True)
        asyncio.run(explore(buffer, buffer.find_run("lost"), config_of(folder, environment), engine))


@pytest.mark.parametrize("environment", ["Same", "Changing"])
def test_a_kill_costs_the_open_turn_of_a_deterministic_environment(
    environment: str, buffer: rftdata.Buffer, database_uri: str, tmp_path: Path
) -> None:
    run = buffer.create_run(name="lost", config={}, seed=7, steps=4, pipeline_version="p1")
    buffer.sql("INSERT INTO rft.task (taskset, task_key, payload) VALUES ('train', 'one', '{\"prompt\": \"go\"}')")
    (tmp_path / "weights").write_text("weights")
    with buffer.attempt(run) as attempt:
        attempt.publish(0, method="memory", uri=str(tmp_path / "weights"), num_bytes=1, checksum="a")
        first = PreloadedCall(be_killed, database_uri, tmp_path, environment)
        held = (
            "(SELECT FROM rft.partial_tokens WHERE generation_index = 2 GROUP BY rollout_index"
            f" HAVING sum(cardinality(token_ids)) = {HELD}) t"
        )
        wait_until(lambda: num(buffer, held) == 2, "the third turn", process=first)
        first.kill()
        first.wait()
        buffer.sql("UPDATE rft.rollout_group SET lease_until = now() - interval '1 s' WHERE status = 'claimed'")
        assert release_lost_claims(run) == 1
        engine = Writer(tmp_path / "second.jsonl", holds=False)
        asyncio.run(explore(buffer, run, config_of(tmp_path, environment), engine))

    before, after = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("first", "second")
    )
    rows = buffer.sql(
        "SELECT e.prompt || e.response AS text, e.num_turns, e.num_trained_tokens, o.outcome::text AS outcome, o.reward, o.tries"
        " FROM rft.v_experience e JOIN rft.rollout o USING (group_id, rollout_index) ORDER BY e.rollout_index"
    ).to_pylist()
    assert [(row["num_turns"], row["num_trained_tokens"], row["outcome"], row["reward"]) for row in rows] == [
        (TURNS, TURNS * TOKENS, "ok", float(TURNS))
    ] * 2
    is_same = environment == "Same"
    kept = [
        prompt + text for prompt, text in before if (prompt.count("\na:") == 3 if is_same else "\nu:" not in prompt)
    ]
    assert len(kept) == 2 and sorted(any(row["text"].startswith(one) for one in kept) for row in rows) == [True] * 2
    if is_same:
        # Half of the third answer, the fourth and the fifth.
        assert sorted(len(text) for _, text in after) == [HELD] * 2 + [TOKENS] * 4
        assert [row["tries"] for row in rows] == [None, None]
    else:
        # The first prompt was the same.
        assert [len(text) for _, text in after] == [TOKENS] * 2 * (TURNS - 1)
        kept = [row["tries"] for row in rows]
        assert [len(tries) for tries in kept] == [1, 1]
        # The second answer and half of the third.
        tokens = [[turn["num_tokens"] for chat in tried["chats"] for turn in chat["turns"]] for [tried] in kept]
        assert tokens == [[TOKENS, HELD]] * 2
        assert all(chat["messages"][0]["content"].strip() for [tried] in kept for chat in tried["chats"])
        cause = (
            "its explorer was lost; 1 of 3 answers were taken over, and the others sampled again, because the environment"
            f" '{__file__}:Changing' is not deterministic"
        )
        assert [tried["error"] for [tried] in kept] == [cause] * 2
    assert num(buffer, "rft.partial_tokens") == 0
