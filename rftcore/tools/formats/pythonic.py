"""The format `pythonic` of Llama 3.2 and 4: `[search(query="a", top=3), add(a=1, b=2)]`.

The list is parsed as Python and never evaluated. Its arguments have names and are literals: texts, numbers, True, False, None, lists and
dicts of them. Names that only JSON knows (true, false, null) are read, too.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from typing import Any

from rftcore.tools.calls import MAX_CALLS, Call, CallError, Parsed, ToolCall
from rftcore.tools.formats.named_calls import outside, too_many
from rftcore.tools.formats.thoughts import after_thoughts

_BEGIN = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")
_TAG = "<|python_tag|>"
_OF_JSON = {"true": True, "false": False, "null": None}
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_CHARS = 100_000


class _InvalidCallError(ValueError):
    pass


def parse(text: str) -> Parsed:
    """Return the content and the calls of an answer: those of the first list that begins with a call."""
    begin = _BEGIN.search(text, after_thoughts(text))
    if begin is None:
        return Parsed(text)
    start = begin.start()
    before = text[:start].removesuffix(_TAG)
    end = _end_of_list(text, start)
    try:
        if end is None:
            raise _InvalidCallError("the list of calls does not end")
        elements = _elements(text[start:end])
    except _InvalidCallError as error:
        rest = "" if end is None else text[end:]
        return Parsed(outside([before, rest]), [CallError("invalid_call", str(error), 0)])
    calls = [_call(element, number) for number, element in enumerate(elements[:MAX_CALLS])]
    return Parsed(outside([before, text[end:]]), calls + [too_many(MAX_CALLS)] * (len(elements) > MAX_CALLS))


def _end_of_list(text: str, start: int) -> int | None:
    """Return the place after the bracket that closes the one at the start; None if there is none in the longest list that is read."""
    depth, quote, place = 0, "", start
    last = min(len(text), start + _MAX_CHARS)
    while place < last:
        letter = text[place]
        if quote:
            if letter == "\\":
                place += 1
            elif text.startswith(quote, place):
                place += len(quote) - 1
                quote = ""
        elif letter in "\"'":
            quote = letter * 3 if text.startswith(letter * 3, place) else letter
            place += len(quote) - 1
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
            if depth == 0:
                return place + 1
        place += 1
    return None


def _elements(source: str) -> list[ast.expr]:
    try:
        with warnings.catch_warnings():  # of escapes that Python does not know, which it keeps as they are
            warnings.simplefilter("ignore")
            tree = ast.parse(source, mode="eval").body
    except SyntaxError as error:
        raise _InvalidCallError(f"the list of calls is not valid Python: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError):
        raise _InvalidCallError("the list of calls is not valid Python") from None
    if not isinstance(tree, ast.List):
        raise _InvalidCallError("the calls must be a list")
    return tree.elts


def _call(node: ast.expr, number: int) -> Call:
    try:
        if not isinstance(node, ast.Call):
            raise _InvalidCallError("an element of the list is no call")
        name = _name(node.func)
        if node.args:
            raise _InvalidCallError(f"the arguments of {name} need names, as in {name}(name=value)")
        arguments: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise _InvalidCallError(f"the arguments of {name} need names")
            arguments[keyword.arg] = _value(keyword.value, f"the argument {keyword.arg} of {name}")
    except _InvalidCallError as error:
        return CallError("invalid_call", str(error), number)
    except RecursionError:
        return CallError("invalid_call", "an argument is nested too deeply", number)
    return ToolCall(name, arguments, number)


def _name(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise _InvalidCallError("a call needs the name of a tool")
    return ".".join([node.id, *reversed(parts)])


def _value(node: ast.expr, what: str) -> Any:
    """Return the JSON value of a literal.

    Raises:
        _InvalidCallError: it is none.
    """
    match node:
        case ast.Constant(value=bool() | None as value):
            return value
        case ast.Constant(value=str() as text):
            if _SURROGATE.search(text):
                raise _InvalidCallError(f"{what} contains half of a surrogate pair, which is no character")
            return text
        case ast.Constant(value=int() | float() as number):
            return _finite(number, what)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=bool())):
            pass
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return _finite(-number, what)
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(element, what) for element in elements]
        case ast.Dict(keys=keys, values=values):
            return {_key(key, what): _value(value, what) for key, value in zip(keys, values, strict=True)}
        case ast.Name(id=name) if name in _OF_JSON:
            return _OF_JSON[name]
    raise _InvalidCallError(f"{what} is no literal")


def _finite(number: float, what: str) -> float:
    if abs(number) == math.inf:
        raise _InvalidCallError(f"{what} is too large")
    return number


def _key(node: ast.expr | None, what: str) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and not _SURROGATE.search(node.value):
        return node.value
    raise _InvalidCallError(f"{what} has a key that is no text")


def render(calls: list[ToolCall], content: str = "") -> str:
    """Return an answer with these calls."""
    written = [f"{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})" for call in calls]
    return "\n".join(([content] if content else []) + ([f"[{', '.join(written)}]"] if calls else []))
