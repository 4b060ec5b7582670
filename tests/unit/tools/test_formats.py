"""Formats of tool calls: any text parses in linear time without an exception, and calls come back as they were rendered."""

from __future__ import annotations

import keyword
import time
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rftcore.tools.calls import CallError, Parsed, ToolCall
from rftcore.tools.formats import FORMATS, ToolFormat
from rftcore.tools.formats.unfinished import before_marks

EVERY = pytest.mark.parametrize("each", FORMATS.values(), ids=list(FORMATS))

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,9}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), max_size=4).map(
    lambda found: [ToolCall(name, arguments, number) for number, (name, arguments) in enumerate(found)]
)
PIECES = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<|python_tag|>",
            "<think>",
            "</think>",
            "<arg_key>a</arg_key>",
            "<arg_value>",
            "</arg_value>",
            "<|tool_call>",
            "call:add{",
            '<|"|>',
            "<tool_call|>",
            "<|channel>",
            "<channel|>",
            "<|start|>assistant",
            "<|channel|>analysis",
            "<|channel|>final",
            " to=functions.add",
            "<|message|>",
            "<|end|>",
            "<|call|>",
            "CALL add ",
            "CALL",
            "\n",
            " ",
            ";",
            ",",
        ),
        *(
            "{",
            "}",
            "[",
            "]",
            "(",
            ")",
            '"',
            "'",
            "'''",
            "\\",
            ":",
            "=",
            "-",
            "1e999",
            "NaN",
            "\\ud800",
            "add(",
            "a=1",
            "True",
        ),
        *(
            '{"name": "add", "arguments": {"a": 1}}',
            '"name"',
            '"arguments"',
            '{"a": 1}',
            "[add(a=1)]",
            "null",
            "#",
            "\x00",
            "é",
        ),
    ]
)


# Marks that end a text, and which no text can therefore contain.
UNWRITABLE = {"glm": "</arg_value>", "gemma": '<|"|>'}


def schemas_of(calls: list[ToolCall]) -> list[dict[str, Any]]:
    """Schemas in which the parameters have the types of the arguments. Equal names are of one function, so theirs are of the first call."""
    found = {}
    for call in reversed(calls):
        types = {
            name: {} if not isinstance(value, str) else {"type": "string"} for name, value in call.arguments.items()
        }
        found[call.name] = {"function": {"name": call.name, "parameters": {"properties": types}}}
    return list(found.values())


@EVERY
@given(calls=CALLS, content=st.sampled_from(["", "I look it up.", "Zwei Zeilen:\nja"]))
@settings(max_examples=60)
def test_calls_are_read_as_they_were_rendered(each: ToolFormat, calls: list[ToolCall], content: str) -> None:
    assume(UNWRITABLE.get(each.name, "\ud800") not in str(calls))
    assume(len({call.name for call in calls}) == len(calls))
    found = each.parsed(each.render(calls, content), schemas_of(calls))
    assert found.calls == calls
    assert found.content == content


@EVERY
@given(text=st.lists(PIECES | TEXTS, max_size=30).map("".join))
@settings(max_examples=200)
def test_any_text_is_parsed(each: ToolFormat, text: str) -> None:
    found = each.parse(text)
    assert all(call.number == number for number, call in enumerate(found.calls))
    message = found.message(text)
    is_divided = found.is_valid and (found.calls or found.thoughts is not None)
    assert message["content"] == (found.content if is_divided else text)


@EVERY
@given(text=st.lists(PIECES | TEXTS, max_size=12).map("".join), data=st.data())
@settings(max_examples=200)
def test_what_is_certain_of_an_unfinished_answer_stays(each: ToolFormat, text: str, data: st.DataObject) -> None:
    shown = each.certain(text[: data.draw(st.integers(0, len(text)))])
    content = each.parse(text).message(text)["content"]
    if each.parse(text).is_valid:
        assert "".join(content.split()).startswith("".join(shown.split()))


