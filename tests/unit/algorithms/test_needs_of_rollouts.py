"""Parts of reinforcement learning that do not fit each other, or the batch, are refused with what would fit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rftcore.algorithms import build_algorithm
from rftcore.algorithms.base import Signals
from rftcore.checks.algorithm import check_inputs, check_recorded, check_steps, describe_algorithm
from rftcore.config.explorer import ExplorerConfig
from rftdata.errors import ConfigError, RftError
from tests.support.algorithms import step_batch


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("grpo", {"advantage": "gae"}, "the advantage gae needs a critic.*add critic"),
        ("ppo", {"critic": None}, "the advantage gae needs a critic.*add critic"),
        ("grpo", {"critic": {}}, "critic trains values that no advantage reads.*gae"),
        ("ppo", {"critic": {"loss": "ppo"}}, "ppo does not train a critic.*value"),
        ("grpo", {"loss": "value"}, "value trains a critic, not the policy"),
        ("gdpo", {"kl": {"type": "k1", "coef": 0.1, "where": "reward"}}, "reads each of them by name.*kl.where: loss"),
        ("raft", {"advantage": None}, "the loss reinforce needs advantages"),
        ("sft", {"mask": "m2po"}, "mask changes how advantages count"),
        ("ppo", {"expert": {"loss": "sft"}}, "critic learns from returns"),
        ("grpo", {"pairs": {}}, "pairs forms preference pairs, and ppo has one loss per token.*dpo"),
    ],
)
def test_parts_that_do_not_fit_each_other(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){message}"):
        build_algorithm(name, changes)


@pytest.mark.parametrize(
    "name",
    [
        "grpo",
        "dr_grpo",
        "dapo",
        "rloo",
        "reinforce_plus_plus_baseline",
        "opmd",
        "asymre",
        "gspo",
        "step_wise_grpo",
        "gigpo",
        "raft",
        "mix",
        "online_dpo",
    ],
)
def test_groups_of_one_are_refused_where_rollouts_are_compared(name: str) -> None:
    with pytest.raises(ConfigError, match="group_size"):
        build_algorithm(name, group_size=1)


@pytest.mark.parametrize("name", ["ppo", "reinforce", "reinforce_plus_plus", "remax", "topr"])
def test_groups_of_one_are_enough_where_nothing_is_compared(name: str) -> None:
    assert build_algorithm(name, group_size=1).min_group_size == 1


@pytest.mark.parametrize(
    ("name", "columns"), [("remax", {"baseline_rewards"}), ("gigpo", {"state"}), ("grpo", set()), ("ppo", set())]
)
def test_an_algorithm_names_the_columns_that_a_workflow_must_record(name: str, columns: set[str]) -> None:
    assert build_algorithm(name).columns == columns


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("dpo", {"advantage": "group"}, "dpo, one per pair, reads no advantages.*advantage: null.*such as ppo"),
        (
            "grpo",
            {"kl": {"coef": 0.1}},
            "a coefficient without an estimator does nothing.*k1, k2, k3, abs or corrected",
        ),
        ("grpo", {"kl": {"type": "k3", "coef": -0.1}}, r"kl\.coef.*greater than or equal to 0"),
        ("grpo", {"kl": {"type": "k3", "coef": math.nan}}, r"kl\.coef.*finite number"),
        ("grpo", {"entropy": {"coef": math.inf}}, r"entropy\.coef.*finite number"),
        ("grpo", {"advantage": {"shift": math.nan}}, r"shift.*finite number"),
        ("grpo", {"loss": {"clip": -0.2}}, r"clip\.low.*greater than or equal to 0"),
        ("grpo", {"loss": {"clip": [0.2, math.inf]}}, r"clip\.high.*finite number"),
        ("grpo", {"loss": {"clip": [0.1, 0.2, 0.3]}}, "clip takes two numbers"),
        ("mix", {"expert": {"coef": math.nan}}, "finite number"),
        ("clip_b", {"mask": {"mu": math.inf}}, r"mu.*finite number"),
        ("grpo", {"loss": {"clop": 0.2}}, r"clop.*(did you mean clip|allowed: .*clip)"),
        ("grpo", {"advantges": "group"}, r"advantges.*(did you mean advantage|allowed: .*advantage)"),
    ],
)
def test_keys_and_numbers_that_cannot_be_meant(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){message}"):
        build_algorithm(name, changes)


class TestInputs:
    @pytest.mark.parametrize(
        ("name", "explorer", "message"),
        [
            ("gigpo", {}, r"gigpo reads state_hash .*'single_turn' records no inputs; .*turn\.record\(state=…\)"),
            ("on_policy_distillation", {}, "teacher_logprobs.*set algorithm.teacher to a model"),
            (
                "remax",
                {"greedy_baseline": False},
                "explorer.greedy_baseline prevents that .got False.; allowed: true.*rloo",
            ),
            ("remax", {"engine": "none"}, "explorer.engine prevents that"),
            ("remax", {"workflow": "demonstration"}, "explorer.workflow prevents that"),
            ("remax", {"temperature": 0}, "explorer.temperature prevents that.*above 0"),
        ],
    )
    def test_that_no_rollout_of_the_run_can_bring_are_refused(
        self, name: str, explorer: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=rf"(?s){message}"):
            check_inputs(build_algorithm(name), ExplorerConfig(**explorer))

    def test_that_rollouts_may_bring_are_accepted(self) -> None:
        check_inputs(build_algorithm("gigpo"), ExplorerConfig(workflow="./flow.py:walk"))
        check_inputs(build_algorithm("remax"), ExplorerConfig())
        check_inputs(build_algorithm("on_policy_distillation", {"teacher": "somewhere"}), ExplorerConfig())

    def test_that_a_trial_rollout_did_not_record_are_refused(self) -> None:
        gigpo, explorer = build_algorithm("gigpo"), ExplorerConfig(workflow="./flow.py:walk")
        check_recorded(gigpo, explorer, frozenset({"state_hash"}))
        with pytest.raises(ConfigError, match=r"state_hash.*'\./flow\.py:walk' did not record them in a trial rollout"):
            check_recorded(gigpo, explorer, frozenset({"step_reward"}))

    def test_of_a_batch_without_tokens_are_no_error(self) -> None:
        # An empty mask: nothing counts, and nothing is NaN.
        batch = step_batch([1.0, 0.0], tokens=[0, 0])
        plan = build_algorithm("grpo").plan(batch, Signals())
        assert plan.num_tokens == 0 and plan.policy_weights_N.tolist() == []


def test_a_reward_that_is_missing_is_refused_for_a_rollout_and_not_for_an_expert() -> None:
    batch = step_batch([0.0, math.nan, 1.0], [4, 4, 4], expert=[False, True, False])
    assert build_algorithm("mix").plan(batch, Signals()).advantages_N.isfinite().all()
    with pytest.raises(RftError, match="row 1, rollout 1 of group 4"):
        build_algorithm("grpo").plan(batch, Signals())


def test_the_signals_of_presets() -> None:
    expected = {
        "grpo": {"behavior"},
        "ppo": {"behavior", "reference", "values"},
        "reinforce": set(),
        "raft": set(),
        "opmd": set(),
        "reinforce_plus_plus": {"behavior", "reference"},
        "m2po": {"behavior", "old"},
        "clip_b": {"old", "entropy"},
        "clip_v": {"old", "entropy", "discriminator"},
        "topr": {"behavior"},
        "mix": {"behavior"},
    }
    assert {name: build_algorithm(name).signals for name in expected} == expected


def test_old_logprobs_decides_what_ratios_compare_with() -> None:
    batch, signals = step_batch([1.0, 0.0], behavior=[-1.0, -2.0]), Signals(old_N=torch.tensor([-3.0, -4.0]))
    for changes, anchor in (({}, [-3.0, -4.0]), ({"old_logprobs": "behavior"}, [-1.0, -2.0])):
        algorithm = build_algorithm("clip_b", changes)
        assert ("behavior" in algorithm.signals) == bool(changes)
        entropy = Signals(old_N=signals.old_N, entropy_N=torch.ones(2))
        assert algorithm.plan(batch, entropy).anchor_N.tolist() == anchor


def test_a_critic_whose_warm_up_lasts_as_long_as_the_run_is_refused() -> None:
    algorithm = build_algorithm("ppo", {"critic": {"warmup_steps": 4}})
    check_steps(algorithm, 5)
    with pytest.raises(ConfigError, match=r"leaves no step for the policy: the run has 4 steps.*allowed: 0 to 3"):
        check_steps(algorithm, 4)


def test_a_ratio_of_the_response_with_a_mean_over_tokens_is_noted() -> None:
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        changes = {"loss": {"level": "product"}, "aggregation": aggregation}
        (note,) = describe_algorithm(build_algorithm("rloo", changes), 0.0)
        assert (
            f"aggregation: {aggregation} averages over tokens once more" in note and "seq-mean-token-sum is one" in note
        )
    assert not [*describe_algorithm(build_algorithm("rloo", changes | {"aggregation": "seq-mean-token-sum"}), 0.0)]
    assert not [*describe_algorithm(build_algorithm("topr"), 0.0)]


def test_dropout_beside_a_narrow_clip_is_noted() -> None:
    (note,) = describe_algorithm(build_algorithm("gspo"), 0.1)
    assert note.startswith(
        "trainer.lora.dropout 0.1 changes the ratios by more than algorithm.loss.clip (0.0003, 0.0004)"
    )
    assert not [*describe_algorithm(build_algorithm("gspo"), 0.0), *describe_algorithm(build_algorithm("grpo"), 0.1)]
