"""What a workflow may ask of the model in one call, and the limits of a rollout."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from rftcore.engines.base import Decoding, Generation, PromptTooLongError
from rftcore.engines.structure import Structure
from rftcore.workflows.limits import LimitReachedError, Limits
from rftcore.workflows.task import Model, Task
from rftdata.errors import RftError
from tests.support.chat_tokenizers import chat_tokenizer
from tests.unit.workflows.test_session import Spy, answered, asked, check

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds <|im_end|> numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


class Decodings(Spy):
    """Keeps the decodings, too."""

    seen: list[Decoding]

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        self.seen = [*getattr(self, "seen", []), decoding]
        return await super().generate(prompt_token_ids, decoding)


def parsed(text: str) -> dict[str, Any]:
    """The message of an answer that calls a tool: the text after `call:` is its argument."""
    content, _, argument = text.partition("call:")
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if argument:
        call = {"name": "add", "arguments": {"a": int(argument)}}
        message["tool_calls"] = [{"type": "function", "function": call}]
    return message


def test_a_call_changes_the_sampling_of_its_answer_alone_and_never_beyond_the_run_s_longest_answer() -> None:
    spy = Decodings(chat_tokenizer("qwen2_5"))
    model, form = Model(spy, Decoding(max_tokens=50, temperature=0.7)), {"type": "choice", "choice": ["yes", "no"]}

    async def run() -> None:
        await model.chat(asked("a"), temperature=0.0, max_tokens=7, stop="\n", top_p=0.5, top_k=3)
        await model.chat(asked("b"), max_tokens=900, response_format=form)
        await model.chat(asked("c"))

    asyncio.run(run())
    assert spy.seen == [
        Decoding(temperature=0.0, max_tokens=7, stop=("\n",), top_p=0.5, top_k=3),
        Decoding(temperature=0.7, max_tokens=50, structure=Structure("choice", ("yes", "no"))),
        Decoding(temperature=0.7, max_tokens=50),
    ]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"temperature": -1}, "invalid temperature"),
        ({"top_p": 0.0}, "invalid top_p"),
        ({"max_tokens": 0}, "invalid max_tokens"),
        ({"stop": [""]}, "invalid stop"),
        ({"stops": "x"}, "does not know an argument.*stops.*response_format"),
        ({"response_format": {"type": "xml"}}, "response_format is not valid.*json_schema"),
        ({"response_format": {"type": "choice", "choice": []}}, "response_format is not valid"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_sampled(wrong: Any, words: str) -> None:
    spy = Spy(chat_tokenizer("qwen2_5"))
    with pytest.raises(RftError, match=words):
        Model(spy, Decoding()).chat(asked("a"), **wrong)
    assert spy.received == []


def test_a_token_that_the_structure_of_an_answer_forced_is_not_trained_on() -> None:
    class Forced(Spy):
        async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
            found = await super().generate(prompt_token_ids, decoding)
            return Generation(found.token_ids, [-0.5, 0.0, -1e-9], found.text, "stop", [(0, 1)])

    spy = Forced(chat_tokenizer("qwen2_5"), answers=[([5, 6, 7], "stop"), ([5, 6, 7], "stop")])
    model = Model(spy, Decoding())

    async def run() -> None:
        turn = await model.chat(asked("a"), response_format={"type": "json_object"})
        await model.chat(answered(asked("a"), turn, ("user", "b")))

    asyncio.run(run())
    (sequence,) = model.sequences()
    assert sequence.loss_mask is not None
    mask = [bool(value) for value in sequence.loss_mask]
    assert mask[:3] == [True, False, False] and mask[-3:] == [True, True, True] and sum(mask) == 4


def test_several_answers_to_one_chat_are_branches_with_a_row_each() -> None:
    spy = Spy(chat_tokenizer("qwen2_5"))
    model = Model(spy, Decoding())
    turns = asyncio.run(model.chats(asked("a"), 3))
    assert [turn.sequence.num_prompt_tokens for turn in turns] == [len(spy.received[0][0])] * 3
    assert [s.fork for s in model.sequences()] == [None, "branch", "branch"]
    check(spy, model.sequences())


def test_first_answers_within_a_limit_are_kept_if_the_limit_allows_fewer_than_asked_for() -> None:
    model = Model(Spy(chat_tokenizer("qwen2_5")), Decoding(), limits=Limits(max_turns=2))
    with pytest.raises(LimitReachedError, match="has had its 2 turns"):
        asyncio.run(model.chats(asked("a"), 3))
    assert [s.fork for s in model.sequences()] == [None, "branch"] and model.stop_reason == "max_turns"


def test_a_limit_after_an_earlier_answer_keeps_the_answers_that_have_begun() -> None:
    model = Model(Spy(chat_tokenizer("qwen2_5")), Decoding(), limits=Limits(max_turns=3))

    async def run() -> None:
        await model.chat(asked("a"))
        await model.chats(asked("b"), 3)

    with pytest.raises(LimitReachedError, match="has had its 3 turns"):
        asyncio.run(run())
    assert len(model.turns) == 3 and model.stop_reason == "max_turns"


class Slow(Spy):
    """Uses a share of the tokens that each request may sample, some time after it began, and keeps how many all open requests might sample."""

    share, may_sample, most = 1.0, 0, 0

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        self.may_sample += decoding.max_tokens
        self.most = max(self.most, self.may_sample + self.num_sampled)
        for _ in range(5):
            await asyncio.sleep(0)
        self.may_sample -= decoding.max_tokens
        self.answers = [([5] * math.ceil(self.share * decoding.max_tokens), "length")]
        return await super().generate(prompt_token_ids, decoding)

    @property
    def num_sampled(self) -> int:
        return sum(len(generation.token_ids) for _, generation in self.received)


@pytest.mark.parametrize(("share", "num_tokens"), [(1.0, [6, 4]), (0.5, [3, 3, 2, 1, 1])])
def test_requests_side_by_side_never_sample_more_than_the_limit_and_as_much_as_one_after_the_other(
    share: float, num_tokens: list[int]
) -> None:
    async def side_by_side(model: Model) -> None:
        await model.chats(asked("a"), 9)

    async def in_order(model: Model) -> None:
        for _ in range(9):
            await model.chat(asked("a"))

    for ask in (side_by_side, in_order):
        spy = Slow(chat_tokenizer("qwen2_5"))
        spy.share = share
        model = Model(spy, Decoding(max_tokens=6), limits=Limits(max_rollout_tokens=10))
        with pytest.raises(LimitReachedError, match="has sampled its 10 tokens"):
            asyncio.run(ask(model))
        assert [len(turn.response_token_ids) for turn in model.turns] == num_tokens
        assert spy.most <= 10 and model.stop_reason == "max_rollout_tokens"


def test_a_failed_request_returns_the_tokens_that_it_reserved() -> None:
    model = Model(Slow(chat_tokenizer("qwen2_5")), Decoding(max_tokens=6), limits=Limits(max_rollout_tokens=6))

    def refuse(text: str) -> dict[str, Any]:
        raise ValueError("no")

    async def run() -> None:
        request = asyncio.ensure_future(model.chat(asked("a")))
        await asyncio.sleep(0)
        request.cancel()
        await model.chat(asked("b"), parse=refuse)

    with pytest.raises(ValueError, match="no"):
        asyncio.run(run())
    with pytest.raises(LimitReachedError):  # the answer that was not parsed has sampled all tokens
        asyncio.run(_twice(model))


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "llama3_1"])
def test_a_chat_with_calls_of_tools_is_extended_token_for_token(template: str) -> None:
    spy = Spy(chat_tokenizer(template))
    thought = (
        "<think>\nso\n</think>\n\n" if template == "qwen3" else ""
    )  # without, the template adds one to the last answer alone
    spy.will_answer(f"{thought}one call:1", f"{thought}two call:2", f"{thought}three")
    model = Model(spy, Decoding())

    async def run() -> None:
        messages = asked("add")
        for _ in range(2):
            turn = await model.chat(messages, tools=[TOOL], parse=parsed)
            assert turn.message["tool_calls"][0]["function"]["name"] == "add" and "call" not in turn.message["content"]
            messages = [*messages, turn.message, {"role": "tool", "name": "add", "content": "3"}]
        await model.chat(messages, tools=[TOOL], parse=parsed)

    asyncio.run(run())
    (sequence,) = model.sequences()
    assert sequence.num_turns == 3 and "add" in sequence.prompt
    # The text of a special token in the description of a tool is no token.
    end = spy.tokenizer.convert_tokens_to_ids("<|im_end|>")
    if template != "llama3_1":
        clean = [{**TOOL, "function": {**TOOL["function"], "description": "Adds numbers."}}]  # type: ignore[dict-item]
        other = Spy(spy.tokenizer)
        asyncio.run(Model(other, Decoding()).chat(asked("add"), tools=clean))
        assert spy.received[0][0].count(end) == other.received[0][0].count(end)
    check(spy, model.sequences())


def test_a_chat_with_other_tools_or_template_arguments_is_another_chat() -> None:
    spy = Spy(chat_tokenizer("qwen3"))
    model, chat = Model(spy, Decoding()), asked("a")

    async def run() -> None:
        turn = await model.chat(chat, template_args={"enable_thinking": False})
        await model.chat(answered(chat, turn, ("user", "b")), tools=[TOOL])

    asyncio.run(run())
    assert "</think>" in model.turns[0].sequence.prompt and len(model.sequences()) == 2
    check(spy, model.sequences())


def test_limits_on_turns_and_tokens_end_a_rollout_and_cut_its_last_answer() -> None:
    spy = Decodings(chat_tokenizer("qwen2_5"))
    spy.will_answer("one", "two", "three")
    model = Model(spy, Decoding(max_tokens=50), limits=Limits(max_turns=2, max_rollout_tokens=10))

    async def run() -> None:
        for text in "abc":
            await model.chat(asked(text))

    with pytest.raises(LimitReachedError, match=r"has had its 2 turns \(explorer.max_turns\)"):
        asyncio.run(run())
    num_first = len(model.turns[0].response_token_ids)
    assert [decoding.max_tokens for decoding in spy.seen] == [10, 10 - num_first]
    assert model.stop_reason == "max_turns" and len(model.turns) == 2
    tokens = Model(spy, Decoding(), limits=Limits(max_rollout_tokens=1))
    spy.will_answer("four")
    with pytest.raises(LimitReachedError, match="has sampled its 1 tokens"):
        asyncio.run(_twice(tokens))
    assert tokens.stop_reason == "max_rollout_tokens"


def test_a_prompt_beyond_the_context_ends_a_rollout_only_after_an_answer() -> None:
    class Short(Spy):
        async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
            if len(self.received) >= self.most:
                raise PromptTooLongError("a prompt of 9 tokens does not fit the engine's context")
            return await super().generate(prompt_token_ids, decoding)

        most = 1

    model = Model(Short(chat_tokenizer("qwen2_5")), Decoding())
    with pytest.raises(LimitReachedError, match="does not fit"):
        asyncio.run(_twice(model))
    assert model.stop_reason == "context_length"
    none = Short(chat_tokenizer("qwen2_5"))
    none.most = 0
    model = Model(none, Decoding())
    with pytest.raises(PromptTooLongError):
        asyncio.run(_twice(model))
    assert model.stop_reason is None


def test_a_chat_beyond_the_context_leaves_other_chats_and_roles_their_turns() -> None:
    class Short(Spy):
        async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
            if len(prompt_token_ids) > 300:
                raise PromptTooLongError("a long prompt does not fit")
            return await super().generate(prompt_token_ids, decoding)

    model = Model(Short(chat_tokenizer("qwen2_5")), Decoding(), limits=Limits(max_turns=4))

    async def run() -> None:
        # The first answer of the rollout is sampled while a chat without room waits for it.
        outcomes = await asyncio.gather(
            model.chat(asked("x y " * 300), role="x"), model.chat(asked("a"), role="o"), return_exceptions=True
        )
        assert isinstance(outcomes[0], LimitReachedError) and outcomes[0].reason == "context_length"
        await model.chat(asked("b"), role="o")
        await model.chat(asked("short"), role="x")
        assert model.stop_reason == "context_length"
        await model.chat(asked("c"), role="o")  # the fourth: a chat that was refused is no turn
        await model.chat(asked("d"), role="o")

    with pytest.raises(LimitReachedError, match="has had its 4 turns"):
        asyncio.run(run())
    assert [turn.sequence.role for turn in model.turns] == ["o", "o", "x", "o"] and model.stop_reason == "max_turns"


async def _twice(model: Model) -> None:
    await model.chat(asked("a"))
    await model.chat(asked("b"))


def test_seeds_of_a_group_are_equal_and_those_of_its_rollouts_differ() -> None:
    row = {"task_id": 1, "taskset": "t", "task_key": "k", "payload": {"prompt": "p"}}
    evaluated, again, group, other = (Task.from_row(row, *of) for of in ((), (), (7, 1), (7, 2)))
    assert evaluated.seed == again.seed and len({evaluated.seed, group.seed, other.seed}) == 3
    rollouts = [Task.from_row(row, 7, 1).__class__(1, "t", "k", "p", None, {}, group.seed, i) for i in (0, 1)]
    assert rollouts[0].rollout_seed != rollouts[1].rollout_seed and 0 <= rollouts[0].rollout_seed < 2**31
    assert Task.from_row(row).rollout_seed == evaluated.rollout_seed
