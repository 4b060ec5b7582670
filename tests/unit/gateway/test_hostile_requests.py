"""Requests that no honest program sends, and many at once: each is a clear error or a recorded outcome, and none is anybody else's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from rftcore.engines.base import Decoding, Generation
from rftcore.gateway import GatewaySession, SessionSettings
from rftcore.workflows.task import Model
from tests.support.chat_tokenizers import chat_tokenizer
from tests.unit.gateway.endpoint import Endpoint
from tests.unit.gateway.test_gateway import ADD, HELLO, during
from tests.unit.workflows.test_session import Spy, check


def call(arguments: str, identifier: str = "mine", name: str = "add") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": identifier, "type": "function", "function": function}],
    }


def result(identifier: str = "mine", content: str = "3") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identifier, "content": content}


async def post(end: Endpoint, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps({"model": "policy", "messages": HELLO, **body}).encode()
    async with httpx.AsyncClient(timeout=60, verify=False) as client:
        return await client.post(f"{end.url}/chat/completions", content=content, headers=headers)


MANY = 300_000
REFUSED: list[tuple[str, Any, str]] = [
    ("deep", b"[" * 100_000, "the body is no JSON"),
    ("many errors", {"messages": [1] * MANY}, "valid dictionary"),
    ("many fields", {f"f{number}": 1 for number in range(MANY // 10)}, "errors"),
    ("a long name", {"x" * 100_000: 1}, "Unrecognized request argument"),
    ("deep arguments", {"messages": [*HELLO, call("[" * 100_000)], "tools": [ADD]}, "JSON object was expected"),
    ("deep values", {"messages": [*HELLO, call('{"a":' + "[" * 50_000)], "tools": [ADD]}, "deeply"),
    ("half a character", {"messages": [*HELLO, call('{"a": "\\ud800"}')], "tools": [ADD]}, "surrogate"),
    ("no number", {"messages": [*HELLO, call('{"a": NaN}')], "tools": [ADD]}, "NaN is not JSON"),
    ("more than arguments", {"messages": [*HELLO, call("{} {}")], "tools": [ADD]}, "follows the JSON object"),
    ("its own template", {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template is no variable"),
    ("the tokenizer", {"chat_template_kwargs": {"tokenize": True}}, "tokenize is no variable"),
    ("an empty stop", {"stop": [""]}, "none of them empty"),
    ("many stops", {"stop": ["a"] * 65}, "at most 64 texts"),
    ("a list of properties", {"tools": [{**ADD, "function": {"name": "f", "parameters": {"properties": [1]}}}]}, "JSON schemas"),
    ("a result of another answer", {"messages": [*HELLO, call("{}"), result(), *HELLO, call("{}", "b"), result()]}, "no call with this id"),
    ("a result of no answer", {"messages": [call("{}"), *HELLO, result()]}, "no call with this id"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "says"), [each[1:] for each in REFUSED], ids=[each[0] for each in REFUSED])
def test_a_request_that_cannot_be_answered_says_why_in_few_words(body: Any, says: str) -> None:
    async def program(end: Endpoint) -> None:
        answer = await post(end, body)
        assert (answer.status_code, answer.headers["x-should-retry"]) == (400, "false")
        assert says in answer.json()["error"]["message"]
        assert len(answer.content) < 1000

    assert during(program).model.turns == []


def test_a_schema_that_the_template_cannot_write_is_the_programs_error() -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": {"oneOf": [{"type": "string", "description": 5}]}}},
        },
    }

    async def program(end: Endpoint) -> None:
        answer = await post(end, {"tools": [tool]})
        assert answer.status_code == 400
        assert "the model's chat template refuses the chat" in answer.json()["error"]["message"]

    during(program, template="gptoss")


def test_numbers_of_headers_are_read_or_ignored() -> None:
    async def program(end: Endpoint) -> None:
        for number in ("\xb2", "9" * 5000, "-1", "x"):
            async with httpx.AsyncClient(verify=False) as client:
                headers = [(b"x-stainless-retry-count", number.encode("latin-1"))]
                body = {"model": "policy", "messages": HELLO}
                answer = await client.post(f"{end.url}/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200

    assert len(during(program, "a", "b", "c", "d").model.turns) == 4


def test_a_host_that_is_forged_or_given_twice_is_refused() -> None:
    async def program(end: Endpoint) -> None:
        port = int(end.url.rpartition("/s/")[0].rpartition(":")[2])
        hosts = {
            "evil.example": 403, f"127.0.0.1:{port}@evil.example": 403, f"127.0.0.1:{port}.evil.example": 403, "127.0.0.1:80:1": 403,
            "localhost.evil.example": 403, "": 403, f"127.0.0.1:{port}\r\nHost: evil.example": 400,
            f"127.0.0.1:{port}": 200, "localhost": 200,
        }  # fmt: skip
        for host, status in hosts.items():
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            path = end.url.partition(str(port))[2]
            writer.write(f"GET {path}/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read()
            assert answer.startswith(f"HTTP/1.1 {status}".encode()), (host, answer[:200])
            writer.close()

    during(program)


def test_a_body_of_100_mb_without_a_length_is_refused_and_the_next_request_answered() -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 1
            yield b" " * (1 << 20)

    async def program(end: Endpoint) -> None:
        async with httpx.AsyncClient(timeout=60, verify=False) as client:
            try:
                answer = await client.post(f"{end.url}/chat/completions", content=endless())
            except httpx.TransportError:  # the connection is closed while the rest is sent
                assert sent < 100
            else:
                assert answer.status_code == 413
        assert (await post(end, {})).status_code == 200

    assert len(during(program, "a").model.turns) == 1


def test_two_programs_with_one_key_are_chats_of_one_rollout() -> None:
    async def program(end: Endpoint) -> None:
        async def other(name: str) -> None:
            chat: list[Any] = [{"role": "user", "content": f"I am {name}"}]
            for _ in range(3):
                answer = (await post(end, {"messages": chat})).json()["choices"][0]["message"]
                chat += [
                    {"role": "assistant", "content": answer["content"]},
                    {"role": "user", "content": f"{name} again"},
                ]

        await asyncio.gather(other("one"), other("two"))

    end = during(program, *"abcdef")
    sequences = end.model.sequences()
    check(end.spy, sequences)
    assert [sequence.num_turns for sequence in sequences] == [3, 3]
    assert all("two" not in (s.prompt + s.response) or "one" not in (s.prompt + s.response) for s in sequences)


def test_calls_with_the_id_of_an_earlier_example_keep_their_own_names() -> None:
    multiply = {**ADD, "function": {**ADD["function"], "name": "multiply"}}

    async def program(end: Endpoint) -> None:
        for name in ("add", "multiply"):
            chat = [*HELLO, call('{"a": 1}', name=name), result()]
            assert (await post(end, {"messages": chat, "tools": [ADD, multiply]})).status_code == 200

    prompts = [end.sequence.prompt for end in during(program, "a", "b", template="gemma4_v5").model.turns]
    assert ["response:multiply" in prompt for prompt in prompts] == [False, True]


def test_a_program_that_repeats_refused_requests_fills_no_memory() -> None:
    async def program(end: Endpoint) -> None:
        for number in range(5):
            bad = {"messages": [*HELLO, result(f"x{number}")]}
            assert (await post(end, bad, **{"Idempotency-Key": f"k{number}"})).status_code == 400
            foreign = {"role": "assistant", "content": None, "tool_calls": [call("{}", f"y{number}")]}
            assert (await post(end, {"messages": [*HELLO, foreign, result("other")]})).status_code == 400
        assert not end.session._requests._all and not end.session._requests._by_key
        assert not end.session._transcript._calls and not end.session._transcript._answers

    during(program)


class Changing(Spy):
    """An engine whose weights change while all requests wait in it, so that answers have tokens of two versions."""

    gate: asyncio.Event
    version = 1
    num_waiting = 0

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        self.num_waiting += 1
        began = self.version
        await self.gate.wait()
        token_ids = [*self.tokenizer.encode("yes", add_special_tokens=False), self.tokenizer.eos_token_id]
        spans = [(0, began)] if began == self.version else [(0, began), (1, self.version)]
        return Generation(token_ids, [-0.5] * len(token_ids), "yes", "stop", spans)


def test_a_thousand_sessions_while_weights_change() -> None:
    """Every session gets its own answer, once, with the versions that sampled it. Without sockets, whose number the system limits."""
    num = 1000

    async def run() -> list[Model]:
        spy = Changing(chat_tokenizer("qwen2_5"))
        spy.gate = asyncio.Event()
        models = [Model(spy, Decoding()) for _ in range(num)]
        sessions = [GatewaySession(model, SessionSettings()) for model in models]
        asked = []
        for number, session in enumerate(sessions):
            body = {"model": "policy", "messages": [{"role": "user", "content": f"session {number}"}]}
            asked.append(session.submit(json.dumps({**body, "stream": number % 2 == 0}).encode()))
            asked[-1].attach()
        while spy.num_waiting < num:
            await asyncio.sleep(0)
        spy.version = 2
        spy.gate.set()
        for each in asked:
            assert (await each.task).completion.choices[0]["message"]["content"] == "yes"
            each.detach(delivered=True)
        for session in sessions:
            session.close()
        return models

    for number, model in enumerate(asyncio.run(asyncio.wait_for(run(), 120))):
        [sequence] = model.sequences()
        assert f"session {number}<" in sequence.prompt and sequence.loss_mask is None
        assert [version for _, version in sequence.policy_spans] == [1, 2]
