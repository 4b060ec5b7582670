"""The gateway with OpenAI's own client: what a program asks for is recorded token for token, and what cannot be done is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from rftcore.engines.base import Decoding, Generation, PromptTooLongError
from rftcore.gateway import GatewaySession, SessionSettings
from rftcore.tools.calls import ToolCall
from rftcore.tools.formats import FORMATS
from rftcore.workflows.limits import Limits
from rftdata.errors import EngineStoppedError
from tests.support.chat_tokenizers import chat_tokenizer
from tests.unit.gateway.endpoint import Endpoint, endpoint
from tests.unit.workflows.test_session import Spy, check

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        "strict": True,
    },
}
HELLO = [{"role": "user", "content": "hello"}]


def during(program: Callable[[Endpoint], Awaitable[None]], *answers: str, **settings: Any) -> Endpoint:
    """Run a program against an endpoint; return the endpoint after its end."""

    async def run() -> Endpoint:
        async with endpoint(*answers, **settings) as opened:
            await program(opened)
        return opened

    return asyncio.run(asyncio.wait_for(run(), 60))


def called(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    return FORMATS[name].render([ToolCall(tool, arguments) for tool, arguments in calls], "")


def test_a_chat_of_several_turns_is_one_sequence_of_the_sampled_tokens() -> None:
    async def program(end: Endpoint) -> None:
        chat: list[Any] = list(HELLO)
        for expected in ("the answer is 4", " 5 "):
            answer = await end.client.chat.completions.create(model="policy", messages=chat, seed=1, user="me")
            [choice] = answer.choices
            assert (choice.message.content, choice.finish_reason) == (expected, "stop")
            assert answer.usage is not None
            assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
            chat += [choice.message.model_dump(), {"role": "user", "content": [{"type": "text", "text": "more"}]}]

    end = during(program, "the answer is 4", " 5 ")
    [sequence] = end.model.sequences()
    assert sequence.num_turns == 2
    check(end.spy, [sequence])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("qwen2_5", "hermes"),
        ("qwen3", "hermes"),
        ("llama3_1", "llama_json"),
        ("gemma3", "text"),
        ("glm4moe", "glm"),
        ("gptoss", "harmony"),
        ("gemma4_v5", "gemma"),
    ],
)
def test_calls_of_tools_and_their_results_continue_the_sampled_tokens(template: str, name: str) -> None:
    async def program(end: Endpoint) -> None:
        chat: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
        identifiers = set()
        for number in (2, 3):
            answer = await end.client.chat.completions.create(model="policy", messages=chat, tools=[ADD])
            message = answer.choices[0].message
            assert answer.choices[0].finish_reason == "tool_calls"
            assert message.tool_calls is not None
            [call] = message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": number})
            identifiers.add(call.id)
            chat += [message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "42"}]
        assert len(identifiers) == 2
        last = await end.client.chat.completions.create(
            model="policy",
            messages=chat,
            tools=[ADD],
            tool_choice="none",
        )
        assert last.choices[0].message.content == "It is 42"

    answers = [called(name, ("add", {"a": 1, "b": number})) for number in (2, 3)]
    format = "text" if name == "text" else None
    end = during(program, *answers, "It is 42", template=template, format=format)
    [sequence] = end.model.sequences()
    assert sequence.num_turns == 3, "no turn is rendered again"
    assert "Add two numbers." in sequence.prompt
    check(end.spy, [sequence])


def test_a_malformed_call_is_a_text() -> None:
    broken = called("hermes", ("add", {"a": 1})).replace("1", "1,,")

    async def program(end: Endpoint) -> None:
        answer = await end.client.chat.completions.create(model="policy", messages=HELLO, tools=[ADD])
        assert answer.choices[0].message.content == broken
        assert answer.choices[0].message.tool_calls is None

    during(program, broken)


def test_calls_of_an_example_are_rendered_and_edited_answers_fork() -> None:
    async def program(end: Endpoint) -> None:
        call = {"id": "mine", "type": "function", "function": {"name": "add", "arguments": '{"a": 7, "b": 8}'}}
        example = [
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "mine", "content": "15"},
        ]
        await end.client.chat.completions.create(model="policy", messages=example, tools=[ADD])
        edited = [*example, {"role": "assistant", "content": "two"}, {"role": "user", "content": "so?"}]
        await end.client.chat.completions.create(model="policy", messages=edited, tools=[ADD])

    end = during(program, "one", "three")
    first, second = end.model.sequences()
    assert '"a": 7' in first.prompt
    assert second.fork == "history"
    check(end.spy, [first, second])


def test_streams_end_with_reason_usage_and_calls() -> None:
    async def program(end: Endpoint) -> None:
        async with end.client.chat.completions.stream(
            model="policy",
            messages=HELLO,
            tools=[{**ADD, "function": {**ADD["function"], "strict": True}}],
            stream_options={"include_usage": True},
        ) as stream:
            found = await stream.get_final_completion()
        assert found.choices[0].finish_reason == "tool_calls"
        assert found.choices[0].message.tool_calls is not None
        assert found.choices[0].message.tool_calls[0].function.name == "add"
        assert found.usage is not None
        assert found.usage.completion_tokens > 0
        text = await end.client.chat.completions.create(model="policy", messages=HELLO, stream=True)
        parts = [chunk async for chunk in text]
        assert "".join(part.choices[0].delta.content or "" for part in parts) == "well"
        assert parts[-1].choices[0].finish_reason == "stop"

    during(program, called("hermes", ("add", {"a": 1, "b": 2})), "well")


def test_several_answers_are_branches_with_log_probabilities() -> None:
    async def program(end: Endpoint) -> None:
        answer = await end.client.chat.completions.create(model="policy", messages=HELLO, n=3, logprobs=True)
        assert [choice.message.content for choice in answer.choices] == ["a", "b", "c"]
        for choice, (_, generation) in zip(answer.choices, end.spy.received, strict=True):
            assert choice.logprobs is not None
            assert [each.logprob for each in choice.logprobs.content or []] == pytest.approx(generation.logprobs)

    end = during(program, "a", "b", "c")
    assert [sequence.fork for sequence in end.model.sequences()] == [None, "branch", "branch"]


def test_limits_and_formats_of_requests_hold_and_the_sampling_is_the_runs() -> None:
    seen: list[Decoding] = []

    @dataclass
    class Noting(Spy):
        async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
            seen.append(decoding)
            return await super().generate(prompt_token_ids, decoding)

    async def program(end: Endpoint) -> None:
        await end.client.chat.completions.create(
            model="policy",
            messages=HELLO,
            temperature=0.25,
            top_p=0.5,
            stop=["x"],
            max_completion_tokens=7,
            response_format={"type": "json_object"},
        )

    for sampling, expected in (("run", (1.0, 1.0)), ("program", (0.25, 0.5))):
        end = during(program, "a", spy=Noting(chat_tokenizer("qwen2_5")), sampling=sampling)
        decoding = seen.pop()
        assert (decoding.temperature, decoding.top_p) == expected
        assert (decoding.stop, decoding.max_tokens) == (("x",), 7)
        assert decoding.structure is not None
        metrics = end.model.turns[0].sequence.metrics
        assert metrics == ({"requested_temperature": 0.25, "requested_top_p": 0.5} if sampling == "run" else {})


@pytest.mark.parametrize(
    ("change", "param", "text"),
    [
        ({"extra": 1}, "extra", "Unrecognized request argument supplied: extra"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "Unrecognized request argument"),
        ({"top_logprobs": 3}, "top_logprobs", "not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty", "not supported"),
        ({"tool_choice": "required"}, "tool_choice", "'auto' or 'none'"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"n": 1000}, "n", "less than or equal to 64"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "Field required"),
        ({"messages": [{"role": "judge", "content": "a"}]}, "messages[0]", "does not match any of the expected tags"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "'text'",
        ),
        ({"messages": [{"role": "user", "content": "a", "weight": 0}]}, "messages[0].weight", "Unrecognized"),
        (
            {"messages": [*HELLO, {"role": "tool", "tool_call_id": "x", "content": "a"}]},
            "messages[1].tool_call_id",
            "has no call with this id",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
        ({"tools": [ADD], "parallel_tool_calls": False}, "parallel_tool_calls", "false is not supported"),
        ({"response_format": {"type": "xml"}}, None, "response_format is not valid"),
    ],
)
def test_what_cannot_be_done_is_refused_by_the_name_of_the_field(
    change: dict[str, Any], param: str | None, text: str
) -> None:
    async def program(end: Endpoint) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            await end.client.post(
                "/chat/completions", body={"model": "policy", "messages": HELLO, **change}, cast_to=object
            )
        assert refused.value.param == param
        assert text in refused.value.message
        assert refused.value.type == "invalid_request_error"

    assert during(program).model.turns == []


def test_fields_without_effect_and_nulls_are_accepted() -> None:
    nothing: dict[str, Any] = {"presence_penalty": 0, "logit_bias": {}, "store": False, "tools": None, "stop": None}

    async def program(end: Endpoint) -> None:
        await end.client.post(
            "/chat/completions", body={"model": "policy", "messages": HELLO, **nothing}, cast_to=object
        )

    assert len(during(program, "a").model.turns) == 1


def test_models_are_listed_and_others_do_not_exist() -> None:
    async def program(end: Endpoint) -> None:
        assert [model.id async for model in end.client.models.list()] == ["policy"]
        assert (await end.client.models.retrieve("policy")).id == "policy"
        with pytest.raises(openai.NotFoundError, match="the rollout's model is 'policy'"):
            await end.client.chat.completions.create(model="gpt", messages=HELLO)

    async def any_name(end: Endpoint) -> None:
        assert (await end.client.chat.completions.create(model="gpt", messages=HELLO)).model == "gpt"

    during(program)
    during(any_name, "a", model="*")


def test_keys_paths_methods_hosts_and_bodies_are_checked() -> None:
    async def program(end: Endpoint) -> None:
        root = end.url.partition("/s/")[0]
        async with httpx.AsyncClient() as client:

            async def status(method: str, url: str, **request: Any) -> int:
                return (await client.request(method, url, **request)).status_code

            body = {"model": "policy", "messages": HELLO}
            assert await status("POST", f"{root}/s/{end.session.key}x/v1/chat/completions", json=body) == 401
            assert await status("POST", f"{root}/v1/chat/completions", json=body) == 401
            bearer = {"Authorization": f"Bearer {end.session.key}"}
            assert await status("POST", f"{root}/v1/chat/completions", json=body, headers=bearer) == 200
            assert await status("GET", f"{end.url}/chat/completions") == 405
            assert await status("GET", f"{end.url}/embeddings") == 404
            assert await status("GET", f"{end.url}/models", headers={"Host": "evil.example"}) == 403
            assert await status("POST", f"{end.url}/chat/completions", content=b"{") == 400
            assert await status("POST", f"{end.url}/chat/completions", content=b"[]") == 400
            assert await status("POST", f"{end.url}/chat/completions", content=b" " * (33 << 20)) == 413
            end.gateway.end(end.session)
            assert await status("POST", f"{end.url}/chat/completions", json=body) == 409

    assert len(during(program, "a").model.turns) == 1


@pytest.mark.parametrize("chat", [[*HELLO, *HELLO], HELLO], ids=["refused by the template", "too long"])
def test_a_refused_request_is_no_turn(chat: list[dict[str, str]]) -> None:
    async def program(end: Endpoint) -> None:
        for _ in range(3):
            with pytest.raises(openai.BadRequestError):
                await end.client.chat.completions.create(model="policy", messages=chat)
        await end.client.chat.completions.create(model="policy", messages=HELLO)
        with pytest.raises(openai.PermissionDeniedError, match="has had its 1 turns"):
            await end.client.chat.completions.create(model="policy", messages=HELLO)

    errors = [PromptTooLongError("too long")] * (3 * (chat == HELLO))
    during(program, "a", spy=failing(*errors, template="gemma3"), limits=Limits(max_turns=1))


def test_limits_are_errors_that_clients_do_not_repeat() -> None:
    async def program(end: Endpoint) -> None:
        client = end.client.with_options(max_retries=3)
        await client.chat.completions.create(model="policy", messages=HELLO)
        with pytest.raises(openai.PermissionDeniedError, match="has had its 1 turns") as refused:
            await client.chat.completions.create(model="policy", messages=HELLO)
        assert refused.value.code == "max_turns"
        assert end.session.limit_reached.is_set()

    assert during(program, "a", limits=Limits(max_turns=1)).model.stop_reason == "max_turns"


class Failing(Spy):
    """An engine whose answers are errors."""

    errors: list[Exception]

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        if self.errors:
            raise self.errors.pop(0)
        return await super().generate(prompt_token_ids, decoding)


def failing(*errors: Exception, template: str = "qwen2_5") -> Failing:
    spy = Failing(chat_tokenizer(template))
    spy.errors = list(errors)
    return spy


def test_a_prompt_that_is_too_long_has_openais_code() -> None:
    async def program(end: Endpoint) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            await end.client.chat.completions.create(model="policy", messages=HELLO)
        assert refused.value.code == "context_length_exceeded"

    during(program, spy=failing(PromptTooLongError("too long")))


def test_an_engine_that_stopped_ends_the_run_and_not_only_the_request() -> None:
    async def program(end: Endpoint) -> None:
        with pytest.raises(openai.InternalServerError) as refused:
            await end.client.chat.completions.create(model="policy", messages=HELLO)
        assert refused.value.status_code == 503
        with pytest.raises(EngineStoppedError):
            await end.session.failed

    during(program, spy=failing(EngineStoppedError("it hangs")))


def test_a_template_that_refuses_the_chat_is_the_programs_error() -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]

    async def program(end: Endpoint) -> None:
        with pytest.raises(openai.BadRequestError, match="refuses the chat"):
            await end.client.chat.completions.create(model="policy", messages=chat)

    during(program, template="gemma3")


class Slow(Spy):
    """An engine that waits before its answers."""

    gate: asyncio.Event

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        await self.gate.wait()
        return await super().generate(prompt_token_ids, decoding)


def slow(*answers: str) -> Slow:
    spy = Slow(chat_tokenizer("qwen2_5"))
    spy.gate = asyncio.Event()
    spy.will_answer(*answers)
    return spy


@pytest.mark.parametrize("stream", [False, True])
def test_a_repeated_request_is_answered_by_the_first_one(stream: bool) -> None:
    spy = slow("first", "second")

    async def program(end: Endpoint) -> None:
        asyncio.get_running_loop().call_later(1.0, spy.gate.set)
        impatient = end.client.with_options(max_retries=5, timeout=0.3)
        if stream:
            parts = await impatient.chat.completions.create(model="policy", messages=HELLO, stream=True)
            text = "".join([part.choices[0].delta.content or "" async for part in parts])
        else:
            answer = await impatient.chat.completions.create(model="policy", messages=HELLO)
            text = answer.choices[0].message.content or ""
        assert text == "first"
        again = await end.client.chat.completions.create(model="policy", messages=HELLO)
        assert again.choices[0].message.content == "second", "without a sign of repetition it is another request"

    end = during(program, spy=spy)
    assert len(end.spy.received) == 2


def test_requests_with_one_idempotency_key_are_one_request() -> None:
    async def program(end: Endpoint) -> None:
        def ask(content: str) -> Any:
            return end.client.chat.completions.create(
                model="policy",
                messages=[{"role": "user", "content": content}],
                extra_headers={"Idempotency-Key": "k"},
            )

        first, second = await asyncio.gather(ask("a"), ask("a"))
        assert first.choices[0].message.content == second.choices[0].message.content == "one"
        with pytest.raises(openai.BadRequestError, match="another request"):
            await ask("b")

    assert len(during(program, "one", "two").model.turns) == 1


def test_equal_requests_at_once_are_repeated_each_by_its_own() -> None:
    spy = slow("one", "two")

    async def program(end: Endpoint) -> None:
        asyncio.get_running_loop().call_later(1.0, spy.gate.set)
        impatient = end.client.with_options(max_retries=5, timeout=0.4)
        both = await asyncio.gather(
            *(impatient.chat.completions.create(model="policy", messages=HELLO) for _ in range(2))
        )
        assert {answer.choices[0].message.content for answer in both} == {"one", "two"}

    assert len(during(program, spy=spy).model.turns) == 2


def test_an_answer_that_no_program_has_read_is_not_trained() -> None:
    spy = slow("unread", "read")

    async def program(end: Endpoint) -> None:
        with pytest.raises(openai.APITimeoutError):
            await end.client.with_options(timeout=0.3).chat.completions.create(model="policy", messages=HELLO)
        spy.gate.set()
        await asyncio.sleep(0.1)
        await end.client.chat.completions.create(model="policy", messages=[*HELLO, *HELLO])

    unread, read = during(program, spy=spy).model.sequences()
    assert unread.loss_mask is not None
    assert not any(unread.loss_mask)
    assert read.loss_mask is None


def test_a_session_leaves_the_answers_of_others_as_they_are() -> None:
    """Those of an earlier session, and those that the workflow has asked for itself."""

    async def program(end: Endpoint) -> None:
        await end.client.chat.completions.create(model="policy", messages=HELLO)
        end.gateway.end(end.session)
        second = GatewaySession(end.model, SessionSettings())
        await end.model.chat([{"role": "user", "content": "by the workflow"}])
        async with AsyncOpenAI(base_url=end.gateway.open(second), api_key="none", max_retries=0) as client:
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "other"}])
        end.gateway.end(second)

    end = during(program, "one", "two", "three")
    assert [turn.sequence.loss_mask for turn in end.model.turns] == [None, None, None]


def test_the_end_of_a_rollout_ends_its_open_requests() -> None:
    spy = slow("late")

    async def program(end: Endpoint) -> None:
        asyncio.get_running_loop().call_later(0.3, end.gateway.end, end.session)
        with pytest.raises(openai.ConflictError, match="has ended"):
            await end.client.chat.completions.create(model="policy", messages=HELLO)

    assert during(program, spy=spy).model.turns == []
