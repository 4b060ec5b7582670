"""Preference pairs formed from the rewards of drawn groups, and training on them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rftcore.algorithms import build_algorithm
from rftcore.algorithms.config import PairsConfig
from rftcore.trainer.batches.forms import paired
from rftcore.trainer.batches.train_batch import TrainBatch
from rftcore.trainer.learner import Learner
from rftdata.errors import RftError
from tests.support.learning import config, make_batch, make_learner, weights

# Experience 4 has no answer. Group 0: 1 over 2. Group 1: 5 over 7. Group 2 is all equal.
REWARDS = [0.5, 1.0, 0.0, 0.5, 2.0, 0.9, 0.8, 0.7, 1.0, 1.0, 1.0, 1.0]
BEST_OVER_WORST = [1, 2, 5, 7]


def groups(**changes: Any) -> TrainBatch:
    return replace(make_batch(5, rewards=REWARDS), **changes)


def chosen_and_rejected(batch: TrainBatch, **rules: Any) -> list[int]:
    """Return the experiences of the pairs."""
    found, _ = paired(replace(batch, state_BA=torch.arange(batch.num_experiences)[:, None]), PairsConfig(**rules))
    assert found.state_BA is not None
    return found.state_BA[:, 0].tolist()


class TestPairs:
    def test_join_the_best_and_the_worst_answer_of_each_group_with_their_arrays(self) -> None:
        batch = groups(teacher_logprobs_BT=make_batch(5).behavior_logprobs_BT)
        found, metrics = paired(batch, PairsConfig())
        assert metrics == {"pairs_formed": 2.0, "groups_without_pair": 1.0}
        assert found.paired and found.reward_names == batch.reward_names
        for name, values in vars(batch).items():
            if isinstance(values, torch.Tensor):
                assert torch.equal(getattr(found, name), values[BEST_OVER_WORST]), name

    def test_follow_the_rewards_of_the_draw(self) -> None:
        relabelled = groups(rewards_B=torch.tensor([0.5, 0.0, 1.0, 0.5, *REWARDS[4:]]))
        assert chosen_and_rejected(groups()) == [1, 2, 5, 7] and chosen_and_rejected(relabelled) == [2, 1, 5, 7]

    def test_are_several_per_group_and_share_answers_on_request(self) -> None:
        batch = groups(rewards_B=torch.tensor([0.0, 1.0, 0.0, 0.0, *[0.0] * 8]))
        found = chosen_and_rejected(batch, max_pairs=3, ties="order")
        assert found == [1, 0, 1, 2, 1, 3]

    def test_compare_the_margin_with_rewards_as_they_were_stored(self) -> None:
        # In float32, 0.9 - 0.7 is 0.19999999.
        assert chosen_and_rejected(groups(), margin=0.2) == [1, 2, 5, 7]
        assert chosen_and_rejected(groups(), margin=0.21) == [1, 2]

    def test_leave_out_turns_and_answers_to_another_prompt(self) -> None:
        turns = groups()
        turns.rollout_index_B[2] = 3  # a second turn of rollout 3
        assert chosen_and_rejected(turns) == [1, 0, 5, 7]
        other = groups()
        other.token_ids_BT[7, 0] += 1
        assert chosen_and_rejected(other) == [1, 2, 5, 6]

    def test_refuse_a_reward_that_is_no_number(self) -> None:
        missing = groups(rewards_B=torch.tensor([math.nan, *REWARDS[1:]]))
        with pytest.raises(RftError, match=r"1 of 12 rewards.*rollout 0 of group 0"):
            paired(missing, PairsConfig())


def updated(model_path: str, preset: str, batch: TrainBatch, **settings: Any) -> tuple[dict[str, float], Learner]:
    changes = settings.pop("algorithm", {})
    learner = make_learner(model_path, config(**settings), build_algorithm(preset, changes), 0)
    return learner.update(batch, 1), learner


def test_twenty_steps_without_a_pair_end_the_training(model_path: str, tmp_path: Path) -> None:
    turns = groups(rollout_index_B=torch.arange(12) % 4 // 2)  # each rollout has two turns
    settings = {"epochs": 3, "mini_batches": 2}
    learner = make_learner(model_path, config(**settings), build_algorithm("dpo", {"pairs": {}}), 0)
    for step in range(1, 20):
        found = learner.update(turns, step)
        assert (found["skipped"], found["groups_without_pair"]) == (1.0, 3.0)
    assert learner.update(groups(), 20)["skipped"] == 0.0
    for step in range(21, 40):
        learner.update(turns, step)
    learner.save_checkpoint(tmp_path / "checkpoint")
    resumed = make_learner(model_path, config(**settings), build_algorithm("dpo", {"pairs": {}}), 0)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(RftError, match=r"20 steps in a row had nothing to train.*rollouts of one row"):
        resumed.update(turns, 40)


@pytest.mark.parametrize("preset", ["dpo", "simpo", "reward_model"])
def test_a_step_equals_one_on_the_same_stored_pairs_however_it_is_cut(preset: str, model_path: str) -> None:
    stored, expected = updated(model_path, preset, groups().in_pairs(BEST_OVER_WORST))
    formed, one = updated(model_path, preset, groups(), algorithm={"pairs": {}})
    cut, many = updated(model_path, preset, groups(), algorithm={"pairs": {}}, max_tokens_per_microbatch=16)
    assert formed == pytest.approx(stored | {"pairs_formed": 2.0, "groups_without_pair": 1.0} | _times(formed))
    assert cut["loss"] == pytest.approx(stored["loss"], rel=1e-5)
    for name, tensor in weights(expected).items():
        assert torch.equal(weights(one)[name], tensor)
        torch.testing.assert_close(weights(many)[name], tensor, rtol=1e-3, atol=1e-5)


def _times(metrics: dict[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in ("seconds", "tokens_per_second")}


def test_the_updates_of_a_step_divide_whole_pairs(model_path: str) -> None:
    found, _ = updated(model_path, "online_dpo", groups(), mini_batches=2, algorithm={"pairs": {"max_pairs": 2}})
    # The reference is the policy itself until the first update: then the loss of each pair is log 2.
    assert found["pairs_formed"] == 4.0 and found["skipped"] == 0.0 and 0.0 < found["loss"] < 2.0 * math.log(2)


def test_a_step_whose_groups_form_no_pair_is_skipped(model_path: str) -> None:
    learner = make_learner(model_path, config(), build_algorithm("online_dpo"), 0)
    before = weights(learner)
    found = learner.update(groups(rewards_B=torch.ones(12)), 1)
    assert (found["skipped"], found["pairs_formed"], found["groups_without_pair"]) == (1.0, 0.0, 3.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(learner).items())
