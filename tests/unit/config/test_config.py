"""Configurations that could only hang, fail later or learn nothing are refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from operators.base import Operator, StageOutcome
from rftcore.checks.run import check_named
from rftcore.config.run import RunConfig, parse_config
from rftcore.findings import Findings
from rftcore.resolved import ResolvedRun
from rftdata.errors import ConfigError
from tests.support.checking import refuse_names


class Keeps(Operator):
    """A stage of the user's that declares no column, so it writes none."""

    def apply(self, table: pa.Table) -> StageOutcome:
        return StageOutcome.keep_all(table.num_rows)


class Rewards(Keeps):
    """One that declares the reward."""

    writes = frozenset({"reward"})


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
    refuse_names(ResolvedRun(config(eval={"tasks": [VALIDATION], "test": [{**VALIDATION, "name": "test"}]})))


@pytest.mark.parametrize("key", ["tasks", "test"])
@pytest.mark.parametrize(
    ("change", "word"),
    [({"run": {"mode": "train"}}, "run.mode train"), ({"explorer": {"engine": "none"}}, "explorer.engine is none")],
)
def test_evaluations_without_an_explorer_are_refused(change: dict[str, Any], word: str, key: str) -> None:
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
        ({"sampling": {"over_sampling": 0.5}, "explorer": {"max_refill": 0}}, "max_refill is 0"),
        ({"trainer": {"optimizer": {"betas": [0.9, 1.0]}}}, r"trainer\.optimizer\.betas"),
        ({"trainer": {"optimizer": {"betas": [-0.1, 0.9]}}}, r"trainer\.optimizer\.betas"),
        ({"explorer": {"reward": ["exact_match", "exact_match"]}}, "exact_match is named more than once.*as: …"),
        ({"explorer": {"reward": [{"weight": 2}]}}, r"explorer\.reward\.0\.name' is missing"),
        (
            {"explorer": {"reward": {"name": "exact_match", "weight": "much"}}},
            r"reward\.0\.weight' is wrong: it must be a number",
        ),
        (
            {"explorer": {"reward": {"name": "exact_match", "threshold": 1}}},
            "threshold of the reward exact_match has no effect.*first_failure",
        ),
        (
            {"explorer": {"reward": {"name": "exact_match", "weight": -1}, "reward_combination": "product"}},
            "exact_match has the weight -1.*exponent",
        ),
        (
            {"explorer": {"reward_combination": "mean"}},
            r"reward_combination' is wrong.*'sum', 'product' or 'first_failure'",
        ),
        ({"trainer": {"num_gpus": 0}}, r"trainer\.num_gpus"),
        ({"trainer": {"num_gpus": 4, "tensor_parallel": 3}}, r"tensor_parallel \(3\) must divide num_gpus \(4\)"),
        ({"trainer": {"tensor_parallel": 2}}, "null, which is one.* multiple of 2"),
        ({"trainer": {"lora": {"rank": 0}}}, r"trainer\.lora\.rank"),
        ({"trainer": {"lora": {"target_modules": []}}}, "names no layer"),
        ({"trainer": {"lora": {"target_modules": "q_proj"}}}, "all-linear"),
    ],
)
def test_settings_that_mean_nothing_are_refused(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        config(**change)


@pytest.mark.parametrize(
    ("change", "key"), [({"top_p": 0.9}, "top_p"), ({"top_k": 20}, "top_k"), ({"temperature": 0}, "temperature")]
)
def test_sampling_whose_probabilities_the_learner_cannot_compute_is_refused(change: dict[str, Any], key: str) -> None:
    for name in ("grpo", "reinforce", "remax", "opmd", "asymre"):
        with pytest.raises(ConfigError, match=rf"explorer\.{key}"):
            refuse_names(ResolvedRun(config(explorer=change, algorithm={"name": name})))
    for name in ("sft", "raft"):
        refuse_names(ResolvedRun(config(explorer=change, algorithm={"name": name})))


@pytest.mark.parametrize(
    ("explorer", "message"),
    [
        ({"reward": {"name": "exact_match", "weight": 0.5}}, r"gdpo reads each.*weights: \{exact_match: 0\.5\}"),
        ({"reward_combination": "first_failure"}, "gdpo reads each reward alone"),
    ],
)
def test_combinations_that_the_algorithm_does_not_read_are_refused(explorer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        refuse_names(ResolvedRun(config(algorithm={"name": "gdpo"}, explorer=explorer)))
    weights = {"name": "gdpo", "advantage": {"weights": {"exact_match": 0.5}}}
    if "reward" in explorer:
        refuse_names(ResolvedRun(config(algorithm=weights, explorer=explorer)))


def test_a_reward_is_stored_as_it_was_written() -> None:
    entries = ["exact_match", {"name": "./a.py:f", "weight": 0.5, "as": "short", "pattern": "x"}]
    assert config(explorer={"reward": entries}).model_dump(mode="json")["explorer"]["reward"] == entries
    assert config().model_dump()["explorer"]["reward"] == ["exact_match"]


def test_arguments_that_the_workflow_does_not_take_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unexpected keyword argument 'turnz'.*allowed: system"):
        refuse_names(ResolvedRun(config(explorer={"workflow_args": {"turnz": 2}})))


def test_a_comparison_of_rollouts_without_rewards_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"explorer\.reward"):
        refuse_names(ResolvedRun(config(explorer={"reward": []})))
    with pytest.raises(ConfigError, match=r"explorer\.reward"):
        refuse_names(ResolvedRun(config(explorer={"reward": []}, pipelines={"experience": [{"drop_truncated": {}}]})))
    with pytest.raises(ConfigError, match=r"explorer\.reward"):
        refuse_names(
            ResolvedRun(config(explorer={"reward": []}, pipelines={"experience": [{f"{__name__}:Keeps": {}}]}))
        )


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": {"name": "sft"}},
        {"run": {"mode": "train"}},
        {"pipelines": {"experience": [{"sql": "SELECT * REPLACE (1.0 AS reward) FROM batch"}]}},
        {"pipelines": {"experience": [{f"{__name__}:Rewards": {}}]}},
    ],
)
def test_rewards_may_come_from_elsewhere_or_not_be_needed(change: dict[str, Any]) -> None:
    refuse_names(ResolvedRun(config(explorer={"reward": []}, **change)))