@EVERY
@pytest.mark.parametrize(
    "piece",
    [
        *(
            "<tool_call>",
            '<tool_call>{"a":"',
            "{",
            '{"name":',
            '{"name": {"a":',
            "[",
            "[f(",
            "f(a=",
            "[f(a='",
            "CALL f {",
            "CALL f\n",
            "<tool_call>f<arg_key>",
            "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>",
            "<arg_key>a</arg_key><arg_value>",
            "<|tool_call>call:f{",
            "<|tool_call>call:f{a:",
            '<|tool_call>call:f{a:<|"|>',
            "<|channel>",
            "<|channel><channel|>",
            "<|start|>",
            "<|message|>",
            "<|start|>a to=functions.f<|message|>",
            "<|start|>a to=functions.f<|message|>{<|call|>",
            "<|channel|>final<|message|>a<|end|>",
        ),
        *('{"a": "\\', "</tool_call>", "((((", "-", "not ", "[f(a=[", '[f(a="b"), ', "a.", "<think>", "\n", " "),
    ],
)
def test_a_long_answer_is_parsed_quickly(each: ToolFormat, piece: str) -> None:
    text = piece * (200_000 // len(piece))
    started = time.process_time()
    each.parse(text)
    each.parse("[f(a=" + text)
    each.parse("<|tool_call>call:f{a:" + text)
    each.parse("<tool_call>f\n" + text)
    each.certain(text)
    assert time.process_time() - started < 5.0, "linear: a tenth of a second on a free machine"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "invalid JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": "a"}</tool_call>', "must be a JSON object"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'needs the "name"'),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', 'needs "arguments"'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}', "NaN is not JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}', "surrogate"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 400 + "]" * 400 + "}}", "deeply"),
        ("llama_json", '{"name": "add", "parameters": {"a": }}', "invalid JSON"),
        ("pythonic", "[add(1, 2)]", "need names"),
        ("pythonic", "[add(a=1 + 1)]", "no literal"),
        ("pythonic", "[add(a=open('x'))]", "no literal"),
        ("pythonic", "[add(a=1), 2]", "no call"),
        ("pythonic", "[add(a=1", "does not end"),
        ("glm", "<tool_call>\n<function=add></tool_call>", "begins with the name"),
        ("glm", "<tool_call>add\n<arg_key>a</arg_key></tool_call>", "has no <arg_value>"),
        ("glm", "<tool_call>add\n<arg_key>a</arg_key><arg_value>1", "</arg_value> is missing"),
        ("glm", "<tool_call>add\n{}</tool_call>", "in place of <arg_key>"),
        ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>" + "[" * 400 + "]" * 400 + "</arg_value>", "deeply"),
        ("harmony", "<|channel|>commentary to=functions.add<|message|>{1}<|call|>", "the call of add: invalid JSON"),
        ("harmony", '<|channel|>commentary to=functions.add<|message|>{"a": 1} 2', "follows the JSON object"),
        ("gemma", "<|tool_call>add{a:1}<tool_call|>", "begins with call:name{"),
        ("gemma", "<|tool_call>call:add{a:two}<tool_call|>", "a text stands between"),
        ("gemma", '<|tool_call>call:add{a:<|"|>two}<tool_call|>', "does not end with"),
        ("gemma", "<|tool_call>call:add{a:1", "a comma or }"),
        ("gemma", "<|tool_call>call:add{a:1e999}<tool_call|>", "a value was expected"),
        ("gemma", "<|tool_call>call:add{a:" + "[" * 400, "deeply"),
        ("gemma", "<|tool_call>call:add{a:1}}<tool_call|>", "follows the call of add"),
        ("text", "CALL add a=1", "JSON object was expected"),
        ("text", 'CALL add {"a": 1} and more', "follows the JSON object"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(name: str, text: str, says: str) -> None:
    *_, error = FORMATS[name].parse(text).calls
    assert isinstance(error, CallError)
    assert error.kind == "invalid_call"
    assert says in error.text


def test_a_call_after_a_malformed_one_is_read() -> None:
    text = 'a<tool_call>{"name": }</tool_call>b<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>c'
    found = FORMATS["hermes"].parse(text)
    assert [type(call) for call in found.calls] == [CallError, ToolCall]
    assert found.content == "a\nb\nc"
    assert found.message(text) == {"role": "assistant", "content": text}, (
        "its calls cannot be rendered as they were written"
    )


@EVERY
def test_thoughts_contain_no_calls(each: ToolFormat) -> None:
    call = ToolCall("add", {"a": 1})
    thought = f"<think>\n{each.render([call], '')}\n"
    assert each.parse(thought).calls == []
    assert each.parse(f"{thought}</think>\n\n42").calls == []
    assert each.parse(f"{thought}</think>\n\n{each.render([call], '')}").calls == [call]


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string"}, "42"),
        ({"type": "integer"}, 42),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "42"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, 42),
        ({"type": ["string", "boolean"]}, "42"),
        ({"enum": ["42", "43"]}, "42"),
        ({"enum": ["42", 43]}, "42"),
        ({"enum": ["43", 42]}, 42),
        ({"const": "42"}, "42"),
        ({"allOf": [{"description": "a year"}, {"type": "string"}]}, "42"),
        ({"$ref": "#/$defs/Year"}, "42"),
        ({"anyOf": [{"$ref": "#/definitions/Old"}, {"type": "null"}]}, "42"),
        ({"$ref": "#/$defs/Loop"}, 42),
        ({"$ref": "#/$defs/Missing"}, 42),
        ({}, 42),
        (None, 42),
    ],
)
def test_values_without_marks_are_read_by_their_schema(schema: dict[str, Any] | None, value: object) -> None:
    properties = {} if schema is None else {"a": schema}
    definitions = {"Year": {"enum": ["42"], "type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}}
    parameters = {"properties": properties, "$defs": definitions, "definitions": {"Old": {"const": "42"}}}
    schemas = [{"function": {"name": "add", "parameters": parameters}}]
    text = "<tool_call>add<arg_key>a</arg_key><arg_value>42</arg_value></tool_call>"
    assert FORMATS["glm"].parsed(text, schemas).calls == [ToolCall("add", {"a": value})]


def test_a_call_may_be_addressed_before_its_channel_and_contain_the_text_of_a_mark() -> None:
    for header in (
        " to=functions.add<|channel|>commentary json",
        "<|channel|>commentary to=functions.add <|constrain|>json",
    ):
        text = f'{header}<|message|>{{"a": "<|end|> 1"}}'
        assert FORMATS["harmony"].parse(text).calls == [ToolCall("add", {"a": "<|end|> 1"})]


@pytest.mark.parametrize("text", ['{"name": "Ada", "age": 36}', '{"answer": [1, 2]}', "see [1] and f(x)", "{a}"])
@pytest.mark.parametrize("name", list(FORMATS))
def test_an_answer_that_only_resembles_a_call_is_content(name: str, text: str) -> None:
    found = FORMATS[name].parse(text)
    assert (found.content, found.calls) == (text, [])


@pytest.mark.parametrize("content", ["", "I write it.", "<think>hm</think> so"])
@pytest.mark.parametrize("name", ["harmony", "gemma", "glm"])
def test_a_value_may_have_a_line_that_ends_like_thoughts(name: str, content: str) -> None:
    content = content if name == "glm" else content.removeprefix("<think>hm</think> ")
    call = ToolCall("write", {"text": "a </think>\nb"})
    found = FORMATS[name].parsed(FORMATS[name].render([call], content), schemas_of([call]))
    assert (found.calls, found.content.split()) == ([call], content.split())


def test_thoughts_that_begin_a_call_of_glm_end() -> None:
    begun = "I could write <tool_call>add<arg_key>a</arg_key><arg_value>1"
    call = FORMATS["glm"].render([ToolCall("add", {"a": 1})], "")
    assert FORMATS["glm"].parse(f"{begun}</think>\n{call}").calls == [ToolCall("add", {"a": 1})]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "harmony",
            "<|channel|>analysis<|message|>I say </think>\nmore<|end|><|start|>assistant<|channel|>final<|message|>42",
        ),
        ("gemma", "<|channel>thought\nI say </think>\nmore\n<channel|>42"),
    ],
)
def test_thoughts_in_a_channel_may_have_a_line_that_ends_like_thoughts(name: str, text: str) -> None:
    assert FORMATS[name].parse(text) == Parsed("42", [], "I say </think>\nmore")


def test_a_final_answer_is_certain_with_the_text_before_it_and_without_a_half_mark() -> None:
    begun = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    text = f"{begun}<|start|>assistant<|channel|>final<|message|>It is <"
    assert FORMATS["harmony"].certain(text) == "I look.\nIt is "
    assert FORMATS["harmony"].certain(begun) == ""


@given(text=st.text("ab", max_size=9), mark=st.text("ab", min_size=1, max_size=5))
def test_an_end_that_may_begin_a_mark_is_held_back(text: str, mark: str) -> None:
    before = text.partition(mark)[0]
    held_back = next(start for start in range(len(before) + 1) if mark.startswith(before[start:]))
    assert before_marks(text, (mark,)) == before_marks(text, (mark, f"{mark}c")) == before[:held_back]
