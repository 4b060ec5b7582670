"""The parts of a trainer step: epochs, mini-batches, recomputed log-probabilities, experts, teachers and optimizers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rftcore.algorithms import build_algorithm
from rftcore.trainer.batches.padding import PackedColumns, pad_batch
from rftcore.trainer.batches.train_batch import TrainBatch
from rftcore.trainer.learner import Learner
from rftcore.trainer.network.optimizers import learning_rate_at
from rftdata.errors import RftError
from tests.support.learning import batch_with_everything, config, make_batch, make_learner, weights


def taken_steps(learner: Learner) -> int:
    return int(next(iter(learner.policy.optimizers.members[0].state.values()))["step"])


class TestMiniBatches:
    def test_deal_every_group_whole(self) -> None:
        batch = make_batch(1, groups=7, size=3)
        dealt = batch.deal(3, seed=5)
        assert sorted(b for part in dealt for b in part) == list(range(21)) and len(dealt) == 3
        for part in dealt:
            assert part == sorted(part)
            groups = batch.group_index_B[part]
            assert all(int((groups == group).sum()) == 3 for group in groups.unique())
        assert batch.deal(3, seed=5) == dealt and batch.deal(3, seed=6) != dealt

    def test_are_no_more_than_groups(self) -> None:
        assert len(make_batch(1, groups=2).deal(5, seed=0)) == 2

    def test_make_as_many_updates_in_each_epoch(self, model_path: str) -> None:
        learner = make_learner(model_path, config(mini_batches=3, epochs=2), build_algorithm("grpo"), 0)
        learner.update(make_batch(1), 1)
        assert taken_steps(learner) == 6

    def test_share_the_advantages_of_the_whole_batch_and_have_their_own_denominators(self) -> None:
        batch = make_batch(1, groups=4, rewards=[float(i % 3) for i in range(16)])
        algorithm = build_algorithm("grpo", {"advantage": {"scale": "batch"}})
        flat = batch.for_algorithm(1)
        plan = algorithm.plan(flat, _no_signals())
        members_B = flat.group_B < 2
        part = algorithm.restrict(plan, members_B)
        assert torch.equal(part.advantages_N, plan.advantages_N)
        inside_N = members_B[flat.sequence_N]
        assert part.policy_weights_N[~inside_N].sum() == 0
        assert part.policy_weights_N.sum().item() == pytest.approx(1.0) and part.num_tokens == int(inside_N.sum())

    def test_are_the_same_in_a_resumed_run(self, model_path: str, tmp_path: Path) -> None:
        settings = config(mini_batches=2, epochs=2)
        through = make_learner(model_path, settings, build_algorithm("grpo"), 3)
        through.update(make_batch(1), 1)
        through.save_checkpoint(tmp_path / "one")
        through.update(make_batch(2), 2)
        again = make_learner(model_path, settings, build_algorithm("grpo"), 3)
        again.load_checkpoint(tmp_path / "one")
        again.update(make_batch(2), 2)
        assert all(torch.equal(tensor, weights(again)[name]) for name, tensor in weights(through).items())


def _no_signals() -> Any:
    from rftcore.algorithms.base import Signals

    return Signals()


class TestOldLogprobs:
    def test_recomputed_ones_make_the_first_ratio_one(self, model_path: str) -> None:
        batch = make_batch(1)
        learner = make_learner(model_path, config(), build_algorithm("grpo", {"old_logprobs": "recomputed"}), 0)
        assert learner.update(batch, 1)["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        recorded = make_learner(model_path, config(), build_algorithm("grpo"), 0).update(batch, 1)
        assert recorded["ratio_mean"] != pytest.approx(1.0, abs=1e-3)

    def test_need_no_behaviour_logprobs_if_recomputed(self, model_path: str) -> None:
        batch = make_batch(1)
        batch.behavior_logprobs_BT[batch.loss_mask_BT] = torch.nan
        learner = make_learner(model_path, config(), build_algorithm("grpo", {"old_logprobs": "recomputed"}), 0)
        assert learner.update(batch, 1)["skipped"] == 0.0

    def test_a_correction_compares_both_policies_and_reports_the_share_it_kept(self, model_path: str) -> None:
        algorithm = build_algorithm("grpo", {"correction": {"name": "mask", "high": 1.5, "low": 0.5}})
        assert algorithm.signals == {"old", "behavior"}
        kept = make_learner(model_path, config(), algorithm, 0).update(make_batch(1), 1)["correction_kept"]
        assert 0 < kept < 1


class TestMasks:
    def test_for_each_update_follow_the_policy_before_it(self, model_path: str) -> None:
        settings, batch = {"learning_rate": 3e-3}, make_batch(1)
        algorithm = build_algorithm("m2po_one_sided", {"mask": {"threshold": 0.1}})
        two = make_learner(model_path, config(epochs=2, **settings), algorithm, 0).update(batch, 1)
        once = make_learner(model_path, config(**settings), algorithm, 0)
        kept = [once.update(batch, step)["mask_kept"] for step in (1, 2)]
        assert kept[0] != kept[1] and two["mask_kept"] == pytest.approx(sum(kept) / 2)
        fixed = build_algorithm("m2po_one_sided", {"mask": {"threshold": 0.1, "policy": "step"}})
        assert make_learner(model_path, config(epochs=2, **settings), fixed, 0).update(batch, 1)["mask_kept"] == kept[0]


class TestPairs:
    def test_with_an_empty_answer_are_counted_and_left_out_of_the_means(self, model_path: str) -> None:
        batch = batch_with_everything(paired=True)
        whole = batch.loss_mask_BT.any(dim=1).view(-1, 2).all(dim=1)
        assert whole.tolist() == [True, True, False, True, True, True]
        found = make_learner(model_path, config(), build_algorithm("dpo"), 0).update(batch, 1)
        # The reference is the policy itself: each pair that counts has the loss log 2.
        assert found["pairs_dropped"] == 1.0 and found["loss"] == pytest.approx(math.log(2))

    @pytest.mark.parametrize("preset", ["dpo", "reward_model"])
    def test_without_any_complete_pair_leave_the_weights(self, model_path: str, preset: str) -> None:
        batch = batch_with_everything(paired=True)
        batch.loss_mask_BT[::2] = False
        learner = make_learner(model_path, config(), build_algorithm(preset), 0)
        before = weights(learner)
        found = learner.update(batch, 1)
        assert found["pairs_dropped"] == 6.0 and found["skipped"] == 1.0
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(learner).items())

    @pytest.mark.parametrize(
        ("preset", "settings"), [("reward_model", {}), ("dpo", {"mini_batches": 2}), ("aot", {"mini_batches": 2})]
    )
    def test_with_an_empty_answer_change_nothing(self, model_path: str, preset: str, settings: dict[str, Any]) -> None:
        batch = batch_with_everything(paired=True)
        learners = [make_learner(model_path, config(**settings), build_algorithm(preset), 0) for _ in range(2)]
        found = learners[0].update(batch, 1)
        expected = learners[1].update(batch.in_pairs([0, 1, 2, 3, *range(6, 12)]), 1)
        assert (found["pairs_dropped"], expected["pairs_dropped"]) == (1.0, 0.0)
        assert found["loss"] == expected["loss"] and found["num_tokens"] == expected["num_tokens"]
        weights_of_it = weights(learners[1])
        assert all(torch.equal(tensor, weights_of_it[name]) for name, tensor in weights(learners[0]).items())


class TestExperts:
    def test_have_their_own_loss_and_need_no_behaviour_logprobs(self, model_path: str) -> None:
        batch = make_batch(1)
        batch.behavior_logprobs_BT[:3][batch.loss_mask_BT[:3]] = torch.nan
        mixed = build_algorithm("grpo", {"expert": {"loss": "sft", "coef": 0.25}})
        assert make_learner(model_path, config(), mixed, 0).update(batch, 1)["expert_coef"] == 0.25
        with pytest.raises(RftError, match=r"3 of 12 experiences .* no behaviour log-probabilities"):
            make_learner(model_path, config(), build_algorithm("grpo"), 0).update(batch, 1)

    def test_with_some_sampled_tokens_are_refused(self, model_path: str) -> None:
        batch = make_batch(1)
        longest = int(batch.loss_mask_BT.sum(dim=1).argmax())
        batch.behavior_logprobs_BT[longest, batch.loss_mask_BT[longest].nonzero()[-1]] = torch.nan
        mixed = build_algorithm("grpo", {"expert": {"loss": "sft"}})
        with pytest.raises(RftError, match=f"experience {longest} of the batch"):
            make_learner(model_path, config(), mixed, 0).update(batch, 1)


class TestTeachers:
    def test_equal_to_the_policy_give_no_advantage(self, model_path: str) -> None:
        algorithm = build_algorithm("on_policy_distillation", {"teacher": model_path})
        learner = make_learner(model_path, config(max_grad_norm=None), algorithm, 0)
        assert learner.update(_sampled_by(learner, make_batch(1)), 1)["grad_norm"] == pytest.approx(0.0, abs=1e-4)
        assert learner.update(make_batch(2), 2)["grad_norm"] > 0.01

    def test_without_a_model_come_from_stored_arrays(self, model_path: str) -> None:
        learner = make_learner(model_path, config(), build_algorithm("on_policy_distillation"), 0)
        with pytest.raises(RftError, match=r"set explorer\.teacher.*or algorithm\.teacher .*teacher_logprobs"):
            learner.update(make_batch(1), 1)
        batch = make_batch(1)
        stored = TrainBatch(**{**vars(batch), "teacher_logprobs_BT": batch.behavior_logprobs_BT.clone()})
        assert learner.update(stored, 1)["skipped"] == 0.0
        stored.teacher_logprobs_BT[1] = torch.nan
        with pytest.raises(
            RftError, match=r"1 of \d+ experiences of the batch have none; the first is experience 1 of"
        ):
            learner.update(stored, 2)


def _sampled_by(learner: Learner, batch: TrainBatch) -> TrainBatch:
    """Return the batch as if the learner's policy had sampled it."""
    with torch.no_grad(), learner.policy.unpacked() as model:
        logprobs_BTV = model(batch.token_ids_BT, attention_mask=batch.attention_mask_BT).logits.log_softmax(-1)
    own_BT = logprobs_BTV[:, :-1].gather(2, batch.token_ids_BT[:, 1:, None])[..., 0]
    behavior_BT = torch.cat([torch.zeros(len(own_BT), 1), own_BT], dim=1) * batch.loss_mask_BT
    return TrainBatch(**{**vars(batch), "behavior_logprobs_BT": behavior_BT})


