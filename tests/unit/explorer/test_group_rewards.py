"""Rewards over whole groups: called once for the rollouts that were scored, stored as parts, combined as the others; a failure is that of the group."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rftcore.config.reward import Combination, RewardConfig
from rftcore.config.run import RunConfig, parse_config
from rftcore.engines.base import Decoding, Generation
from rftcore.explorer.rehearsal import StandIn
from rftcore.explorer.rollout_slots import RolloutSlots
from rftcore.explorer.rollouts import RolloutRunner
from rftcore.explorer.scorer import Scorer
from rftcore.resolved import ResolvedRun
from rftcore.rewards import load_rewards
from rftcore.workflows.single_turn import single_turn
from rftdata.errors import ConfigError
from rftdata.experience import Group
from rftdata.planning.claims import ClaimedGroup
from tests.support.checking import refuse_names
from tests.support.models import make_character_tokenizer
from tests.support.waiting import PATIENCE_S

# Answers have the letters of their number, the last fails to be scored.
ALONE = """
def alone(turn, task):
    if turn.response == "ffff":
        raise ValueError("no")
    return len(turn.response)

alone.runs_in_explorer = True
"""
RANK = """
def rank(rollouts, task, *, scale=1.0):
    assert [rollout.turn.messages[-1]['content'] for rollout in rollouts] == ['?'] * len(rollouts)
    return [{'rank': scale * rollout.reward, 'group': len(rollouts)} for rollout in rollouts]

rank.of_group = True
"""


class Answers(StandIn):
    """`f`, `ff`, `fff`, `ffff` in turn."""

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        self._answer = "f" * (len(self._answer) + 1)
        return await super().generate(prompt_token_ids, decoding)


def explored(
    folder: Path, rewards: list[Any], *, combination: Combination = "sum", **files: str
) -> tuple[Group, list[tuple[str, str]]]:
    """Return a group of four, and the failures."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    claimed = ClaimedGroup(
        group_id=1,
        claim_token=1,
        explore_step=0,
        ordinal=0,
        group_size=4,
        task_id=1,
        taskset="letters",
        task_key="one",
        payload={"prompt": "?", "answer": "ff"},
    )
    loaded = load_rewards([RewardConfig.model_validate(entry) for entry in rewards], folder)
    scorer = Scorer(loaded, folder, combination=combination, timeout_s=PATIENCE_S, max_processes=1)
    failures: list[tuple[str, str]] = []

    async def run() -> Group:
        runner = RolloutRunner(
            engine=Answers(make_character_tokenizer(), ""),  # type: ignore[no-untyped-call]
            workflow=single_turn,
            workflow_args={},
            scorer=scorer,
            timeout_s=PATIENCE_S,
            source="explorer",
            slots=RolloutSlots(1, 1),
            on_failure=lambda *failure: failures.append(failure),
        )
        return await runner.group(claimed, Decoding(temperature=0.7, top_p=0.9))

    try:
        return asyncio.run(run()), failures
    finally:
        scorer.close()


@pytest.mark.parametrize("plain", [True, False])
def test_a_reward_over_the_group_is_called_once_for_the_rollouts_that_were_scored(tmp_path: Path, plain: bool) -> None:
    rank = RANK if plain else RANK.replace("def rank", "async def rank")
    rewards = ["./alone.py:alone", {"name": "./rank.py:rank", "weight": 0.5, "scale": 10}]
    group, failures = explored(tmp_path, rewards, alone=ALONE, rank=rank)
    scored = [(rollout.outcome, rollout.reward) for rollout in group.rollouts]
    assert scored == [("ok", 7.5), ("ok", 13.5), ("ok", 19.5), ("failed", None)]
    sequences = [rollout.sequences[0] for rollout in group.rollouts[:3]]
    assert [sequence.reward for sequence in sequences] == [7.5, 13.5, 19.5]
    assert sequences[1].reward_parts == {"alone": 2.0, "rank": 20.0, "group": 3.0}
    assert len(failures) == 1


