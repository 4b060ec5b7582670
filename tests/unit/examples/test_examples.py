"""Every example configuration loads, names things that exist, and keeps its splits apart."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from rftcore.config.run import RunConfig, load_config, load_stages
from rftcore.resolved import ResolvedRun
from rftdata.tasks import numbers_key, read_tasks, split_of
from tests.support.checking import refuse_names

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
CONFIGS = sorted(path for path in EXAMPLES.rglob("*.yaml"))


# What an example's earlier commands make.
MADE_BEFORE = {"reward_model/ppo.yaml": ["explorer.reward=reward_model:{scorer}", "algorithm.critic.path={scorer}"]}


@pytest.fixture(scope="session")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a reward model's."""
    folder = tmp_path_factory.mktemp("scorer")
    (folder / "config.json").write_text('{"architectures": ["LlamaForTokenClassification"]}')
    return folder


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_example_configuration_is_valid_and_everything_it_names_loads(path: Path, scorer: Path) -> None:
    made = MADE_BEFORE.get(str(path.relative_to(EXAMPLES)), [])
    for stage in load_stages(path, [override.format(scorer=scorer) for override in made]):
        refuse_names(ResolvedRun(stage))


def questions(config: RunConfig, split: str) -> tuple[set[str], set[str]]:
    """Prompts and their numbers, of one split of a configuration."""
    tasksets = {"train": config.tasks, "validation": config.eval.tasks, "test": config.eval.test}[split]
    tasks = [task for taskset in tasksets for task in read_tasks(taskset, config.base_dir)]
    prompts = {task["payload"]["prompt"] for task in tasks}
    return prompts, {numbers_key(prompt) for prompt in prompts}


@pytest.mark.parametrize("name", ["config.yaml", "gpu.yaml"])
def test_train_validation_and_test_of_the_main_job_share_no_question_and_no_numbers(name: str) -> None:
    config = load_config(EXAMPLES / "grpo_reasoning" / name)
    sets = {split: questions(config, split) for split in ("train", "validation", "test")}
    for one, other in combinations(sets, 2):
        assert not sets[one][0] & sets[other][0]
        assert not sets[one][1] & sets[other][1]
    assert len(sets["test"][0]) >= 500


def test_the_solved_example_in_the_prompt_is_a_training_question() -> None:
    config = load_config(EXAMPLES / "grpo_reasoning" / "config.yaml")
    for example in config.explorer.workflow_args["examples"]:
        assert split_of(numbers_key(example["prompt"]), config.tasks[0].split_shares) == "train"
