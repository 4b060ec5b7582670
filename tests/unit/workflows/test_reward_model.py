"""The score of a trained reward model as a reward of later runs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rftcore.algorithms import build_algorithm
from rftcore.explorer.scorer import Scorer
from rftcore.rewards import load_rewards
from rftcore.trainer.batches.train_batch import TrainBatch
from rftcore.workflows.task import Task, Turn
from rftdata.errors import PluginError, RftError
from rftdata.experience import Sequence
from tests.support.learning import config, make_batch, make_learner, save_model
from tests.support.waiting import PATIENCE_S

TASK = Task(1, "sums", "one", "1+1=", "2")


def turn(token_ids: list[int]) -> Turn:
    return Turn([], "2", "stop", Sequence("1+1=", "2", token_ids, 1, "stop"))


@pytest.fixture(scope="module")
def batch() -> TrainBatch:
    return replace(make_batch(5), paired=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, batch: TrainBatch) -> Path:
    """A checkpoint of a run that trained a reward model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    learner = make_learner(
        str(save_model(tmp_path_factory.mktemp("model"), tied=True)), config(), build_algorithm("reward_model"), 0
    )
    for step in range(1, 21):
        learner.update(batch, step)
    torch.set_num_threads(threads)
    folder = tmp_path_factory.mktemp("run") / "checkpoint"
    learner.save_checkpoint(folder)
    return folder


def test_judges_the_pairs_that_it_was_trained_on_and_runs_in_a_process_of_its_own(
    folder: Path, batch: TrainBatch
) -> None:
    name = f"reward_model:./{folder.name}"
    scorer = Scorer(load_rewards([name], folder.parent), folder.parent, timeout_s=PATIENCE_S, max_processes=1)
    try:
        scores = []
        for b in range(batch.num_experiences):
            tokens = batch.token_ids_BT[b, : int(batch.attention_mask_BT[b].sum())].tolist()
            score = asyncio.run(scorer(turn(tokens), TASK))
            assert score.parts == {"reward_model": score.reward}
            scores.append(score.reward)
    finally:
        scorer.close()
    assert all(chosen > rejected for chosen, rejected in zip(scores[0::2], scores[1::2], strict=True))


def test_a_token_that_it_does_not_have_is_named(folder: Path) -> None:
    (reward,) = load_rewards([f"reward_model:{folder}"], folder).values()
    with pytest.raises(RftError, match="has no token 50, which the policy uses"):
        reward(turn([1, 50]), TASK)


def test_a_model_without_a_scalar_head_is_refused_before_the_run(tmp_path: Path) -> None:
    save_model(tmp_path, tied=True)
    with pytest.raises(PluginError, match="has no scalar head"):
        load_rewards([f"reward_model:{tmp_path}"], tmp_path)


def test_a_folder_without_a_model_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="no model in the folder of the reward model"):
        load_rewards(["reward_model:./nowhere"], tmp_path)
