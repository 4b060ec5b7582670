"""What the how-to says about writing an algorithm holds: its files load, its YAML builds, its test passes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rftcore.algorithms import build_algorithm
from rftcore.algorithms.base import Signals
from rftdata.errors import ConfigError
from tests.support.algorithms import loss_and_gradient, step_batch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "write-an-algorithm.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    text = PAGE.read_text(encoding="utf-8")
    for name, content in re.findall(r"```(?:python|yaml)\n# (\w+\.(?:py|yaml))\n(.*?)```", text, re.DOTALL):
        (tmp_path / name).write_text(content, encoding="utf-8")
    return tmp_path


def test_the_keys_of_the_page_are_those_of_the_section(folder: Path) -> None:
    changes = yaml.safe_load((folder / "config.yaml").read_text())["algorithm"]
    algorithm = build_algorithm(changes.pop("name"), changes)
    assert algorithm.signals == {"behavior", "reference"}


def test_the_preset_of_the_page_builds(folder: Path) -> None:
    config = build_algorithm("./mine.yaml", base_dir=folder).config
    assert config.loss.name == "cispo" and config.aggregation.mode == "seq-mean-token-mean"


def test_the_loss_of_the_page_is_what_its_docstring_says(folder: Path) -> None:
    # Equal to the policy gradient at ratio 1: A = ±0.7071058, mean over two tokens.
    algorithm = build_algorithm("./with_soft_clip.yaml", base_dir=folder)
    _, gradient, metrics = loss_and_gradient(algorithm, step_batch([1.0, 0.0]), [0.0, 0.0])
    assert gradient == pytest.approx([-0.3535529, 0.3535529]) and metrics["ratio_mean"] == 1.0
    with pytest.raises(ConfigError, match="width"):
        build_algorithm("./with_soft_clip.yaml", {"loss": {"width": 0}}, base_dir=folder)


def test_the_advantage_of_the_page_is_what_its_docstring_says(folder: Path) -> None:
    algorithm = build_algorithm("./with_median.yaml", base_dir=folder)
    plan = algorithm.plan(step_batch([1.0, 2.0, 6.0]), Signals())
    assert torch.equal(plan.advantages_N, torch.tensor([-1.0, 0.0, 4.0]))
    with pytest.raises(ConfigError, match="group_size"):
        build_algorithm("./with_median.yaml", base_dir=folder, group_size=1)


def test_the_test_of_the_page_passes(folder: Path) -> None:
    found: dict[str, Any] = {}
    exec((folder / "test_soft_clip.py").read_text(encoding="utf-8"), found)
    found["test_the_loss_of_a_batch_is_the_sum_over_its_micro_batches"](folder)
