"""A whole run that samples by priority, uses groups again, and lets explorers make half of what it draws."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command_line import EXAMPLE, Rft, report, rows
from tests.support.small_runs import STEPS, settings
from tests.support.warm_up import Warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SAMPLING = {
    "order": "prioritized",
    "max_staleness": 100,
    "max_times_sampled": 3,
    "priority": {"formula": "0.01 + std_reward / (1 + times_sampled)"},
    "samples_per_insert": {"ratio": 2},
}


def test_a_run_by_priority_with_reuse_plans_half_and_draws_some_again(rft: Rft, warm: Warm, tmp_path: Path) -> None:
    buffer = tmp_path / "buffer"
    options = settings(
        warm, "eval.tasks=[]", f"sampling={json.dumps(SAMPLING)}", "pipelines.experience=[]", "sync.offset=1"
    )
    rft("run", EXAMPLE / "grpo.yaml", "--plain", "--buffer", buffer, *options)
    assert report(rft, buffer, "sort-grpo")["status"] == "finished"
    (planned,) = rows(buffer, "select count(*) as n from rft.rollout_group where not is_refill")
    assert planned["n"] == 2 * STEPS  # of four groups a step
    (used,) = rows(
        buffer,
        "select count(distinct item_id) as n, max(times) as most, min(w) as least, max(w) as greatest from"
        " (select item_id, count(distinct trainer_step) as times, min(importance_weight) as w from rft.draw group by 1) d",
    )
    assert used["n"] <= planned["n"] and 2 <= used["most"] <= 3
    assert 0 < used["least"] < used["greatest"] <= 1
