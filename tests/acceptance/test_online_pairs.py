"""DPO while the run samples: a random model learns which digit a reward function prefers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import EXAMPLE, Rft, rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

REWARD = "def sevens(turn, task):\n    return float(turn.response.count('7'))\n"


def test_what_rewards_prefer_becomes_likelier_than_under_the_reference(rft: Rft, tmp_path: Path) -> None:
    subprocess.run([sys.executable, EXAMPLE / "make_model.py", tmp_path / "model"], check=True, capture_output=True)
    (tmp_path / "reward.py").write_text(REWARD)
    file = tmp_path / "online.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "run": {"name": "online", "seed": 1},
                "buffer": {"uri": str(tmp_path / "buffer")},
                "model": {"path": "./model"},
                "steps": 6,
                "tasks": [
                    {
                        "name": "sort",
                        "source": f"{EXAMPLE / 'tasks.py'}:numbers",
                        "args": {"size": 400},
                        "split": "train",
                    }
                ],
                "algorithm": {"name": "online_dpo", "group_size": 4},
                "explorer": {
                    "engine": "transformers",
                    "engine_args": {"dtype": "float32", "context_length": 64},
                    "reward": "./reward.py:sevens",
                    "max_tokens": 8,
                    "claim_groups": 16,
                },
                "trainer": {"batch_groups": 16, "learning_rate": 1.0e-3, "autocast": "none", "checkpoint_every": 6},
                "sync": {"interval": 1, "offset": 0},
            }
        )
    )
    rft("run", file, "--plain")
    table = rows(tmp_path / "buffer", "select metrics from rft.v_train_step order by trainer_step")
    EmbeddedServer(tmp_path / "buffer").stop()
    found = [row["metrics"] if isinstance(row["metrics"], dict) else json.loads(row["metrics"]) for row in table]
    assert len(found) == 6 and all(step["pairs_formed"] + step["groups_without_pair"] == 16 for step in found)
    # At first the policy is the reference. Later pairs are new samples of the policy, so their margin is what it has learned.
    assert found[0]["pair_margin"] == pytest.approx(0.0, abs=1e-4)
    assert found[-1]["pair_margin"] > 0.1 and found[-1]["reward"] > found[0]["reward"]
