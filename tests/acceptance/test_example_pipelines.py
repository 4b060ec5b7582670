"""The examples about pipelines, run by their own configurations with a small model: shaping with a replay, and stages of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rftdata.server import EmbeddedServer
from tests.acceptance.conftest import CHECKOUT, Rft, Warm, report, rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHAPING, CUSTOM = CHECKOUT / "examples" / "quality_shaping", CHECKOUT / "examples" / "custom_stages"
SMALL = [
    "explorer.engine=transformers", "explorer.engine_args={dtype: float32, context_length: 64}", "steps=2", "trainer.batch_groups=4",
    "trainer.checkpoint_every=1",
]  # fmt: skip


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
        rft("process", SHAPING / "config.yaml", "--preview", 16, "--buffer", buffer, "--json", *options(warm)).stdout
    )
    assert [stage["stage"] for stage in preview["stages"]][:4] == [
        "drop_truncated",
        "tag",
        "threshold",
        "reward_shaping",
    ]
    before = rows(buffer, "select max(scored_at)::text as at, count(*) as n from rft.score")
    arguments: list[Any] = ["--replay", "--version", "stricter", "--buffer", buffer, "--json", *options(warm)]
    done = json.loads(rft("process", SHAPING / "stricter.yaml", *arguments).stdout)
    assert done["num_experiences"] > 0
    assert (
        rows(buffer, "select max(scored_at)::text as at, count(*) as n from rft.score") == before
    )  # nothing was scored again
    (used,) = rows(buffer, "select pipeline_version as v from rft.run")
    difference = json.loads(rft("process", "--diff", used["v"], "stricter", "--buffer", buffer, "--json").stdout)
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
