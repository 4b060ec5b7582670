"""vLLM's parsers of tool calls read what ours write, and ours read the same."""

from __future__ import annotations

import json

import pytest

from rftcore.tools.calls import ToolCall
from rftcore.tools.formats import FORMATS
from rftcore.tools.tool import function_schema
from tests.support.chat_tokenizers import chat_tokenizer

pytest.importorskip("vllm")

CALLS = [
    ToolCall("add", {"a": 1, "b": 'x\n"é'}, 0),
    ToolCall("sub", {"c": [1, {"d": None}], "e": -1.5, "f": True}, 1),
]
# vLLM's parser of Gemma's calls reads numbers within lists as texts if the schema names no type for them.
WITH_TEXTS = [CALLS[0], ToolCall("sub", {"c": ["1", {"d": "x"}], "e": -1.5, "f": True}, 1)]
TYPES = {"add": {"a": "integer", "b": "string"}, "sub": {"c": "array", "e": "number", "f": "boolean"}}
SCHEMAS = [
    function_schema(name, "", {"type": "object", "properties": {key: {"type": kind} for key, kind in types.items()}})
    for name, types in TYPES.items()
]
# Written by hand as models do, with other spaces than ours.
BY_HAND = {
    "hermes": 'Sure.\n<tool_call>{"arguments":{"a":1},"name":"add"}</tool_call>',
    "llama_json": '{"name":"add","parameters":{"a":1}}',
    "pythonic": "[add(a=1), add(a=2)]",
    "glm": "Sure.<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    "gemma": "<|tool_call>call:add{a: 1 }<tool_call|>",
}


@pytest.mark.parametrize(
    ("name", "theirs", "template"),
    [
        ("hermes", "hermes", "qwen2_5"),
        ("llama_json", "llama3_json", "llama3_1"),
        ("pythonic", "pythonic", "llama3_1"),
        ("glm", "glm47", "glm4moe"),
        ("gemma", "gemma4", "gemma4_v5"),
    ],
)
def test_vllm_reads_the_same_calls(name: str, theirs: str, template: str) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(messages=[{"role": "user", "content": "a"}], model="m", tools=SCHEMAS)
    parser = ToolParserManager.get_tool_parser(theirs)(chat_tokenizer(template), request.tools)
    for text in (FORMATS[name].render(CALLS if name != "gemma" else WITH_TEXTS, ""), BY_HAND[name]):
        found = parser.extract_tool_calls(text, request).tool_calls
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in found]
        ours = FORMATS[name].parsed(text, SCHEMAS).calls
        assert [(call.name, call.arguments) for call in ours if isinstance(call, ToolCall)] == calls != []