@pytest.mark.parametrize("change", [{"engine": "none"}, {"workflow": "demonstration"}])
def test_answers_that_were_not_sampled_are_refused_where_their_probabilities_count(change: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="samples nothing"):
        refuse_names(ResolvedRun(config(explorer=change)))
    refuse_names(ResolvedRun(config(explorer=change, algorithm={"name": "sft"})))


SOURCE = {"source": {"sql": "select experience_id from rft.experience"}}


def stored(algorithm: str = "sft", **changes: Any) -> RunConfig:
    """A run on a stored selection that is in order, with sections changed."""
    raw = {
        "run": {"name": "again"},
        "model": {"path": "nowhere"},
        "algorithm": {"name": algorithm},
        "trainer": {},
        "sampling": SOURCE,
    }
    return parse_config({**raw, **changes}, Path(), "test")


def test_a_run_on_a_stored_selection_needs_neither_tasks_nor_an_explorer_nor_steps() -> None:
    found = stored()
    refuse_names(ResolvedRun(found))
    assert not found.has_explorer and found.sampling.source is not None and found.sampling.source.pin_labels
    refuse_names(ResolvedRun(stored("dpo")))


def test_a_run_with_evaluations_has_an_explorer() -> None:
    assert stored(eval={"tasks": [VALIDATION], "every": 20}).has_explorer
    with pytest.raises(ConfigError, match=r"run\.mode train"):
        stored(eval={"tasks": [VALIDATION], "every": 20}, run={"name": "again", "mode": "train"})


