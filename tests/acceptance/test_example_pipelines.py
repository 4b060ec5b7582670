"""The examples about pipelines and task selection, run by their own configurations with a small model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rftcore.config.run import load_config
from rftcore.pipeline.policy_endpoint import Policy
from rftcore.resolved import ResolvedRun
from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import CHECKOUT, Rft, report, rows
from tests.support.warm_up import Warm

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

SHAPING, CUSTOM, CURRICULUM = (
    CHECKOUT / "examples" / name for name in ("quality_shaping", "custom_stages", "curriculum")
)
SMALL = [
    "explorer.engine=transformers",
    "explorer.engine_args={dtype: float32, context_length: 64}",
    "steps=2",
    "trainer.batch_groups=4",
    "trainer.checkpoint_every=1",
]


def options(warm: Warm, *more: str) -> list[str]:
    return [part for override in (*SMALL, f"model.path={warm.model}", *more) for part in ("--set", override)]


def test_shaping_by_a_score_and_a_stricter_threshold_replayed(rft: Rft, warm: Warm, tmp_path: Path) -> None:
    buffer = tmp_path / "buffer"
    # Two pipeline workers share the queue.
    rft("run", SHAPING / "config.yaml", "--plain", "--buffer", buffer, *options(warm, "pipelines.workers=2"))
    assert report(rft, buffer, "sort-shaped")["status"] == "finished"
    workers = rows(buffer, "select count(*) as n from rft.worker where role = 'pipeline' and error is null")
    assert workers == [{"n": 2}]
    scored = rows(
        buffer,
        "select e.reward, v.reward as shaped, (s.scores->>'closeness')::float8 as closeness, v.kept from rft.experience e"
        " join rft.score s using (experience_id) join rft.verdict v using (experience_id) where s.stage = 'tag'",
    )
    assert scored and all(0 <= row["closeness"] <= 1 for row in scored)
    for row in scored:
        if row["kept"] and row["closeness"] > 0:
            assert row["shaped"] == pytest.approx(row["reward"] + 0.3 * row["closeness"])

    preview = json.loads(
        rft(
            "pipeline", "preview", SHAPING / "config.yaml", "--rows", 16, "--buffer", buffer, "--json", *options(warm)
        ).stdout
    )["experiences"]
    assert [stage["stage"] for stage in preview["stages"]][:4] == [
        "drop_truncated",
        "tag",
        "threshold",
        "reward_shaping",
    ]
    before = rows(buffer, "select max(scored_at)::text as at, count(*) as n from rft.score")
    arguments: list[Any] = ["--version", "stricter", "--buffer", buffer, "--json", *options(warm)]
    done = json.loads(rft("pipeline", "replay", SHAPING / "stricter.yaml", *arguments).stdout)
    assert done["num_experiences"] > 0
    assert (
        rows(buffer, "select max(scored_at)::text as at, count(*) as n from rft.score") == before
    )  # nothing was scored again
    (used,) = rows(buffer, "select pipeline_version as v from rft.run")
    difference = json.loads(rft("pipeline", "diff", used["v"], "stricter", "--buffer", buffer, "--json").stdout)
    changes = {(row["before"], row["after"]) for row in difference["counts"]}
    assert not any(before != "kept" and after == "kept" for before, after in changes)  # a stricter one keeps no more
    EmbeddedServer(buffer).stop()


def test_stages_and_a_selector_of_ones_own(rft: Rft, warm: Warm, tmp_path: Path) -> None:
    buffer = tmp_path / "buffer"
    rft("run", CUSTOM / "config.yaml", "--plain", "--buffer", buffer, *options(warm))
    assert report(rft, buffer, "sort-custom")["status"] == "finished"
    scores = rows(buffer, "select scores->>'digits_kept' as kept from rft.score where stage = './stages.py:DigitsKept'")
    assert scores and all(0 <= float(row["kept"]) <= 1 for row in scores)
    ran = {row["stage"] for row in rows(buffer, "select distinct stage from rft.operator_run")}
    assert {"./stages.py:no_letters", "./stages.py:DigitsKept", "threshold"} <= ran
    states = rows(
        buffer, "select selector, state->>'next' as next from rft.selector_state where taskset = 'sort-train'"
    )
    assert [(row["selector"], int(row["next"]) > 0) for row in states] == [("./selector.py:Curious", True)]
    EmbeddedServer(buffer).stop()


def test_a_curriculum_on_two_tasksets(rft: Rft, warm: Warm, tmp_path: Path) -> None:
    buffer = tmp_path / "buffer"
    rft("run", CURRICULUM / "config.yaml", "--plain", "--buffer", buffer, *options(warm, "steps=3", "eval.tasks=[]"))
    assert report(rft, buffer, "sort-curriculum")["status"] == "finished"
    planned = rows(
        buffer,
        "select taskset, count(*) as n, min(group_size) as smallest, max(group_size) as largest from rft.rollout_group"
        " join rft.task using (task_id) where not is_refill group by 1 order by 1",
    )
    # Shares of 1 : 4 at first, in three steps of four groups.
    assert [(row["taskset"], row["smallest"], row["largest"]) for row in planned] == [("long", 16, 16), ("short", 8, 8)]
    assert sum(row["n"] for row in planned) == 12 and planned[0]["n"] in (2, 3)
    (known,) = rows(
        buffer,
        "select count(*) as tried, bool_and(trials > 0) as counted from (select task_id, sum(trials) as trials from rft.task_observation"
        " group by 1) o",
    )
    assert known["tried"] >= 12 and known["counted"]
    trained = rows(buffer, "select metrics from rft.v_train_step order by trainer_step desc limit 1")
    assert any(name.startswith("selector/short/") for name in trained[0]["metrics"])
    EmbeddedServer(buffer).stop()


def test_stages_may_ask_the_policy_itself(warm: Warm) -> None:
    config = load_config(SHAPING / "config.yaml", [f"model.path={warm.model}"])
    policy = Policy(ResolvedRun(config))
    asked = ["372", "9180", "55013"]
    chats = [[{"role": "user", "content": f"{digits}>"}] for digits in asked]
    answers = policy(chats, 8, 0.0)
    policy.close()
    # What the model itself says, whatever that is.
    tokenizer, model = AutoTokenizer.from_pretrained(warm.model), AutoModelForCausalLM.from_pretrained(warm.model)
    for chat, answer in zip(chats, answers, strict=True):
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        said = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert answer and answer == tokenizer.decode(said, skip_special_tokens=True)
