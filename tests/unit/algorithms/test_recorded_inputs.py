"""What workflows and rewards record for algorithms: types, lengths, and what is refused; and a group's greedy rollout."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rftcore.engines.base import Decoding, Generation
from rftcore.explorer.rehearsal import StandIn
from rftcore.explorer.rollout_slots import RolloutSlots
from rftcore.explorer.rollouts import RolloutRunner
from rftcore.explorer.scorer import Scorer
from rftcore.rewards import load_rewards
from rftcore.workflows.task import Model, Score, Task, Turn
from rftdata.errors import RftError
from rftdata.experience import Group, Sequence
from rftdata.planning.claims import ClaimedGroup
from rftdata.selectors import Screening
from tests.support.models import make_character_tokenizer
from tests.support.waiting import PATIENCE_S

TASK = Task(1, "sums", "one", "1+1=", "22")


def a_turn() -> Turn:
    return Turn(
        [], "22", "stop", Sequence("1+1=", "22", [5, 6, 7, 8, 2], 2, "stop", behavior_logprobs=[-0.5, -0.5, -0.1])
    )


class TestRecord:
    def test_values_of_the_response_are_arrays_over_all_tokens(self) -> None:
        turn = a_turn()
        turn.record(token_rewards=[0.5, 0.0, 1.0], teacher_logprobs=np.array([-1.0, -math.inf, -3.0]), step_reward=2)
        arrays = turn.sequence.arrays
        assert arrays["token_rewards"].tolist() == [0, 0, 0.5, 0.0, 1.0] and arrays["token_rewards"].dtype == np.float32
        assert arrays["teacher_logprobs"].tolist() == [0, 0, -1.0, -math.inf, -3.0]
        assert arrays["step_reward"].tolist() == [2.0] and set(arrays) == {
            "token_rewards",
            "teacher_logprobs",
            "step_reward",
        }

    def test_equal_states_have_equal_hashes(self) -> None:
        hashes = []
        for state in ("a board", "a board", b"a board", "another board", 17, -1):
            turn = a_turn()
            turn.record(state=state)
            [found] = turn.sequence.arrays["state_hash"].tolist()
            assert turn.sequence.arrays["state_hash"].dtype == np.int64
            hashes.append(found)
        assert hashes[0] == hashes[1] == hashes[2] != hashes[3] and hashes[4:] == [17, -1]
        assert hashes[0] == 2069746441779611708, "the same in every process and release"

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"state": {"x": 1}}, r"text, bytes or a 64-bit integer.*dict.*json\.dumps"),
            ({"state": 2**63}, "64-bit integer"),
            ({"step_reward": math.nan}, "step_reward of a turn is not a finite number"),
            ({"step_reward": "1"}, "not a finite number"),
            ({"token_rewards": [1.0, 2.0]}, "one value for each token.*3 values"),
            ({"token_rewards": [0.0, math.inf, 0.0]}, "token_rewards of the response's token 1 is not a number"),
            ({"teacher_logprobs": [0.0, 0.0, math.nan]}, "teacher_logprobs of the response's token 2"),
        ],
    )
    def test_values_that_algorithms_cannot_read_are_refused(self, values: dict[str, Any], message: str) -> None:
        with pytest.raises(RftError, match=rf"(?s){message}"):
            a_turn().record(**values)


class TestTokenRewards:
    def scored(self, tmp_path: Path, body: str, *more: str) -> tuple[Turn, Score]:
        text = f"from rftcore.workflows.task import TokenRewards\nasync def score(turn, task):\n    return {body}\n"
        (tmp_path / "a.py").write_text(text)
        turn, names = a_turn(), ["./a.py:score", *more]
        return turn, asyncio.run(Scorer(load_rewards(names, tmp_path), tmp_path)(turn, TASK))

    def test_go_to_the_turn_and_their_sum_to_the_parts(self, tmp_path: Path) -> None:
        turn, score = self.scored(
            tmp_path, "{'steps': TokenRewards([0.5, 0.0, 0.25]), 'length': 0.5, 'more': TokenRewards([0, 0, 1])}"
        )
        assert (score.reward, score.parts) == (0.5, {"steps": 0.75, "length": 0.5, "more": 1.0})
        assert turn.sequence.arrays["token_rewards"].tolist() == [0, 0, 0.5, 0.0, 1.25]

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ("TokenRewards([1.0])", "TokenRewards of 1 numbers.*response has 3 tokens"),
            ("TokenRewards([0.0, float('nan'), 0.0])", "token 1, returned nan, which is not finite"),
            ("[0.0, 0.0, 0.0]", "of type list.*TokenRewards"),
        ],
    )
    def test_need_one_finite_number_per_token(self, tmp_path: Path, body: str, message: str) -> None:
        with pytest.raises(RftError, match=rf"(?s){message}"):
            self.scored(tmp_path, body)

    def test_come_from_another_process_too(self, tmp_path: Path) -> None:
        (tmp_path / "b.py").write_text(
            "from rftcore.workflows.task import TokenRewards\ndef plain(turn, task):\n"
            "    return TokenRewards([0.5] * len(turn.response_token_ids))\n"
        )
        scorer = Scorer(load_rewards(["./b.py:plain"], tmp_path), tmp_path, timeout_s=PATIENCE_S)
        turn = a_turn()
        try:
            assert asyncio.run(scorer(turn, TASK)) == Score(0.0, {"plain": 1.5})
        finally:
            scorer.close()
        assert turn.sequence.arrays["token_rewards"].tolist() == [0, 0, 0.5, 0.5, 0.5]


class Answers(StandIn):
    """Greedily `2`, sampled `3`."""

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        self._answer = "2" if (decoding.temperature, decoding.top_p, decoding.top_k) == (0.0, 1.0, 0) else "3"
        return await super().generate(prompt_token_ids, decoding)


def explored(workflow: Callable[..., Any], screening: Screening | None = None, **options: Any) -> Group:
    claimed = ClaimedGroup(
        group_id=1,
        claim_token=1,
        explore_step=0,
        ordinal=0,
        group_size=3,
        task_id=1,
        taskset="sums",
        task_key="one",
        payload={"prompt": "1+1=", "answer": "2"},
    )

    async def run() -> Group:
        runner = RolloutRunner(
            engine=Answers(make_character_tokenizer(), ""),
            workflow=workflow,
            workflow_args={},
            scorer=no_score,  # type: ignore[no-untyped-call]
            timeout_s=PATIENCE_S,
            source="explorer",
            slots=RolloutSlots(8, 8),
            **options,
        )
        return await runner.group(claimed, Decoding(temperature=0.7, top_p=0.9), screening)

    return asyncio.run(run())


async def no_score(*_: object) -> Score:
    raise AssertionError("not asked for")


async def right_is_2(task: Task, model: Model, score: object) -> Score:
    turn = await model.chat([{"role": "user", "content": task.prompt}])
    return Score(float(turn.response == "2"), {"right": 1.0})


class TestGreedyRollout:
    def test_is_sampled_besides_the_others_and_kept_apart(self) -> None:
        group = explored(right_is_2, has_baseline=True)
        assert [(r.index, r.reward) for r in group.rollouts] == [(0, 0.0), (1, 0.0), (2, 0.0)]
        found = group.baseline
        assert found is not None and (found.outcome, found.reward, found.response, found.num_turns) == (
            "ok",
            1.0,
            "2",
            1,
        )
        assert (
            found.reward_parts == {"right": 1.0} and found.messages is not None and found.messages[-1]["content"] == "2"
        )
        assert explored(right_is_2).baseline is None

    def test_counts_with_the_rewards_of_its_tokens(self) -> None:
        async def rewards_tokens(task: Task, model: Model, score: object) -> Score:
            for _ in range(2):
                turn = await model.chat([{"role": "user", "content": task.prompt}])
                turn.record(token_rewards=[0.25])
            return Score(1.0)

        found = explored(rewards_tokens, has_baseline=True)
        assert found.baseline is not None and found.baseline.reward == 1.5 and found.rollouts[0].reward == 1.0

    def test_is_left_out_where_the_first_rollouts_screen_a_group_out(self) -> None:
        assert explored(right_is_2, Screening(2, 0.0, 1.0), has_baseline=True).baseline is None

    def test_keeps_its_error(self) -> None:
        async def fails(task: Task, model: Model, score: object) -> Score:
            turn = await model.chat([{"role": "user", "content": task.prompt}])
            if turn.response == "2":
                raise ValueError("no such move")
            return Score(0.5)

        found = explored(fails, has_baseline=True).baseline
        assert (
            found is not None
            and (found.outcome, found.reward) == ("failed", None)
            and "no such move" in str(found.error)
        )


def test_a_rollout_of_which_only_some_turns_have_a_state_fails() -> None:
    async def forgets(task: Task, model: Model, score: object) -> Score:
        for number in range(3):
            turn = await model.chat([{"role": "user", "content": task.prompt}])
            if number != 1:
                turn.record(state=number)
        model.write([{"role": "user", "content": task.prompt}], "2")  # an expert's needs none
        return Score(1.0)

    [first, *_] = explored(forgets).rollouts
    assert first.outcome == "failed" and first.error is not None
    assert "recorded state_hash for 2 of 3 sampled turns, and not for turn 1" in first.error
