"""examples/gsm8k end to end with a stand-in: a tiny random model whose tokens include two answers, and a few questions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import CHECKOUT, Rft, report, rows
from tests.support.models import make_tiny_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

CONFIG = CHECKOUT / "examples" / "gsm8k" / "config.yaml"
STEPS = 2


def write_questions(folder: Path) -> None:
    """In the form of the data set: a worked solution that ends in its answer."""
    for split, size in (("train", 60), ("test", 5)):
        rows = [
            {"question": f"{split} {i} apples and no others?", "answer": f"There are {i}.\n#### {i % 2 + 1}"}
            for i in range(size)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_loop_runs_with_a_small_model(rft: Rft, tmp_path: Path) -> None:
    # A random model writes one of its tokens: often enough an answer, and of the two the right one in half of the cases.
    model = make_tiny_model(tmp_path / "model", context_length=256, words=("#### 1", "#### 2"))
    write_questions(tmp_path)
    shares = "split_shares: [0.7, 0.3, 0]"
    train = f"source: './tasks.py:gsm8k', args: {{split: train, path: '{tmp_path}'}}, {shares}"
    overrides = (
        f"tasks=[{{name: gsm8k-train, {train}, split: train}}]",
        f"eval.tasks=[{{name: gsm8k-validation, {train}, split: validation}}]",
        f"eval.test=[{{name: gsm8k-test, source: './tasks.py:gsm8k', args: {{split: test, path: '{tmp_path}'}}}}]",
        f"eval.every={STEPS}",
        f"trainer.checkpoint_every={STEPS}",
        f"steps={STEPS}",
        f"model.path={model}",
        "explorer.engine=transformers",
        "explorer.engine_args={dtype: float32, context_length: 256}",
        "explorer.max_tokens=12",
        "explorer.num_explorers=1",
        "trainer.num_gpus=null",
        "trainer.batch_groups=6",
        "trainer.autocast=none",
        "explorer.claim_groups=6",
    )
    options = [part for override in overrides for part in ("--set", override)]
    buffer = tmp_path / "buffer"
    rft("run", CONFIG, "--plain", "--buffer", buffer, *options)
    assert report(rft, buffer, "gsm8k")["status"] == "finished"
    rewards = rows(
        buffer,
        "select reward, response, payload ->> 'answer' as answer from rft.experience join rft.rollout_group using (group_id)"
        " join rft.task using (task_id)",
    )
    assert len(rewards) == STEPS * 6 * 8
    for row in rewards:
        last = row["response"].rpartition("####")[2]
        if "####" not in row["response"]:
            assert row["reward"] == 0.0
        elif re.fullmatch(r" \d[a-z ]*", last):  # no other digit or sign changes its number
            assert row["reward"] == float(last[1] == row["answer"])
    assert 0 < sum(row["reward"] for row in rewards) < len(rewards)
    steps = rows(buffer, "select metrics from rft.v_train_step order by trainer_step")
    assert len(steps) == STEPS and all(step["metrics"]["grad_norm"] > 0 for step in steps)
    tested = rows(
        buffer,
        "select count(*) as n from rft.evaluation join rft.evaluation_answer using (evaluation_id) join rft.task using (task_id)"
        " where task.taskset = 'gsm8k-test'",
    )
    assert tested[0]["n"] >= 2 * 5  # by the first and by the best policy
    EmbeddedServer(buffer).stop()
