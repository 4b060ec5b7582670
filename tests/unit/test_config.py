"""Configurations that could only hang, die later or learn nothing are refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rftcore.config import RunConfig, parse_config
from rftcore.launch.prepare import check_plugins
from rftdata.errors import ConfigError

VALIDATION = {"name": "validation", "source": "none"}


def config(**changes: Any) -> RunConfig:
    """A GRPO run that is in order, with sections changed key by key."""
    raw: dict[str, Any] = {
        "run": {"name": "sums"},
        "model": {"path": "nowhere"},
        "tasks": [{"name": "a", "source": "none"}],
        "algorithm": {"name": "grpo"},
        "explorer": {"reward": "exact_match"},
        "trainer": {},
        "eval": {"every": 20},
        "steps": 3,
    }
    for section, values in changes.items():
        raw[section] = {**raw.get(section, {}), **values}
    return parse_config(raw, Path(), "test")


def test_what_is_changed_below_is_in_order_without_the_change() -> None:
    check_plugins(config(eval={"tasks": [VALIDATION], "test": [{**VALIDATION, "name": "test"}]}))


@pytest.mark.parametrize("key", ["tasks", "test"])
@pytest.mark.parametrize(
    ("change", "word"),
    [({"run": {"mode": "train"}}, "run.mode train"), ({"explorer": {"engine": "none"}}, "explorer.engine is none")],
)
def test_evaluations_that_nobody_would_answer_are_refused(change: dict[str, Any], word: str, key: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        config(eval={key: [VALIDATION]}, **change)
    assert f"eval.{key}" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"sampling": {"max_times_sampled": -1}}, r"sampling\.max_times_sampled"),
        ({"sampling": {"order": "lifo"}}, r"sampling\.order"),
        ({"sampling": {"mixture": [{"source": "human", "ratio": 1}]}}, "explorers supply"),
        ({"algorithm": {"group_size": 4, "min_group_size": 5}}, "min_group_size"),
        ({"trainer": {"betas": [0.9, 1.0]}}, r"trainer\.betas"),
        ({"trainer": {"betas": [-0.1, 0.9]}}, r"trainer\.betas"),
        ({"explorer": {"reward": ["exact_match", "exact_match"]}}, "exact_match is named more than once"),
    ],
)
def test_settings_that_mean_nothing_are_refused(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        config(**change)


@pytest.mark.parametrize(
    ("change", "key"), [({"top_p": 0.9}, "top_p"), ({"top_k": 20}, "top_k"), ({"temperature": 0}, "temperature")]
)
def test_sampling_whose_probabilities_the_learner_cannot_compute_is_refused(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"explorer\.{key}"):
        check_plugins(config(explorer=change))
    check_plugins(config(explorer=change, algorithm={"name": "sft"}))


def test_a_comparison_of_rollouts_that_nobody_rewards_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"explorer\.reward"):
        check_plugins(config(explorer={"reward": []}))
    with pytest.raises(ConfigError, match=r"explorer\.reward"):
        check_plugins(config(explorer={"reward": []}, pipelines={"experience": [{"drop_truncated": {}}]}))


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": {"name": "sft"}},
        {"run": {"mode": "train"}},
        {"pipelines": {"experience": [{"sql": "SELECT * REPLACE (1.0 AS reward) FROM batch"}]}},
    ],
)
def test_rewards_may_come_from_elsewhere_or_not_be_needed(change: dict[str, Any]) -> None:
    check_plugins(config(explorer={"reward": []}, **change))


@pytest.mark.parametrize("change", [{"engine": "none"}, {"workflow": "demonstration"}])
def test_answers_that_nobody_sampled_are_refused_where_their_probabilities_count(change: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="samples nothing"):
        check_plugins(config(explorer=change))
    check_plugins(config(explorer=change, algorithm={"name": "sft"}))
