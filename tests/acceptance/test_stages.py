"""A file with two stages: a failure ends the chain, and --resume continues in that stage, from the previous stage's checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.support.command_line import EXAMPLE, Rft, rows
from tests.support.warm_up import Warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def chain(warm: Warm, tmp_path: Path) -> Path:
    """Return a file with two steps of imitation, then one of reinforcement whose reward fails until `fixed` exists."""
    (tmp_path / "reward.py").write_text(
        "from itertools import count\n"
        "from pathlib import Path\n"
        "calls = count()\n"
        "def score(turn, task):\n"
        "    if not Path(__file__).with_name('fixed').exists():\n"
        "        raise ValueError('the reward is broken')\n"
        "    return float(next(calls) % 3)\n"  # equal rewards would train nothing
    )
    source = f"{EXAMPLE / 'tasks.py'}:numbers"
    config = {
        "run": {"name": "chain"},
        "buffer": {"uri": str(tmp_path / "buffer")},
        "model": {"path": str(warm.model)},
        "trainer": {"batch_groups": 2, "checkpoint_every": 1, "autocast": "none"},
        "explorer": {"engine": "none", "workflow": "demonstration", "max_refill": 4},
        "sampling": {"max_staleness": 9},
        "tasks": [{"name": "shown", "source": source, "args": {"size": 40}, "split": "train"}],
        "stages": [
            {"name": "sft", "algorithm": {"name": "sft", "group_size": 1}, "steps": 2},
            {
                "name": "grpo",
                "algorithm": {"name": "grpo", "group_size": 4},
                "steps": 1,
                "explorer": {
                    "engine": "transformers",
                    "engine_args": {"dtype": "float32", "context_length": 64},
                    "workflow": "single_turn",
                    "reward": "./reward.py:score",
                    "max_tokens": 8,
                },
            },
        ],
    }
    file = tmp_path / "chain.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def test_a_failure_stops_the_chain_and_resume_continues_in_the_right_stage(
    rft: Rft, chain: Path, tmp_path: Path
) -> None:
    buffer = tmp_path / "buffer"
    failed = rft("run", chain, "--plain", check=False)
    assert failed.returncode not in (0, None) and "the reward is broken" in failed.stdout + failed.stderr
    assert "stage 1 of 2: chain-sft" in failed.stdout and "stage 2 of 2: chain-grpo" in failed.stdout
    (tmp_path / "fixed").touch()
    done = rft("run", chain, "--plain", "--resume")
    assert "stage 1 of 2: chain-sft has finished" in done.stdout
    runs = rows(
        buffer,
        "select run_id, name, status::text as status, parent_run_id, config -> 'model' ->> 'path' as model from rft.run order by run_id",
    )
    assert [(run["name"], run["status"]) for run in runs] == [("chain-sft", "finished"), ("chain-grpo", "finished")]
    assert runs[0]["parent_run_id"] is None and runs[1]["parent_run_id"] == runs[0]["run_id"]
    (last,) = rows(
        buffer,
        "select uri from rft.checkpoint c join rft.run_attempt a using (attempt_id)"
        f" where a.run_id = {runs[0]['run_id']} and trainer_step = 2",
    )
    assert runs[1]["model"] == last["uri"]
    again = rft("run", chain, "--plain", "--resume")
    assert "chain-grpo has finished" in again.stdout and len(rows(buffer, "select 1 from rft.run")) == 2


def test_a_mistake_in_a_later_stage_is_found_before_the_first_begins(rft: Rft, chain: Path, tmp_path: Path) -> None:
    raw = yaml.safe_load(chain.read_text())
    raw["stages"][1]["algorithm"]["group_size"] = 1
    chain.write_text(json.dumps(raw))
    refused = rft("run", chain, "--plain", check=False)
    assert refused.returncode == 2 and "group_size" in refused.stderr
    assert not (tmp_path / "buffer").exists()
    checked = rft("check", chain, check=False)
    assert checked.returncode == 2 and "group_size" in checked.stderr
    named = rft("tasks", "load", chain, check=False)
    assert named.returncode == 2 and "has stages" in named.stderr


def test_the_sources_and_buffers_of_all_stages_are_looked_at_where_there_is_a_buffer_already(
    rft: Rft, chain: Path, tmp_path: Path
) -> None:
    rft("db", "create", "--buffer", tmp_path / "buffer")
    raw = yaml.safe_load(chain.read_text())
    raw["stages"][1]["tasks"] = [{"name": "more", "source": "absent.jsonl"}]
    chain.write_text(json.dumps(raw))
    refused = rft("run", chain, "--plain", check=False)
    assert refused.returncode == 2 and "absent.jsonl" in refused.stderr
    assert rows(tmp_path / "buffer", "select 1 from rft.run") == []
    raw["stages"][1]["buffer"] = {"uri": str(tmp_path / "other")}
    chain.write_text(json.dumps(raw))
    refused = rft("check", chain, check=False)
    assert refused.returncode == 2 and "is in another buffer" in refused.stderr
