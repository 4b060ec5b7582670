"""The selection benchmark: what it counts, that it is repeatable, and its result when no selector wins."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.selection.experiments import COMPARED, EXPERIMENTS
from benchmarks.selection.summary import at_target, summarize
from benchmarks.selection.training import Group, Learner, Plan, train
from rftcore.algorithms import build_algorithm
from rftdata.selectors import build_selector
from tests.support.waiting import PATIENCE_S

CHECKOUT = Path(__file__).resolve().parents[3]


class Scripted(Learner):
    """Task n succeeds with the first n of every four rollouts; its score is the number of updates over 100."""

    def __init__(self, num_tasks: int = 5) -> None:
        self.task_ids = list(range(num_tasks))
        self.levels = [0] * num_tasks
        self.features = {}
        self.anchor_rollouts = 0
        self.trained: list[tuple[int, int]] = []
        self.updates = 0

    def sample(self, task_ids: Sequence[int], sizes: Sequence[int]) -> list[Group]:
        self.num_sampled += sum(sizes)
        return [
            Group(task_id, (np.arange(size) % 4 < task_id).astype(float), list(range(size)))
            for task_id, size in zip(task_ids, sizes, strict=True)
        ]

    def update(self, groups: Sequence[Group]) -> None:
        self.updates += 1
        self.trained += [(group.task_id, len(group.rollouts)) for group in groups]

    def score(self) -> tuple[float, list[float]]:
        return self.updates / 100, [self.updates / 100]


def plan(**changes: Any) -> Plan:
    sizes = {"batch_groups": 3, "group_size": 8, "max_refill": 2, "budget": 10**6, "evaluate_every": 1, "gap": 0.03}
    return Plan(**(sizes | changes))


def test_every_rollout_counts_and_groups_of_equal_rewards_are_refilled_up_to_the_limit() -> None:
    learner = Scripted()
    record = train(build_selector("sequential", {}, learner.task_ids, 0), learner, plan())
    # Tasks 0, 1, 2 | one place again: 3 || 4, 0, 1 | 2, 3 || 4, 0, 1 | 2, 3.
    assert [point["rollouts"] for point in record["points"]] == [0, 32, 72, 112]
    assert record["rollouts"] == learner.num_sampled == 112
    assert (record["groups"], record["trained_groups"]) == (14, 9)
    assert {task_id for task_id, _ in learner.trained} == {1, 2, 3}


def test_a_run_ends_when_its_budget_is_spent() -> None:
    learner = Scripted()
    record = train(build_selector("sequential", {}, learner.task_ids, 0), learner, plan(budget=40, evaluate_every=10))
    assert record["rollouts"] == learner.num_sampled >= 40
    assert record["rollouts"] < 40 + 3 * 8
    assert at_target(record, "rollouts") is None


def test_screened_groups_cost_their_first_rollouts_and_are_not_trained_on() -> None:
    learner = Scripted()
    selector = build_selector("speed", {"screen_rollouts": 4}, learner.task_ids, 0)
    record = train(selector, learner, plan(gap=0.05))
    assert {size for _, size in learner.trained} == {8}
    assert {task_id for task_id, _ in learner.trained} == {1, 2, 3}
    screened = record["groups"] - record["trained_groups"]
    assert screened > 0 and record["screening_rollouts"] == 4 * screened
    assert record["rollouts"] == learner.num_sampled == 8 * record["trained_groups"] + 4 * screened


def run_of(*points: tuple[int, float], anchors: int = 0) -> dict[str, Any]:
    """A record whose score went through these points, with a target of 0.6."""
    return {
        "target": 0.6,
        "points": [
            {"rollouts": r, "steps": r // 10, "seconds": r / 100, "cpu_seconds": r / 100, "score": s} for r, s in points
        ],
        "rollouts": points[-1][0],
        "rollouts_made": points[-1][0],
        "screening_rollouts": 0,
        "steps": points[-1][0] // 10,
        "groups": 10,
        "trained_groups": 5,
        "chosen": [6, 4],
        "anchor_rollouts": anchors,
        "seconds": {"selector": 0.1, "sampling": 1.0, "training": 1.0},
    }


def test_a_selector_that_needs_more_or_misses_the_target_is_reported_as_a_loss() -> None:
    runs = {
        "shuffle": {0: run_of((0, 0.0), (100, 0.4), (200, 0.8)), 1: run_of((0, 0.0), (200, 0.6))},
        "random": {0: run_of((0, 0.0), (300, 0.6)), 1: run_of((0, 0.0), (1000, 0.3))},
        "difficulty": {0: run_of((0, 0.0), (50, 0.6), anchors=500), 1: run_of((0, 0.0), (100, 0.6), anchors=500)},
        "plr": {0: run_of((0, 0.0), (50, 0.6)), 1: run_of((0, 0.0), (400, 0.6))},
    }
    found = summarize(runs, budget=1000)
    assert found["shuffle"]["rollouts_to_target"] == {"mean": 175.0, "min": 150.0, "max": 200.0, "runs": [150.0, 200.0]}
    assert "against_uniform" not in found["shuffle"]
    lost = found["random"]
    assert (lost["reached"], lost["rollouts_to_target"]["mean"], lost["rollouts_to_target"]["runs"]) == (
        1,
        None,
        [300, None],
    )
    assert lost["against_uniform"]["verdict"] == "loses with every seed"
    assert lost["against_uniform"]["rollouts_ratio"]["runs"] == [0.5, None]
    won = found["difficulty"]
    assert won["against_uniform"]["verdict"] == "wins with every seed"
    assert won["against_uniform"]["rollouts_ratio"]["runs"] == [3.0, 2.0]
    # The anchors' rollouts stand beside, and may turn a gain into a loss.
    assert won["rollouts_to_target_with_anchors"]["runs"] == [550.0, 600.0]
    assert found["plr"]["against_uniform"]["verdict"] == "wins with 1, loses with 1 of 2 seeds"


def test_every_selector_of_the_project_is_compared() -> None:
    from rftdata.selectors import SELECTORS

    assert {compared.selector for compared in COMPARED.values()} == set(SELECTORS.builtins)


def test_the_sampler_and_the_held_out_score_agree_with_the_model_alone(tmp_path: Path) -> None:
    import torch

    from benchmarks.selection import sorting

    sorting.example("make_model").make_model(tmp_path, seed=4)
    tokens = sorting.Tokens(tmp_path)
    learner = sorting.open_learner(tmp_path, build_algorithm("grpo"), 1e-4, seed=0)
    with learner.policy.unpacked() as model:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 if parameter.ndim < 2 else 3.0)  # so that some responses end early
        train, held_out = sorting.make_tasks(sorting.Course(tasks_per_level=4, held_out_per_level=4), seed=0)
        assert not {task.answer for task in train} & {task.answer for task in held_out}
        torch.manual_seed(0)
        rollouts = list(sorting.rollouts_of(model, train * 4, tokens))
        assert len({len(response) for _, response, _ in rollouts}) > 1
        for prompt, response, logprobs in rollouts:
            assert tokens.eos not in response[:-1]
            assert response[-1] == tokens.eos or len(response) == sorting.MAX_TOKENS
            assert logprobs == pytest.approx(alone(model, prompt, response), abs=1e-4)
        expected = [sum(alone(model, tokens.prompt(task.question), tokens.response(task.answer))) for task in held_out]
        with torch.no_grad():
            found = sorting.chances(model, held_out, tokens)
        assert found.log().tolist() == pytest.approx(expected, abs=1e-3)


def alone(model: Any, prompt: list[int], response: list[int]) -> list[float]:
    """Log-probability of each token of a response, from one forward pass over one row without padding."""
    import torch

    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    values: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()
    return values


def printed(folder: Path, *options: str) -> dict[str, Any]:
    """What the benchmark prints on stdout, which must be JSON and nothing else."""
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "selection",
        "--quick",
        "--jobs",
        "1",
        "--folder",
        str(folder),
        *options,
    ]
    ended = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def behaviour(results: dict[str, Any]) -> Any:
    """What does not depend on the clock."""
    return [
        (name, selector, figures["curves"], figures["rollouts"], figures["share_chosen_by_level"])
        for name, experiment in results["experiments"].items()
        for selector, figures in experiment["selectors"].items()
    ]


@pytest.mark.long
def test_the_command_measures_every_selector_counts_all_rollouts_and_repeats_itself(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    results = printed(tmp_path / "a", "--seeds", "3", "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert set(results["experiments"]) == set(EXPERIMENTS)
    for experiment in results["experiments"].values():
        assert set(experiment["selectors"]) == set(COMPARED)
        assert {"gap", "budget", "group_size"} <= set(experiment["plan"])
        assert len(experiment["start"]["3"]["start"]["by_level"]) == len(experiment["levels"])
        for name, figures in experiment["selectors"].items():
            assert figures["rollouts"] == figures["rollouts_counted_by_learner"]
            assert figures["rollouts"][0] >= experiment["plan"]["budget"] or figures["reached"] == 1
            assert ("against_uniform" in figures) == (name != results["uniform"])
            assert (figures["anchor_rollouts"]["mean"] > 0) == COMPARED[name].uses_anchors
    started = {
        curve[0][1] for curve in (f["curves"]["3"] for f in results["experiments"]["sorting"]["selectors"].values())
    }
    assert len(started) == 1, "all selectors start from the same weights"
    again = printed(
        tmp_path / "b", "--seeds", "3", "--experiments", "synthetic_graded,sorting", "--selectors", "shuffle,speed"
    )
    first = {(name, selector): rest for name, selector, *rest in behaviour(results)}
    assert all(first[name, selector] == rest for name, selector, *rest in behaviour(again))


def test_an_unknown_selector_is_refused_with_the_allowed_names() -> None:
    command = [sys.executable, "-m", "benchmarks", "selection", "--selectors", "shuffle,best"]
    ended = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 2
    assert "argument --selectors: unknown: best; allowed: " in ended.stderr and all(
        name in ended.stderr for name in COMPARED
    )
