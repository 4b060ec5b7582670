"""What the how-to says about writing an algorithm holds: its files load, its YAML builds, its test passes, its parts train."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rftcore.algorithms import build_algorithm
from rftcore.algorithms.algorithm import Algorithm
from rftcore.algorithms.base import Signals
from rftdata.errors import RftError
from tests.support.algorithms import step_batch
from tests.support.learning import config, make_batch, make_learner, save_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "write-an-algorithm.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    text = PAGE.read_text(encoding="utf-8")
    for name, code in re.findall(r"```(?:python|yaml)\n# (\w+\.(?:py|yaml))\n(.*?)```", text, re.DOTALL):
        (tmp_path / name).write_text(code, encoding="utf-8")
    return tmp_path


def algorithms(folder: Path) -> list[Algorithm]:
    """What the `algorithm` sections of the page build, in their order."""
    blocks = re.findall(r"```yaml\n(algorithm:.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    text = PAGE.read_text(encoding="utf-8")
    blocks += ["algorithm: " + each for each in re.findall(r"`algorithm: (\{name: \./.*?\})`", text)]
    found = []
    for block in blocks:
        section = yaml.safe_load(block)["algorithm"]
        changes = {key: value for key, value in section.items() if key not in ("name", "group_size")}
        found.append(build_algorithm(section["name"], changes, group_size=section["group_size"], base_dir=folder))
    return found


def test_every_section_of_the_page_builds_and_trains(folder: Path, tmp_path: Path) -> None:
    built = algorithms(folder)
    assert len(built) == 5
    model = str(save_model(tmp_path / "model", tied=True))
    for algorithm in built:
        metrics = make_learner(model, config(), algorithm, 0).update(
            make_batch(1, rewards=[float(i % 3) for i in range(12)]), 1
        )
        assert metrics["skipped"] == 0.0 and metrics["grad_norm"] > 0


def test_its_advantage_counts_wins_and_losses(folder: Path) -> None:
    wins = build_algorithm("reinforce", {"advantage": "./wins.py:Wins"}, base_dir=folder)
    batch = step_batch([1.0, 0.0, 0.0, 5.0, 5.0], [0, 0, 0, 1, 1])
    # Against two others: 2 won, 1 lost and 1 tied; a tie in the group of two.
    assert wins.plan(batch, Signals()).advantages_N.tolist() == [1.0, -0.5, -0.5, 0.0, 0.0]


def test_its_advantage_with_turns_has_the_rewards_that_it_declares(folder: Path) -> None:
    bonus = build_algorithm("grpo", {"advantage": "./bonus.py:Bonus"}, base_dir=folder)
    assert bonus.columns == {"step_rewards"}
    with pytest.raises(RftError, match=r"no step rewards.*turn\.record\(step_reward=…\)"):
        bonus.plan(step_batch([1.0, 1.0]), Signals())
    # Rewards 1.5 and 1: half a standard deviation of 0.3535534 on both sides of the mean.
    batch = step_batch([1.0, 1.0], step_rewards_BA=[0.5, 0.0])
    assert bonus.plan(batch, Signals()).advantages_N.tolist() == pytest.approx([0.7071048, -0.7071048], abs=1e-5)


def test_the_test_of_the_page_passes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    found: dict[str, Any] = {}
    exec((folder / "test_exponential.py").read_text(encoding="utf-8"), found)
    found["test_the_weight_falls_with_the_distance"]()
