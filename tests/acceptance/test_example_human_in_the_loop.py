"""examples/human_in_the_loop end to end with few steps: GRPO under review, edits and rankings through the pages, pairs, DPO, and the comparison."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import CHECKOUT, rft_environment, rows
from tests.support.warm_up import Warm

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SCRIPT = CHECKOUT / "examples" / "human_in_the_loop" / "run.py"
TEST = "{name: digits-test, source: '../sort_from_scratch/tasks.py:numbers', args: {size: 2000, seed: 2}, split: test, limit: 60, reward: exact_match}"
FEW = (
    "explorer.engine=transformers",
    "trainer.batch_groups=8",
    "explorer.claim_groups=8",
    "steps=3",
    f"eval.test=[{TEST}]",
)


def test_a_person_corrects_what_grpo_learns_and_dpo_trains_on_the_persons_preferences(
    warm: Warm, tmp_path: Path
) -> None:
    buffer = tmp_path / "buffer"
    settings = [part for setting in FEW for part in ("--set", setting)]
    command = [sys.executable, SCRIPT, "--buffer", buffer, "--model", warm.model, "--labels", "16", *settings]
    environment = {**rft_environment(), "PYTHONPATH": str(CHECKOUT)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        for decoding in ("sampled", "greedy"):
            assert re.search(rf"^60, {decoding} +(\d\.\d{{3}} ± \d\.\d{{3}} *){{3}}$", done.stdout, re.MULTILINE), (
                done.stdout
            )
        check_what_is_stored(buffer)
    finally:
        EmbeddedServer(buffer).stop()


def check_what_is_stored(buffer: Path) -> None:
    # Rewards were corrected while the run trained, by the truth, which the automatic reward does not know.
    reviews = rows(
        buffer,
        """select v.reward, v.reward_sampled, v.response = v.answer as is_right
            from rft.review r join rft.v_experience v using (experience_id) where r.answer = 'pass'""",
    )
    assert reviews and all(row["reward_sampled"] == 1 for row in reviews)
    assert all(row["reward"] == row["is_right"] for row in reviews)
    # Each edit is rendered, and the pairs prefer right answers to wrong ones.
    edits = rows(buffer, "select experience_id from rft.edited_response join rft.v_annotation using (annotation_id)")
    assert 1 <= len(edits) <= 16
    pairs = rows(
        buffer,
        """select source::text, chosen = t.payload ->> 'answer' as is_right, rejected <> t.payload ->> 'answer' as is_wrong
            from rft.v_preferred_pair join rft.task t using (taskset, task_key)""",
    )
    assert {row["source"] for row in pairs} == {"edit", "ranking"}
    assert all(row["is_right"] and row["is_wrong"] for row in pairs)
    (run,) = rows(buffer, "select * from rft.run where name = 'loop-dpo'")
    assert (run["status"], run["source_kind"], run["source_rows"]) == ("finished", "pair", len(pairs))
    # Everything came through the pages, and held-out questions were never labelled.
    pages = rows(buffer, "select distinct shown ->> 'page' as page from rft.annotation")
    assert pages == [{"page": "label"}]
    asked = rows(
        buffer,
        "select distinct taskset from rft.v_experience where experience_id in (select experience_id from rft.review)"
        " or group_id in (select group_id from rft.annotation)",
    )
    assert asked == [{"taskset": "digits-train"}]
