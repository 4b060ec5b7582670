"""Several roles of one policy: chats, experiences and rewards of each, and the workflow `multi_agent`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rftcore.engines.base import Decoding
from rftcore.explorer.rollout_slots import RolloutSlots
from rftcore.explorer.rollouts import RolloutRunner
from rftcore.other_models.models import NO_MODELS, OtherModels
from rftcore.workflows.limits import NO_LIMITS, Limits
from rftcore.workflows.multi_agent import check_args, multi_agent
from rftcore.workflows.task import Model, Score, Task, Turn
from rftdata.errors import ConfigError
from rftdata.experience import Rollout
from tests.support.chat_tokenizers import chat_tokenizer
from tests.support.waiting import PATIENCE_S
from tests.unit.workflows.test_session import Spy, answered, asked, check

HERE = "tests.unit.workflows.two_players"


async def judged(turn: Turn, task: Task) -> Score:
    return Score(0.5, {"style": 0.5})


async def unjudged(turn: Turn, task: Task) -> Score:
    return Score(0.0)


def rolled_out(
    spy: Spy,
    workflow: Any,
    scorer: Any = unjudged,
    limits: Limits = NO_LIMITS,
    others: OtherModels = NO_MODELS,
    **args: Any,
) -> Rollout:
    runner = RolloutRunner(
        engine=spy,  # type: ignore[arg-type]
        workflow=workflow,
        workflow_args=args,
        scorer=scorer,
        timeout_s=2 * PATIENCE_S,
        limits=limits,
        others=others,
        source="explorer",
        slots=RolloutSlots(1, 1),
    )
    return asyncio.run(runner.rollout(Task(1, "t", "k", "p", None), 0, Decoding()))


def played(spy: Spy, **args: Any) -> Rollout:
    return rolled_out(spy, multi_agent, environment=f"{HERE}:Takes", **args)


def contents(rollout: Rollout) -> list[list[Any]]:
    return [[message["content"] for message in sequence.messages or []] for sequence in rollout.sequences]


def test_each_role_has_a_sequence_with_its_own_messages_states_and_rewards() -> None:
    spy = Spy(chat_tokenizer("qwen2_5"))
    spy.will_answer("2", "1", "1")
    rollout = played(spy, system="You are {role}.", scorer=judged)
    assert (rollout.outcome, rollout.error, rollout.reward) == ("ok", None, 1.375)
    x, o = rollout.sequences
    assert (x.role, x.turn_index, x.fork, x.reward) == ("x", 0, None, 1.375)
    assert (o.role, o.turn_index, o.fork, o.reward) == ("o", 1, None, -0.5)
    assert contents(rollout) == [["You are x.", "4 left", "2", "1 left", "1"], ["You are o.", "2 left", "1"]]
    # x pays for taking two at once, and o loses by a move of x: rewards since the turn, and those of the reward function.
    assert (x.arrays["step_reward"].tolist(), o.arrays["step_reward"].tolist()) == ([-0.125, 1.5], [-0.5])
    assert len({*x.arrays["state_hash"].tolist(), *o.arrays["state_hash"].tolist()}) == 3
    assert x.arrays["turns"][:, 2].tolist() == [0, 2]
    assert x.reward_parts == {"x": 0.875, "x.style": 0.5, "o": -1.0, "o.style": 0.5}
    check(spy, rollout.sequences)


def test_an_opponent_plays_a_role_and_leaves_no_sequence() -> None:
    spy = Spy(chat_tokenizer("qwen2_5"))
    spy.will_answer("2", "1")
    rollout = played(spy, opponents={"o": f"{HERE}:one"})
    assert (rollout.outcome, rollout.error, rollout.reward) == ("ok", None, 0.875)
    assert [sequence.role for sequence in rollout.sequences] == ["x"]
    spy.will_answer("2")
    failed = played(spy, opponents={"o": f"{HERE}:nothing"})
    assert failed.outcome == "failed" and "an opponent returned no action" in str(failed.error)


def test_a_role_that_is_not_trained_is_stored_without_a_loss() -> None:
    spy = Spy(chat_tokenizer("qwen2_5"))
    spy.will_answer("2", "1", "1")
    rollout = played(spy, train_roles=["o"])
    assert [(s.role, s.num_trained_tokens > 0) for s in rollout.sequences] == [("x", False), ("o", True)]
    assert rollout.reward == -1.0  # that of the role that is trained


def test_a_limit_keeps_the_rewards_so_far() -> None:
    spy = Spy(chat_tokenizer("qwen2_5"))
    spy.will_answer("2", "1")
    rollout = played(spy, limits=Limits(max_turns=2))
    assert (rollout.outcome, rollout.stop_reason, rollout.reward) == ("ok", "max_turns", -0.125)
    assert [sequence.arrays["step_reward"].tolist() for sequence in rollout.sequences] == [[-0.125], [0.0]]


def test_a_limit_that_one_request_reaches_keeps_the_answers_of_those_beside_it() -> None:
    async def both(task: Task, model: Model, score: Any) -> Score:
        await model.chat(asked("a"), role="x")
        await asyncio.gather(model.chat(asked("b"), role="o"), model.chat(asked("c"), role="x"))
        return Score(0.0)

    rollout = rolled_out(Spy(chat_tokenizer("qwen2_5")), both, judged, limits=Limits(max_turns=2))
    assert (rollout.outcome, rollout.stop_reason, rollout.reward) == ("ok", "max_turns", 0.5)
    assert [sequence.role for sequence in rollout.sequences] == ["x", "o"]


def test_roles_never_share_a_sequence_even_where_one_s_chat_begins_with_the_other_s() -> None:
    spy = Spy(chat_tokenizer("qwen2_5"))

    async def talk(task: Task, model: Model, score: Any) -> Score:
        first = await model.chat(asked("hello"), role="x")
        chat = answered(asked("hello"), first, ("user", "and you?"))
        second = await model.chat(chat, role="o")
        await model.chat(answered(chat, second, ("user", "well")), role="o", train=False)
        return Score(0.0, by_role={"o": 1.0})

    rollout = rolled_out(spy, talk)
    x, o = rollout.sequences
    assert ((x.role, x.num_turns, x.reward), (o.role, o.num_turns, o.reward)) == (("x", 1, 0.0), ("o", 2, 1.0))
    # x's answer is in o's prompt; o's second answer is not trained.
    assert o.num_prompt_tokens > len(x.token_ids)
    start, end = o.arrays["turns"][1, :2] - o.num_prompt_tokens
    assert o.loss_mask is not None and not any(o.loss_mask[start:end]) and any(o.loss_mask[:start])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"opponents": {"z": f"{HERE}:one"}}, r"opponents names a role .*'z'.*allowed: x, o"),
        ({"train_roles": ["y"]}, r"train_roles names a role .*'y'.*allowed: x, o"),
        ({"system": {"agent": "Play."}}, r"system names a role .*'agent'"),
        ({"opponents": {"x": f"{HERE}:one", "o": f"{HERE}:one"}}, "the policy plays no role that is trained"),
        ({"opponents": {"x": f"{HERE}:one"}, "train_roles": ["x"]}, "the policy plays no role that is trained"),
        ({"opponents": {"o": f"{HERE}:gone"}}, "gone"),
        ({"opponents": {"o": {"endpoint": "judge"}}}, "opponents: o has no opponent.*explorer.models"),
    ],
)
def test_settings_with_which_every_rollout_would_fail_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_args(Path(), environment=f"{HERE}:Takes", **args)
