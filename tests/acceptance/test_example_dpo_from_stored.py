"""examples/dpo_from_stored end to end with the tiny model: GRPO, corrections by SQL, pairs, DPO, and the comparison."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rftdata.server import EmbeddedServer
from tests.acceptance.conftest import CHECKOUT, EXAMPLE, Warm, rft_environment, rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DPO_EXAMPLE = CHECKOUT / "examples" / "dpo_from_stored"
CORRECTIONS = """
UPDATE rft.experience e SET reward = 0.5 FROM rft.v_experience v
WHERE v.experience_id = e.experience_id AND v.reward_sampled = 0 AND v.finish_reason = 'stop' AND length(v.response) = length(v.answer);"""


def write_configs(folder: Path, model: Path) -> None:
    """The examples' own configurations, with the tiny model, its questions, and few steps."""
    grpo: dict[str, Any] = yaml.safe_load((EXAMPLE / "grpo.yaml").read_text())
    dpo: dict[str, Any] = yaml.safe_load((DPO_EXAMPLE / "dpo.yaml").read_text())
    for taskset in (*grpo["tasks"], *grpo["eval"]["tasks"], *grpo["eval"]["test"]):
        taskset["source"] = f"{EXAMPLE}/tasks.py:numbers"
    grpo["eval"] |= {"every": 4}
    grpo["eval"]["tasks"][0]["limit"], grpo["eval"]["test"][0]["limit"] = 50, 200
    grpo["explorer"] |= {"engine": "transformers", "engine_args": {"dtype": "float32", "context_length": 64}}
    grpo["trainer"] |= {"batch_groups": 8, "checkpoint_every": 4}
    dpo["eval"], dpo["explorer"] = {**grpo["eval"], "every": 4}, grpo["explorer"]
    dpo["trainer"] |= {"batch_groups": 8, "checkpoint_every": 4, "learning_rate": 1e-3}
    dpo["sampling"]["source"]["sql"] = dpo["sampling"]["source"]["sql"].replace("grpo-reasoning", "sort-grpo")
    for name, raw in (("grpo", {**grpo, "steps": 4}), ("dpo", dpo)):
        raw["model"] = {"path": str(model)}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(raw))
    (folder / "corrections.sql").write_text(CORRECTIONS)


def test_the_example_trains_on_corrected_pairs_and_compares_on_the_same_questions(warm: Warm, tmp_path: Path) -> None:
    write_configs(tmp_path, warm.model)
    files = [
        part
        for name in ("grpo.yaml", "dpo.yaml", "corrections.sql")
        for part in (f"--{name.partition('.')[0]}", tmp_path / name)
    ]
    buffer = tmp_path / "buffer"
    command = [sys.executable, DPO_EXAMPLE / "run.py", "--buffer", buffer, "--margin", "0.4", *files]
    environment = {**rft_environment(), "PYTHONPATH": str(CHECKOUT)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        # Three models beside each other, in both decodings.
        for model in ("base", "GRPO", "DPO"):
            assert (
                len(
                    re.findall(
                        rf"^200 of sort-test, (greedy|sampled) +{model} +\d\.\d{{3}} ± \d\.\d{{3}}$",
                        done.stdout,
                        re.MULTILINE,
                    )
                )
                == 2
            )
        check_what_is_stored(buffer)
    finally:
        EmbeddedServer(buffer).stop()


def check_what_is_stored(buffer: Path) -> None:
    (run,) = rows(buffer, "select * from rft.run where name = 'dpo-from-stored'")
    built = rows(buffer, "select chosen_reward, rejected_reward, margin from rft.v_pair")
    assert (run["status"], run["source_kind"], run["source_rows"]) == ("finished", "pair", len(built))
    assert run["planned_steps"] == -(-len(built) // 8)
    # The corrections came before the pairs, and pairs differ by a half only because of them.
    assert run["label_cut"] == rows(buffer, "select max(label_id) as cut from rft.label")[0]["cut"] > 0
    assert {pair["margin"] for pair in built} == {0.5, 1.0}
    # Every pair once, whole, and DPO learned to tell chosen from rejected.
    drawn = rows(
        buffer,
        "select item_id, count(*) as n from rft.v_consumption where item_kind = 'pair' and run_id = (select max(run_id) from rft.run) group by 1",
    )
    assert len(drawn) == len(built) and {row["n"] for row in drawn} == {2}
    steps = rows(
        buffer,
        "select (metrics->>'pair_margin')::float8 as margin from rft.v_train_step where run = 'dpo-from-stored' order by trainer_step",
    )
    assert abs(steps[0]["margin"]) < 1e-6 < steps[-1]["margin"]
    # Nothing was sampled for it but answers to evaluations.
    assert rows(
        buffer, "select count(*) as n from rft.rollout_group where run_id = (select max(run_id) from rft.run)"
    ) == [{"n": 0}]
