"""Chains that drop 90 % and 100 % of the groups come to an end, the latter with an error; a relabelled group that was dropped is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import EXAMPLE, Rft, report, rows
from tests.support.small_runs import FEW_TASKS
from tests.support.warm_up import Warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def run(rft: Rft, warm: Warm, buffer: Path, chain: list[object], *, check: bool = True) -> Any:
    overrides = [
        *FEW_TASKS,
        f"model.path={warm.model}",
        "explorer.engine=transformers",
        "explorer.engine_args={dtype: float32, context_length: 64}",
        "steps=3",
        "eval.tasks=[]",
        "eval.test=[]",
        "trainer.batch_groups=4",
        "explorer.max_refill=12",
        f"pipelines.experience={json.dumps(chain)}",
    ]
    options = [part for override in overrides for part in ("--set", override)]
    return rft("run", EXAMPLE / "grpo.yaml", "--plain", "--buffer", buffer, *options, check=check)


def test_a_chain_that_drops_everything_ends_with_skipped_steps_and_their_reason(
    rft: Rft, warm: Warm, tmp_path: Path
) -> None:
    done = run(rft, warm, tmp_path / "buffer", [{"sql": "SELECT * FROM batch WHERE false"}], check=False)
    assert done.returncode == 1 and "the run has trained nothing: each of its 3 steps had no experiences" in done.stderr
    result = report(rft, tmp_path / "buffer", "sort-grpo")
    assert result["status"] == "failed"
    assert result["steps"]["skipped"] == 3
    groups = rows(
        tmp_path / "buffer",
        "select explore_step, count(*) as n, bool_or(trainable) as any from rft.rollout_group group by 1 order by 1",
    )
    assert [(row["n"], row["any"]) for row in groups] == [(16, False)] * 3
    reasons = rows(tmp_path / "buffer", "select reason from rft.v_train_step")
    assert all("0 of 4 groups survived" in row["reason"] and "max_refill" in row["reason"] for row in reasons)


def test_a_chain_that_drops_nine_of_ten_trains_on_what_survives(rft: Rft, warm: Warm, tmp_path: Path) -> None:
    run(rft, warm, tmp_path / "buffer", [{"sql": "SELECT * FROM batch WHERE group_id % 10 = 0"}])
    steps = rows(tmp_path / "buffer", "select outcome::text as outcome, num_groups, reason from rft.v_train_step")
    assert len(steps) == 3
    kept = rows(tmp_path / "buffer", "select count(*) as n from rft.rollout_group where trainable")[0]["n"]
    assert sum(step["num_groups"] for step in steps) == kept > 0
    assert all(step["reason"] for step in steps)
