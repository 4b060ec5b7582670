"""examples/dpo_from_stored end to end with the tiny model: GRPO, corrections by SQL, pairs, DPO, and the comparison."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import CHECKOUT, EXAMPLE, rft_environment, rows
from tests.support.warm_up import Warm

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

SCRIPT = CHECKOUT / "examples" / "dpo_from_stored" / "run.py"


def write_configs(folder: Path) -> None:
    """The two configurations of the small model, with few steps and questions."""
    for name in ("grpo", "dpo"):
        raw: dict[str, Any] = yaml.safe_load((EXAMPLE / f"{name}.yaml").read_text())
        for taskset in (*raw.get("tasks", []), *raw["eval"]["tasks"], *raw["eval"]["test"]):
            taskset["source"] = f"{EXAMPLE}/tasks.py:numbers"
        raw["eval"]["every"] = raw["trainer"]["checkpoint_every"] = 4
        raw["eval"]["tasks"][0]["limit"], raw["eval"]["test"][0]["limit"] = 50, 200
        raw["explorer"] |= {"engine": "transformers", "engine_args": {"dtype": "float32", "context_length": 64}}
        raw["trainer"]["batch_groups"] = 8
        if name == "grpo":
            raw["steps"] = 4
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(raw))


def test_the_example_trains_on_corrected_pairs_and_compares_on_the_same_questions(warm: Warm, tmp_path: Path) -> None:
    write_configs(tmp_path)
    buffer = tmp_path / "buffer"
    command = [
        sys.executable,
        SCRIPT,
        "--buffer",
        buffer,
        "--model",
        warm.model,
        "--grpo",
        tmp_path / "grpo.yaml",
        "--dpo",
        tmp_path / "dpo.yaml",
        "--corrections",
        EXAMPLE / "corrections.sql",
    ]
    environment = {**rft_environment(), "PYTHONPATH": str(CHECKOUT)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1500, check=False)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        # Three models beside each other, in both decodings.
        for model in ("base", "GRPO", "DPO"):
            line = rf"^200 of sort-test, (greedy|sampled) +{model} +\d\.\d{{3}} ± \d\.\d{{3}}$"
            assert len(re.findall(line, done.stdout, re.MULTILINE)) == 2, done.stdout
        check_what_is_stored(buffer)
    finally:
        EmbeddedServer(buffer).stop()


def check_what_is_stored(buffer: Path) -> None:
    (run,) = rows(buffer, "select * from rft.run where name = 'sort-dpo'")
    built = rows(buffer, "select chosen_reward, rejected_reward, margin from rft.v_pair")
    assert (run["status"], run["source_kind"], run["source_rows"]) == ("finished", "pair", len(built))
    assert run["planned_steps"] == -(-len(built) // 8)
    # The corrections came before the pairs, and pairs differ by a half only because of them.
    labels = rows(buffer, "select max(label_id) as cut, count(*) as n from rft.label")[0]
    assert run["label_cut"] == labels["cut"] == labels["n"] > 0
    assert 0.5 in {pair["margin"] for pair in built} <= {0.5, 1.0}
    # Every pair once, whole, and DPO learned to tell chosen from rejected.
    drawn = rows(
        buffer,
        "select item_id, count(*) as n from rft.v_consumption where item_kind = 'pair' and run_id = (select max(run_id) from rft.run) group by 1",
    )
    assert len(drawn) == len(built) and {row["n"] for row in drawn} == {2}
    steps = rows(
        buffer,
        "select (metrics->>'pair_margin')::float8 as margin from rft.v_train_step where run = 'sort-dpo' order by trainer_step",
    )
    margins = [step["margin"] for step in steps]
    # Of several steps together: the last batch may be a pair or two.
    assert abs(margins[0]) < 1e-6 < statistics.mean(margins[len(margins) // 2 :])
    # Nothing was sampled for it but answers to evaluations.
    assert rows(
        buffer, "select count(*) as n from rft.rollout_group where run_id = (select max(run_id) from rft.run)"
    ) == [{"n": 0}]
