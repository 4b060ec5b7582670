"""vLLM's parsers of tool calls read what ours write, and ours read the same."""

from __future__ import annotations

import json

import pytest

from rftcore.tools.calls import ToolCall
from rftcore.tools.formats import FORMATS
from tests.support.chat_tokenizers import chat_tokenizer

pytest.importorskip("vllm")

CALLS = [
    ToolCall("add", {"a": 1, "b": 'x\n"é'}, 0),
    ToolCall("sub", {"c": [1, {"d": None}], "e": -1.5, "f": True}, 1),
]
# Written by hand as models do, with other spaces than ours.
BY_HAND = {
    "hermes": 'Sure.\n<tool_call>{"arguments":{"a":1},"name":"add"}</tool_call>',
    "llama_json": '{"name":"add","parameters":{"a":1}}',
    "pythonic": "[add(a=1), add(a=2)]",
}


@pytest.mark.parametrize(
    ("name", "theirs", "template"),
    [("hermes", "hermes", "qwen2_5"), ("llama_json", "llama3_json", "llama3_1"), ("pythonic", "pythonic", "llama3_1")],
)
def test_vllm_reads_the_same_calls(name: str, theirs: str, template: str) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    parser, request = ToolParserManager.get_tool_parser(theirs), ChatCompletionRequest(messages=[], model="m")
    for text in (FORMATS[name].render(CALLS, ""), BY_HAND[name]):
        found = parser(chat_tokenizer(template)).extract_tool_calls(text, request).tool_calls
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in found]
        ours = FORMATS[name].parse(text).calls
        assert [(call.name, call.arguments) for call in ours if isinstance(call, ToolCall)] == calls != []
