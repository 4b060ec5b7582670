"""Published chat templates and the formats of their calls: what a template writes, the format reads, and a chat with tools keeps the tokens of its answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcore.engines.base import Decoding
from rftcore.tools.calls import Parsed, ToolCall
from rftcore.tools.chat_template import format_of, tool_template
from rftcore.tools.formats import FORMATS
from rftcore.tools.tool import function_schema
from rftcore.workflows.chat_encoding import TemplateInput, chat_encoder
from rftcore.workflows.task import Model
from rftcore.workflows.tool_dialogue import ToolDialogue
from rftdata.errors import ConfigError
from tests.support.chat_tokenizers import chat_tokenizer
from tests.unit.workflows.test_session import Spy, check

FORMAT_OF = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "llama3_1": "llama_json",
    "glm4moe": "glm",
    "gptoss": "harmony",
    "gemma4_v5": "gemma",
}
END_OF_CALLS = {
    "glm4moe": "<|observation|>",
    "gptoss": "<|call|>",
    "gemma4_v5": "<|tool_response>",
    "llama3_1": "<|eot_id|>",
}
EVERY = pytest.mark.parametrize("template", FORMAT_OF)
TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}
ASKED = [{"role": "user", "content": "1 + 1?"}]
CALL = ToolCall("add", {"a": 1, "b": "two"})


def schema_of(arguments: dict[str, Any]) -> dict[str, Any]:
    properties = {name: {"type": TYPES[type(value)]} for name, value in arguments.items()}
    return function_schema("add", "Add.", {"type": "object", "properties": properties})


def written(template: str, message: dict[str, Any], schemas: list[dict[str, Any]]) -> str:
    """What the template writes for an answer, after what it writes to begin one."""
    encoder, given = chat_encoder(chat_tokenizer(template)), TemplateInput(schemas)
    asked = encoder.render(ASKED, given, add_generation_prompt=True)
    return encoder.render([*ASKED, message], given, add_generation_prompt=False).removeprefix(asked)


@EVERY
def test_the_format_of_a_template_is_found(template: str) -> None:
    assert format_of(chat_tokenizer(template)).name == FORMAT_OF[template]


def test_gemma_3_cannot_carry_tools() -> None:
    with pytest.raises(ConfigError, match=r"cannot carry tools: it leaves out tools, calls, results.*format: text"):
        format_of(chat_tokenizer("gemma3"))
    assert format_of(chat_tokenizer("gemma3"), "text").name == "text"


TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=12).filter(lambda text: "<" not in text)
# Jinja writes null as None in older templates, and arguments of other names than these are not of Python functions.
NAMES = st.sampled_from(["a", "b_2", "C", "long_name"])
VALUES = st.recursive(
    st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS
    | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@EVERY
@settings(max_examples=60)
@given(arguments=st.dictionaries(NAMES, VALUES, max_size=4))
def test_what_a_template_writes_the_format_reads(template: str, arguments: dict[str, Any]) -> None:
    call, schemas = ToolCall("add", arguments), [schema_of(arguments)]
    text = written(template, Parsed("", [call]).message(""), schemas)
    found = FORMATS[FORMAT_OF[template]].parsed(text, schemas)
    assert found.calls == [call]


@EVERY
def test_a_chat_with_calls_has_the_tokens_of_the_template(template: str) -> None:
    """An answer that is sampled as the template writes it: no token of the chat differs from the rendered one."""
    spy, schemas = Spy(chat_tokenizer(template)), [schema_of(CALL.arguments)]
    dialogue = ToolDialogue(spy.tokenizer, schemas)
    end = END_OF_CALLS.get(template, spy.tokenizer.eos_token)
    call = written(template, Parsed("", [CALL]).message(""), schemas)
    call = call.removeprefix("<think>\n\n</think>\n\n")  # Qwen 3 writes it in the last answer alone
    for text in (call, call):
        sampled = spy.tokenizer.encode(text.rstrip("\n").removesuffix(end) + end, add_special_tokens=False)
        spy.answers.append((sampled, "stop"))
    spy.will_answer("It is 2.")
    model = Model(spy, Decoding())

    async def run() -> list[dict[str, Any]]:
        chat: list[dict[str, Any]] = list(ASKED)
        for _ in range(2):
            turn = await model.chat(chat, tools=schemas)
            assert dialogue.calls(turn.response) == [CALL]
            chat += [turn.message, *dialogue.results(turn.message, [(CALL.call_id, "add", f"2 {end}")])]
        await model.chat(chat, tools=schemas)
        return chat

    chat = asyncio.run(run())
    [sequence] = model.sequences()
    check(spy, [sequence])
    assert sequence.num_turns == 3
    rendered = chat_encoder(spy.tokenizer).prompt(chat, TemplateInput(schemas))
    assert (sequence.prompt + sequence.response).startswith(rendered.text)
    assert spy.received[-1][0] == rendered.token_ids


THOUGHTFUL = {
    "gptoss": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant",
    "gemma4_v5": "<|channel>thought\nhm\n<channel|>",
    "glm4moe": "\n<think>hm</think>\n",
}


BEFORE_CALLS = {
    "gptoss": "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant",
    "gemma4_v5": "I look.",
}


@pytest.mark.parametrize("with_thoughts", [True, False])
@pytest.mark.parametrize("template", BEFORE_CALLS)
def test_a_text_before_a_call_stays_before_it(template: str, with_thoughts: bool) -> None:
    spy, schemas = Spy(chat_tokenizer(template)), [schema_of(CALL.arguments)]
    end, form = END_OF_CALLS[template], FORMATS[FORMAT_OF[template]]
    begun = (THOUGHTFUL[template] if with_thoughts else "") + BEFORE_CALLS[template]
    text = begun + form.render([CALL], "").removesuffix(end)
    spy.answers.append((spy.tokenizer.encode(text + end, add_special_tokens=False), "stop"))
    spy.will_answer("2")
    model, dialogue = Model(spy, Decoding()), ToolDialogue(spy.tokenizer, schemas)

    async def run() -> list[dict[str, Any]]:
        first = await model.chat(ASKED, tools=schemas)
        chat = [*ASKED, first.message, *dialogue.results(first.message, [(CALL.call_id, "add", "2")])]
        await model.chat(chat, tools=schemas)
        return chat

    chat = asyncio.run(run())
    [sequence] = model.sequences()
    check(spy, [sequence])
    rendered = chat_encoder(spy.tokenizer).prompt(chat, TemplateInput(schemas)).text
    assert 0 <= rendered.find("I look.") < rendered.find("1", rendered.find("I look."))


@pytest.mark.parametrize("template", THOUGHTFUL)
def test_thoughts_stay_while_tools_answer_and_go_where_the_template_takes_them_out(template: str) -> None:
    spy, schemas = Spy(chat_tokenizer(template)), [schema_of(CALL.arguments)]
    form = FORMATS[FORMAT_OF[template]]
    end = END_OF_CALLS[template]
    text = THOUGHTFUL[template] + form.render([CALL], "").removesuffix(end)
    spy.answers.append((spy.tokenizer.encode(text + end, add_special_tokens=False), "stop"))
    spy.will_answer("2", "4")
    model = Model(spy, Decoding())

    async def run() -> None:
        dialogue = ToolDialogue(spy.tokenizer, schemas)
        first = await model.chat(ASKED, tools=schemas)
        chat = [*ASKED, first.message, *dialogue.results(first.message, [(CALL.call_id, "add", "2")])]
        second = await model.chat(chat, tools=schemas)
        await model.chat([*chat, second.message, {"role": "user", "content": "2 + 2?"}], tools=schemas)

    asyncio.run(run())
    sequences = model.sequences()
    check(spy, sequences)
    assert [(s.num_turns, s.fork) for s in sequences] == [(2, None), (1, "template")]
    assert "hm" in sequences[0].response and "hm" not in sequences[1].prompt


def test_an_answer_in_channels_is_its_final_text() -> None:
    answer = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>It is 2."
    template = tool_template(chat_tokenizer("gptoss"))
    found = template.message(FORMATS["harmony"].parse(answer), answer)
    assert found == {"role": "assistant", "content": "It is 2.", "thinking": "hm"}