@pytest.mark.parametrize("key", ["tasks", "explorer", "steps"])
def test_a_run_without_one_does_need_them(key: str) -> None:
    raw = config().model_dump(exclude={key})
    with pytest.raises(ConfigError, match=rf"'{key}' is missing"):
        parse_config(raw, Path(), "test")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": [VALIDATION]}, "tasks and sampling.source exclude each other"),
        ({"pipelines": {"experience": [{"drop_truncated": {}}]}}, "pipelines.experience and sampling.source exclude"),
        ({"sampling": {"epochs": 2}, "tasks": [VALIDATION], "explorer": {}, "steps": 1}, "set sampling.source"),
        ({"sampling": {"source": {"sql": " "}}}, r"sampling\.source\.sql"),
        ({"sampling": {"source": {"query": "x"}}}, "sampling.source.*"),
        ({"sampling": {**SOURCE, "epochs": 0}}, r"sampling\.epochs"),
        ({"sampling": {**SOURCE, "order": "rank"}}, "order: rank is for groups that explorers supply"),
        (
            {"sampling": {**SOURCE, "max_times_sampled": 4}},
            "max_times_sampled has no effect with sampling.source.*epochs",
        ),
        (
            {"sampling": {**SOURCE, "order": "prioritized", "priority": {"formula": "mean_reward"}}},
            "select a second column priority",
        ),
    ],
)
def test_what_does_not_go_with_a_stored_selection_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stored(**change)


def test_algorithms_are_refused_where_they_cannot_learn_from_what_is_drawn() -> None:
    refuse_names(ResolvedRun(stored("grpo")))
    with pytest.raises(ConfigError, match=r"dpo learns from preference pairs.*rft pairs build"):
        refuse_names(ResolvedRun(config(algorithm={"name": "dpo"})))


def test_an_algorithm_of_pairs_samples_where_rewards_form_them() -> None:
    refuse_names(ResolvedRun(config(algorithm={"name": "online_dpo"})))
    refuse_names(ResolvedRun(config(algorithm={"name": "simpo", "pairs": {"margin": 0.5}})))


@pytest.mark.parametrize(
    ("algorithm", "explorer", "message"),
    [
        ("online_dpo", {"reward": []}, "explorer.reward is empty.*differences between rollouts"),
        ("online_dpo", {"temperature": 0}, "temperature 0 makes the answers of a group equal"),
        ("reward_model", {}, "reward_model trains a model that scores.*select group_id"),
    ],
)
def test_pairs_are_refused_that_no_group_of_the_run_could_form(
    algorithm: str, explorer: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        refuse_names(ResolvedRun(config(algorithm={"name": algorithm, "pairs": {}}, explorer=explorer)))


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"name": "grpo"}, "that no policy sampled, and grpo needs the log-probabilities"),
        ({"name": "sft", "group_size": 4}, "too few answers"),
    ],
)
def test_a_stage_whose_answers_the_run_could_not_train_on_is_refused(algorithm: dict[str, Any], message: str) -> None:
    stages = {"experience": [{"drop_truncated": {}}, {"synthesize": {"kind": "self_correct", "endpoint": "policy"}}]}
    with pytest.raises(ConfigError, match=rf"stage 2 \(synthesize\): .*{message}.*min_group_size: 1"):
        refuse_names(ResolvedRun(config(algorithm=algorithm, pipelines=stages)))
    refuse_names(ResolvedRun(config(algorithm={"name": "sft", "group_size": 4, "min_group_size": 1}, pipelines=stages)))


def test_a_buffer_on_a_server_needs_a_folder_for_its_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_refused(**buffer: str) -> bool:
        findings = Findings()
        check_named(ResolvedRun(config(buffer={"uri": "postgresql://db.example.org/rft", **buffer})), findings)
        return any("needs a folder for its arrays" in str(error) for error in findings.errors)

    monkeypatch.delenv("RFT_SEGMENTS", raising=False)
    assert is_refused() and not is_refused(segments="/shared/arrays")
    monkeypatch.setenv("RFT_SEGMENTS", "/shared/arrays")
    assert not is_refused()
