"""Streams of the gateway with OpenAI's own client: answers come in parts as they are sampled, and what was sent is never taken back."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcore.engines.answer_text import AnswerText, GrowingText
from rftcore.engines.base import Decoding, Generation
from rftcore.engines.token_reports import report_tokens
from rftcore.gateway.parts import Parts, continued
from rftcore.tools.calls import ToolCall
from rftcore.tools.formats import FORMATS
from rftcore.workflows.limits import Limits
from rftdata.errors import EngineStoppedError
from tests.support.chat_tokenizers import chat_tokenizer
from tests.unit.gateway.endpoint import Endpoint, endpoint
from tests.unit.gateway.test_gateway import ADD, HELLO
from tests.unit.workflows.test_session import Spy, check


@dataclass
class Growing(Spy):
    """An engine that reports its tokens one by one, and waits for a gate in the middle of each answer."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        answer = self.answers.pop(0)
        for place, token_id in enumerate(answer[0]):
            report_tokens([token_id], decoding)
            await asyncio.sleep(0)
            if place == len(answer[0]) // 2:
                await self.gate.wait()
                if self.error is not None:
                    raise self.error
        self.answers.insert(0, answer)
        return await super().generate(prompt_token_ids, decoding)


def during(
    program: Callable[[Endpoint], Awaitable[None]],
    *answers: str,
    template: str = "qwen2_5",
    is_open: bool = True,
    **given: Any,
) -> Endpoint:
    async def run() -> Endpoint:
        spy = Growing(chat_tokenizer(template))
        if is_open:
            spy.gate.set()
        async with endpoint(*answers, spy=spy, **given) as opened:
            await program(opened)
        return opened

    return asyncio.run(asyncio.wait_for(run(), 60))


def gate(end: Endpoint) -> asyncio.Event:
    assert isinstance(end.spy, Growing)
    return end.spy.gate


def stream(end: Endpoint, **given: Any) -> Any:
    return end.client.chat.completions.create(**{"model": "policy", "messages": HELLO, "stream": True, **given})