class TestOptimizers:
    def test_muon_updates_matrices_of_layers_and_adamw_the_rest(self, model_path: str) -> None:
        learner = make_learner(model_path, config(optimizer="muon"), build_algorithm("sft"), 0)
        before = weights(learner)
        learner.update(make_batch(1), 1)
        assert all(not torch.equal(tensor, before[name]) for name, tensor in weights(learner).items())
        muon, adamw = learner.policy.optimizers.members
        names = {id(parameter): name for name, parameter in learner.policy.model.named_parameters()}
        by_muon = {names[id(parameter)] for parameter in muon.state}
        by_adamw = {names[id(parameter)] for parameter in adamw.state}
        assert all("layers" in name and "norm" not in name for name in by_muon)
        assert by_adamw == {"model.embed_tokens.weight", *(name for name in before if "norm" in name)}
        assert by_muon | by_adamw == set(before)

    def test_muon_continues_from_a_checkpoint(self, model_path: str, tmp_path: Path) -> None:
        through = make_learner(model_path, config(optimizer="muon"), build_algorithm("sft"), 0)
        through.update(make_batch(1), 1)
        through.save_checkpoint(tmp_path / "one")
        through.update(make_batch(2), 2)
        again = make_learner(model_path, config(optimizer="muon"), build_algorithm("sft"), 0)
        again.load_checkpoint(tmp_path / "one")
        again.update(make_batch(2), 2)
        assert all(torch.equal(tensor, weights(again)[name]) for name, tensor in weights(through).items())


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0.5, 1.0, 0.8, 0.5]),  # from 1 at step 2 to 0 at step 12
        ("wsd", [0.5, 1.0, 1.0, 1.0]),  # falls over the last 20 % of 12 steps: 2 steps
    ],
)
def test_schedules_fall_to_zero_at_the_last_step(schedule: str, expected: list[float]) -> None:
    settings = config(warmup_steps=2, lr_schedule=schedule, min_lr_ratio=0.0, lr_decay_ratio=0.2)
    assert [learning_rate_at(settings, step, 12) for step in (1, 2, 4, 7)] == pytest.approx(expected)
    assert learning_rate_at(settings, 12, 12) == 0.0
    assert learning_rate_at(settings, 11, 12) == pytest.approx(0.5 if schedule == "wsd" else 0.1)


def test_arrays_of_experiences_reach_the_algorithm() -> None:
    offsets = np.array([0, 3, 5])
    batch = pad_batch(
        PackedColumns(
            token_ids=(np.arange(5), offsets),
            loss_mask=(np.array([0, 1, 1, 0, 1], bool), offsets),
            behavior_logprobs=None,
            rewards=[0.0, 1.0],
            group_ids=[1, 1],
            rollout_index=[0, 1],
            turns=[np.array([[1, 3, 0]]), np.array([[1, 2, 2]])],
            token_rewards=(np.arange(5.0), offsets),
            step_rewards=[np.array([0.5]), np.array([0.25])],
            state=[np.array([2**62]), np.array([-7])],
        )
    )
    flat = batch.for_algorithm(4)
    assert flat.token_rewards_N is not None and flat.token_rewards_N.tolist() == [1.0, 2.0, 4.0]
    assert flat.step_rewards_BA is not None and flat.step_rewards_BA.tolist() == [[0.5], [0.25]]
    assert flat.state_BA is not None and flat.state_BA.tolist() == [[2**62], [-7]]
    assert (flat.step, flat.turn_BA.tolist(), flat.expert_B.tolist()) == (4, [[0], [2]], [True, True])