def test_a_reward_over_the_group_is_a_factor_of_a_product(tmp_path: Path) -> None:
    group, _ = explored(
        tmp_path,
        ["./alone.py:alone", {"name": "./rank.py:rank", "as": "rank", "weight": 2}],
        combination="product",
        alone=ALONE,
        rank=RANK.replace("{'rank': scale * rollout.reward, 'group': len(rollouts)}", "rollout.reward"),
    )
    assert [rollout.reward for rollout in group.rollouts[:3]] == [1.0, 8.0, 27.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "return [1.0]",
            r"1 values for 3 rollouts for the group of the task 'one' of 'letters'.*failed ones are left out",
        ),
        ("return 1.0", r"1\.0, a value of type float,.*a list with a finite number"),
        ("return {0: 1.0}", "a value of type dict"),
        ("return [1.0, None, 1.0]", "rank.py:rank, rollout 1, returned nothing"),
        ("return [1.0, float('nan'), 1.0]", "rollout 1, returned nan, which is not finite"),
        ("return [1.0, 10**400, 1.0]", "rollout 1, returned 1000.*, which is too great for float32"),
        ("return [1.0, True, 1.0]", "of type bool"),
        ("raise KeyError('a')", r"KeyError: 'a' \(rank\.py, line 3"),
        ("import time; time.sleep(1000)", "took longer than"),
    ],
)
def test_a_failure_of_a_reward_over_the_group_is_that_of_all_its_scored_rollouts(
    body: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import re

    if "sleep" in body:
        monkeypatch.setattr(f"{__name__}.PATIENCE_S", 2.0)
    rank = f"def rank(rollouts, task):\n    pass\n    {body}\n\nrank.of_group = True\nrank.runs_in_explorer = {'return' in body}\n"
    group, failures = explored(tmp_path, ["./alone.py:alone", "./rank.py:rank"], alone=ALONE, rank=rank)
    outcome = "timeout" if "sleep" in body else "failed"
    assert [rollout.outcome for rollout in group.rollouts] == [outcome] * 3 + ["failed"]
    for rollout in group.rollouts[:3]:
        assert rollout.reward is None and rollout.sequences[0].reward is None
        assert re.search(message, rollout.error or ""), rollout.error
    assert len(failures) == 2, "that of the last rollout, and one of the group"


def test_the_shortest_right_answer_is_preferred(tmp_path: Path) -> None:
    right = "async def right(turn, task):\n    return float(len(turn.response) > 1)"
    group, _ = explored(tmp_path, ["./right.py:right", {"name": "shortest_correct", "part": "right"}], right=right)
    parts = [rollout.sequences[0].reward_parts["shortest_correct"] for rollout in group.rollouts]
    assert parts == pytest.approx([0.0, 0.5 - 1 / 3, 0.5 - 2 / 3, -0.5]), "of lengths 1 to 4, the first one wrong"


def config(**changes: Any) -> RunConfig:
    raw: dict[str, Any] = {
        "run": {"name": "sums"},
        "model": {"path": "nowhere"},
        "tasks": [{"name": "a", "source": "none"}],
        "algorithm": {"name": "grpo"},
        "explorer": {"reward": ["exact_match", "shortest_correct"]},
        "trainer": {},
        "eval": {"every": 20},
        "steps": 3,
    }
    for section, values in changes.items():
        raw[section] = values if isinstance(values, list) else {**raw[section], **values}
    return parse_config(raw, Path(), "test")


def test_rewards_over_groups_are_refused_where_a_group_is_one_rollout() -> None:
    validation = {"eval": {"tasks": [{"name": "v", "source": "none"}]}}
    refuse_names(ResolvedRun(config(**validation)))
    alone: list[tuple[dict[str, Any], str]] = [
        ({"explorer": {"reward": ["shortest_correct"]}, **validation}, "answers each task of 'v' alone.*exact_match"),
        ({"explorer": {"reward_combination": "first_failure"}}, "cannot be one of first_failure"),
        ({"algorithm": {"name": "reinforce", "group_size": 1}}, "groups of the taskset 'a' have one"),
        ({"explorer": {"greedy_baseline": True}}, "a greedy baseline is compared with none"),
    ]
    for changes, message in alone:
        with pytest.raises(ConfigError, match=f"the reward shortest_correct compares.*{message}"):
            refuse_names(ResolvedRun(config(**changes)))
