"""`--set` wins over what the file has, in every stage or in one; a key that the file has twice is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rftcore.config.run import load_config, load_stages
from rftdata.errors import ConfigError, SeveralErrors

WHOLE = """
run: {name: chain}
model: {path: ./model}
tasks: [{name: sums, source: sums.jsonl}]
algorithm: {name: grpo, group_size: 4}
explorer: {engine_args: &args {dtype: float32}, workflow_args: *args, reward: [exact_match]}
trainer: {batch_groups: 2}
steps: 8
"""
STAGES = """
stages:
- {name: first, algorithm: {name: sft}, steps: 2, trainer: {learning_rate: 0.5}}
- {name: second, trainer: {learning_rate: 0.25}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "chain.yaml"
    file.write_text(WHOLE + STAGES)
    return file


def test_an_override_wins_over_the_keys_of_all_stages(file: Path) -> None:
    first, second = load_stages(file, ["steps=3", "trainer.learning_rate=1.0", "algorithm.group_size=1"])
    assert (first.steps, second.steps) == (3, 3)
    assert (first.trainer.learning_rate, second.trainer.learning_rate) == (1.0, 1.0)
    assert (first.algorithm.name, first.algorithm.group_size, second.algorithm.name) == ("sft", 1, "grpo")


def test_an_override_of_one_stage_leaves_the_others(file: Path) -> None:
    first, second = load_stages(file, ["stages.second.steps=5", "steps=3", "stages.second.trainer.learning_rate=1.0"])
    assert (first.steps, second.steps) == (3, 5), "in any order of the options"
    assert (first.trainer.learning_rate, second.trainer.learning_rate) == (0.5, 1.0)


@pytest.mark.parametrize("names", [("first", "first.long"), ("first.long", "first")])
def test_an_override_goes_to_the_stage_with_the_longest_name(tmp_path: Path, names: tuple[str, str]) -> None:
    file = tmp_path / "dotted.yaml"
    file.write_text(f"{WHOLE}stages: [{{name: {names[0]}}}, {{name: {names[1]}}}]\n")
    stages = load_stages(file, ["stages.first.long.steps=3", "stages.first.steps=5"])
    assert {stage.run.name: stage.steps for stage in stages} == {"chain-first": 5, "chain-first.long": 3}


def test_an_overridden_name_stays_the_beginning_of_each_stage_s_name(file: Path) -> None:
    assert [stage.run.name for stage in load_stages(file, ["run.name=other"])] == ["other-first", "other-second"]


def test_an_override_of_an_unknown_stage_is_refused(file: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'stages.third.steps=1' names no stage.*stages.first.KEY=VALUE, stages.second"
    ):
        load_stages(file, ["stages.third.steps=1"])


def test_an_override_changes_no_other_section_that_shares_an_alias(file: Path) -> None:
    (first, _) = load_stages(file, ["explorer.engine_args.dtype=bfloat16"])
    assert first.explorer.engine_args == {"dtype": "bfloat16"} and first.explorer.workflow_args == {"dtype": "float32"}


def test_a_key_written_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text(WHOLE + "trainer: {batch_groups: 4}\n")
    with pytest.raises(
        ConfigError, match=r"twice.yaml: the key 'trainer' is written twice in one section, in the lines 7, 9"
    ):
        load_config(file)


def test_every_repeated_key_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text(WHOLE.replace("batch_groups: 2", "batch_groups: 2, batch_groups: 3") + "steps: 9\n")
    with pytest.raises(SeveralErrors) as refused:
        load_config(file)
    assert [str(error).split("'")[1] for error in refused.value.errors] == ["batch_groups", "steps"]


def test_a_merged_mapping_may_be_overridden(tmp_path: Path) -> None:
    file = tmp_path / "merged.yaml"
    two = "[&sums {name: sums, source: sums.jsonl}, {<<: *sums, name: more}, {<<: *sums, name: most}]"
    file.write_text(WHOLE.replace("[{name: sums, source: sums.jsonl}]", two))
    assert [taskset.name for taskset in load_config(file).tasks] == ["sums", "more", "most"]


def test_a_merge_written_twice_is_refused_and_a_list_of_merges_is_not(tmp_path: Path) -> None:
    file = tmp_path / "merged.yaml"
    file.write_text(WHOLE.replace("{batch_groups: 2}", "\n  <<: {batch_groups: 2}\n  <<: {learning_rate: 0.5}"))
    with pytest.raises(ConfigError, match=r"the key '<<' is written twice in one section, in the lines 8, 9.*one list"):
        load_config(file)
    file.write_text(WHOLE.replace("{batch_groups: 2}", "{<<: [{batch_groups: 2}, {learning_rate: 0.5}]}"))
    assert load_config(file).trainer.learning_rate == 0.5


def test_an_override_that_repeats_a_key_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="'steps' is written twice"):
        load_config(file, ["trainer={steps: 1, steps: 2}"])


def test_a_file_that_would_not_end_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bomb.yaml"
    file.write_text(
        "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))])
    )
    with pytest.raises(ConfigError, match="aliases repeat values more than a million times"):
        load_config(file)
    file.write_text("a: " + "[" * 5000 + "]" * 5000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_config(file)
    file.write_text("a: &a [*a]")  # a value within itself
    with pytest.raises(ConfigError, match="there is no key 'a'"):
        load_config(file)
