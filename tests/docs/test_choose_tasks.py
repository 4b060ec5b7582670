"""The page on choosing tasks: its configuration is valid, its programs run, its selectors are those there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rftcore.config.run import parse_config
from rftcore.resolved import ResolvedRun
from rftdata.selectors import SELECTORS, Observation, build_selector
from tests.support.checking import refuse_selectors

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "choose-tasks.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_configuration_is_valid(tmp_path: Path) -> None:
    rest = """
        run: {name: mixed}
        model: {path: nowhere}
        algorithm: {name: grpo}
        explorer: {engine: vllm}
        trainer: {batch_groups: 8}
        steps: 10
    """
    first, own = (yaml.safe_load(block) for block in blocks("yaml"))
    (tmp_path / "least_tried.py").write_text(blocks("python")[0])
    for section in (first, {**first, **own}):
        refuse_selectors(ResolvedRun(parse_config({**yaml.safe_load(rest), **section}, tmp_path, "docs")))


def test_the_selector_of_ones_own_works(tmp_path: Path) -> None:
    (tmp_path / "least_tried.py").write_text(blocks("python")[0])
    selector = build_selector("./least_tried.py:LeastTried", {"bonus": 2.0}, range(4), 0, tmp_path)
    assert selector.learns
    selector.set_features({"new": np.array([0.0, 0, 1, 0])})
    assert selector.select(2) == [2, 0]
    selector.observe([Observation(task_id, 1.0, 4.0) for task_id in (2, 2, 2, 0)])
    assert selector.select(2) == [1, 3] and selector.metrics() == {"untried": 2.0}


def test_the_program_without_a_database_runs() -> None:
    names: dict[str, Any] = {}
    exec(blocks("python")[1], names)
    assert len(names["chosen"]) == 16 and names["selector"].metrics()["tried"] > 16


def test_every_selector_and_every_argument_of_it_is_on_the_page() -> None:
    import inspect

    for name in SELECTORS.builtins:
        (line,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{name}`"))
        arguments = inspect.signature(SELECTORS.load(name)).parameters.keys() - {
            "task_ids",
            "seed",
        }
        assert all(re.search(rf"`{argument}\b", line) for argument in arguments), (name, arguments)