def joined(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_an_answer_comes_in_parts_before_it_is_whole() -> None:
    async def program(end: Endpoint) -> None:
        chunks = []
        async for chunk in await stream(end, stream_options={"include_usage": True}):
            chunks.append(chunk)
            if len(joined(chunks)) > 10:
                assert end.model.turns == [] or gate(end).is_set(), "the engine still samples"
                gate(end).set()
        assert joined(chunks) == "the answer is 42, or it is not"
        *parts, last = chunks
        assert parts[0].choices[0].delta.role == "assistant" and len(parts) > 3
        assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["stop"]
        assert {part.id for part in chunks} == {last.id}
        assert last.choices == [] and last.usage is not None and last.usage.completion_tokens > 5

    end = during(program, "the answer is 42, or it is not", is_open=False)
    check(end.spy, end.model.sequences())


def test_a_stop_text_is_not_shown_in_part() -> None:
    async def program(end: Endpoint) -> None:
        chunks = [chunk async for chunk in await stream(end, stop=["STOP", "\n\n"])]
        assert all("S" not in (joined([chunk]).replace("SO", "")) for chunk in chunks)
        assert joined(chunks) == "SO the answer is 42 "

    during(program, "SO the answer is 42 STOP it")


CALL = FORMATS["hermes"].render([ToolCall("add", {})], "")
PIECES = ["the answer", " ", "\n\n", "é", "😀", "EN", "END", "<tool_call>", "</tool_call>", CALL, "<think>", "</think>"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@pytest.mark.parametrize("template", ["qwen2_5", "gemma4_v5"])
@settings(max_examples=150)
@given(
    text=TEXTS,
    stop=st.sampled_from([(), ("END",), ("\n\n", "ENDEND")]),
    with_tools=st.booleans(),
    seed=st.integers(0, 999),
)
def test_what_is_shown_is_the_beginning_of_the_answer(
    template: str, text: str, stop: tuple[str, ...], with_tools: bool, seed: int
) -> None:
    """Tokens that cut characters, marks and stop texts anywhere, in additions of any size."""
    tokenizer, chance = chat_tokenizer(template), random.Random(seed)
    decode, form = AnswerText(tokenizer), FORMATS["hermes"]
    token_ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

    async def run() -> list[str]:
        parts, shown, place = Parts("policy", decode, 1), [""], 0
        parts.begin(form.certain if with_tools else None)
        while place < len(token_ids):
            end = place + chance.randint(1, 4)
            parts.listen(0, token_ids[place:end], Decoding(stop=stop))
            shown.append(parts.shown[0])
            place = end
        return shown

    whole = decode(token_ids, ended=True, stop=stop)
    content = form.parse(whole).message(whole)["content"] if with_tools else whole
    shown = asyncio.run(run())
    assert all(after.startswith(before) for before, after in pairwise(shown))
    told = continued(shown[-1], content)
    assert told is not None and "".join(told.split()) == "".join(content.split())
    assert with_tools or told == content


class Counting(AnswerText):
    """Counts the tokens that it decodes."""

    num_decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        return super().decode(token_ids)


BYTES = chat_tokenizer("qwen2_5").encode("aé😀", add_special_tokens=False)


@given(
    token_ids=st.lists(st.sampled_from(BYTES), max_size=40),
    sizes=st.lists(st.integers(1, 6), min_size=40, max_size=40),
)
def test_parts_of_characters_are_shown_once_nothing_can_complete_them(token_ids: list[int], sizes: list[int]) -> None:
    decode = Counting(chat_tokenizer("qwen2_5"))
    growing, shown, place = GrowingText(decode), [""], 0
    for size in sizes:
        shown.append(growing.add(token_ids[place : place + size]))
        place += size
    assert all(after.startswith(before) for before, after in pairwise(shown))
    whole = decode.decode(token_ids)
    assert whole.startswith(shown[-1]) and len(whole) - len(shown[-1]) <= 8


def test_an_answer_of_halves_of_characters_is_decoded_in_linear_time() -> None:
    decode = Counting(chat_tokenizer("qwen2_5"))
    growing = GrowingText(decode)
    for _ in range(500):
        growing.add(BYTES[1:2] * 4)
    assert decode.num_decoded < 500 * 100


def test_content_before_a_call_comes_in_parts_and_the_call_whole() -> None:
    """The client puts the parts together and sends them back, and the chat continues with the sampled tokens."""
    call = FORMATS["hermes"].render([ToolCall("add", {"a": 1, "b": 2})], "")

    async def program(end: Endpoint) -> None:
        chunks = [chunk async for chunk in await stream(end, tools=[ADD])]
        assert sum(bool(joined([chunk])) for chunk in chunks) > 2
        assert joined(chunks) == "\n\n<think> no </think>\n\nthe answer is the answer"
        [(function, identifier)] = [
            (call.function, call.id) for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []
        ]
        assert (function.name, json.loads(function.arguments)) == ("add", {"a": 1, "b": 2})
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        said = {"id": identifier, "type": "function", "function": function.model_dump()}
        chat = [
            *HELLO,
            {"role": "assistant", "content": joined(chunks), "tool_calls": [said]},
            {"role": "tool", "tool_call_id": identifier, "content": "3"},
        ]
        await end.client.chat.completions.create(model="policy", messages=chat, tools=[ADD])

    end = during(program, f"\n\n<think> no </think>\n\nthe answer is the answer {call}", "It is 3")
    [sequence] = end.model.sequences()
    check(end.spy, [sequence])


def test_a_text_before_the_final_one_is_shown_first_and_stays() -> None:
    begun = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"

    async def program(end: Endpoint) -> None:
        chunks = [chunk async for chunk in await stream(end, tools=[ADD])]
        assert joined(chunks) == "I look.\nthe answer is 42"
        assert sum(bool(joined([chunk])) for chunk in chunks) > 1

    during(program, f"{begun}<|start|>assistant<|channel|>final<|message|>the answer is 42", template="gptoss")


@pytest.mark.parametrize("template", ["gptoss", "gemma4_v5", "glm4moe", "llama3_1"])
def test_thoughts_in_channels_and_calls_of_other_formats_do_not_leak(template: str) -> None:
    name = {"gptoss": "harmony", "gemma4_v5": "gemma", "glm4moe": "glm", "llama3_1": "llama_json"}[template]
    thought = {
        "gptoss": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant",
        "gemma4_v5": "<|channel>thought\nhm\n<channel|>",
    }
    begun = thought.get(template, "")
    said = FORMATS[name].render([], "the answer is 42")
    call = FORMATS[name].render([ToolCall("add", {"a": 1})], "").removesuffix("<|call|>")

    async def program(end: Endpoint) -> None:
        chunks = [chunk async for chunk in await stream(end, tools=[ADD])]
        assert joined(chunks) == "the answer is 42"
        chunks = [chunk async for chunk in await stream(end, tools=[ADD])]
        assert joined(chunks) == ""
        assert [call.function.name for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []] == ["add"]

    during(program, begun + said, begun + call, template=template)


CHANNELS = {
    "gptoss": (
        "<|channel|>analysis<|message|>s3cret<|end|><|start|>assistant",
        "<|channel|>final<|message|>",
        "<|end|>",
    ),
    "gemma4_v5": ("<|channel>thought\ns3cret\n<channel|>", "", ""),
}


@pytest.mark.parametrize("given", [{}, {"tools": [ADD], "tool_choice": "none"}], ids=["no tools", "no choice"])
@pytest.mark.parametrize("template", CHANNELS)
def test_thoughts_do_not_leak_from_a_chat_without_tools(template: str, given: dict[str, Any]) -> None:
    """Neither into the content, as a stream or whole, nor into the next prompt, also where the answer has the text of a call."""
    thought, final, ended = CHANNELS[template]
    name = {"gptoss": "harmony", "gemma4_v5": "gemma"}[template]
    call = ended + FORMATS[name].render([ToolCall("add", {"a": 1})], "").removesuffix("<|call|>")

    async def program(end: Endpoint) -> None:
        chat = [{"role": "system", "content": "be brief"}, *HELLO]
        for each in ("the answer", "42"):
            chunks = [chunk async for chunk in await stream(end, messages=chat, **given)]
            assert joined(chunks) == each
            chat += [{"role": "assistant", "content": each}, {"role": "user", "content": "more"}]
        whole = await end.client.chat.completions.create(model="policy", messages=chat, **given)
        assert whole.choices[0].message.content == "is it"
        chunks = [chunk async for chunk in await stream(end, **given)]
        assert joined(chunks).startswith("42" if template == "gptoss" else call)

    answers = [thought + final + each for each in ("the answer", "42", "is it")]
    end = during(program, *answers, final + ("42" if final else "") + call, template=template)
    check(end.spy, end.model.sequences())
    assert all("s3cret" not in turn.sequence.prompt for turn in end.model.turns)


def test_several_answers_come_side_by_side() -> None:
    call = FORMATS["hermes"].render([ToolCall("add", {"a": 1, "b": 2})], "")
    answers = ["the answer is 1", "user assistant system", call]

    async def program(end: Endpoint) -> None:
        chunks, indices = [], []
        async for chunk in await stream(end, n=3, tools=[ADD], logprobs=True, stream_options={"include_usage": True}):
            chunks.append(chunk)
            indices += [choice.index for choice in chunk.choices if choice.delta.content]
            if set(indices) == {0, 1}:
                gate(end).set()
        assert [joined(chunks, index) for index in range(3)] == [*answers[:2], ""]
        reasons = {c.index: c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason}
        assert reasons == {0: "stop", 1: "stop", 2: "tool_calls"}
        by_text = {generation.text: generation.logprobs for _, generation in end.spy.received}
        for index, text in enumerate(answers):
            choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
            found = [each.logprob for choice in choices if choice.logprobs for each in choice.logprobs.content or []]
            assert found == pytest.approx(by_text[text])
        assert chunks[-1].usage is not None

    end = during(program, *answers, is_open=False)
    assert [sequence.fork for sequence in end.model.sequences()] == [None, "branch", "branch"]


def test_a_client_that_disconnects_in_the_middle_leaves_an_answer_that_is_not_trained() -> None:
    async def program(end: Endpoint) -> None:
        async for _ in await stream(end):
            break
        await end.client.close()
        gate(end).set()
        while not end.model.turns:
            await asyncio.sleep(0.01)

    [sequence] = during(program, "the answer is 42", is_open=False).model.sequences()
    assert sequence.response == "the answer is 42"
    assert sequence.loss_mask is not None and not any(sequence.loss_mask)


async def _events(end: Endpoint, then: Callable[[], None]) -> list[str]:
    """The data of the events of a stream; `then` is called after the first one."""
    found: list[str] = []
    body = {"model": "policy", "messages": HELLO, "stream": True}
    async with (
        httpx.AsyncClient() as client,
        client.stream("POST", f"{end.url}/chat/completions", json=body, timeout=30) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            found += [line.removeprefix("data: ")] if line else []
            if len(found) == 1:
                then()
    return found


def test_an_engine_that_stops_ends_the_stream_with_an_error() -> None:
    async def program(end: Endpoint) -> None:
        assert isinstance(end.spy, Growing)
        end.spy.error = EngineStoppedError("it hangs")
        *_, last = await _events(end, gate(end).set)
        assert json.loads(last)["error"]["code"] == "engine_stopped"
        with pytest.raises(EngineStoppedError):
            await end.session.failed
        with pytest.raises(openai.APIError, match="it hangs"):  # OpenAI's client raises it, too
            _ = [chunk async for chunk in await stream(end)]

    assert during(program, "the answer is 42", "the answer is 42", is_open=False).model.turns == []


def test_the_end_of_a_rollout_ends_its_streams_with_an_error() -> None:
    async def program(end: Endpoint) -> None:
        *_, last = await _events(end, lambda: end.gateway.end(end.session))
        assert json.loads(last)["error"]["code"] == "rollout_ended"

    assert during(program, "the answer is 42", is_open=False).model.turns == []


def test_a_limit_in_the_middle_ends_the_stream_with_an_error() -> None:
    async def program(end: Endpoint) -> None:
        gate(end).set()
        await end.client.chat.completions.create(model="policy", messages=HELLO)
        gate(end).clear()
        *_, last = await _events(end, lambda: end.model.stop("max_seconds", "the rollout took too long") and None)
        assert json.loads(last)["error"]["code"] == "max_seconds"
        assert end.session.limit_reached.is_set()

    assert len(during(program, "one", "the answer is 42", is_open=False, limits=Limits()).model.turns) == 1


def test_an_error_before_the_first_part_is_a_status() -> None:
    async def program(end: Endpoint) -> None:
        await end.client.chat.completions.create(model="policy", messages=HELLO)
        with pytest.raises(openai.PermissionDeniedError, match="has had its 1 turns"):
            await stream(end)

    during(program, "a", limits=Limits(max_turns=1))


def test_a_second_client_with_the_key_gets_the_whole_stream() -> None:
    async def program(end: Endpoint) -> None:
        key = {"Idempotency-Key": "k"}
        first, texts = await stream(end, extra_headers=key), []
        async for chunk in first:
            texts.append(joined([chunk]))
            if not gate(end).is_set():
                second = asyncio.create_task(_whole(stream(end, extra_headers=key)))
                await asyncio.sleep(0.05)
                gate(end).set()
        assert "".join(texts) == await second == "the answer is 42"
        assert await _whole(stream(end, extra_headers=key)) == "the answer is 42", "also after its end"

    assert len(during(program, "the answer is 42", is_open=False).model.turns) == 1


async def _whole(opening: Awaitable[Any]) -> str:
    return joined([chunk async for chunk in await opening])
