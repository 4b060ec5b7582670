"""Edits of single keys in the text of a YAML file: everything else in the text, comments included, stays as it is.

The place of a key is taken from the marks of the parser. After an edit the text is read again, and must have the old value with this one key changed;
where it has not (an alias, say), the edit is refused, and the person edits the text.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Sequence
from typing import Any

import yaml

from rftdata.errors import ConfigError
from rftdata.yaml_text import read_yaml

_COMMENT = re.compile(r"(^|\s)#", re.MULTILINE)
_Pair = tuple[yaml.Node, yaml.Node]


def with_value(text: str, key: str, value: str | None, *, is_text: bool = False) -> str:
    """Return a text in which a key has another value.

    Args:
        key: with dots.
        value: as YAML; None removes the key, and sections that it leaves empty.
        is_text: take the value as a string, whatever YAML would make of it.

    Raises:
        ConfigError: the text or the value is not YAML, or the text must be edited by hand.
    """
    parts = key.split(".")
    before = _read(text, "the text") or {}
    with contextlib.suppress(RecursionError):  # of a value that is nested almost too deeply
        if value is None:
            expected = _without(before, parts)
            candidates = [_removed(text, parts)]
        else:
            given = value if is_text else _read(value, f"the value of {key!r}")
            expected = _with(before, parts, given)
            # A value may need quotation marks where it stands, and a list or mapping of several lines one line.
            candidates = [
                _placed(text, parts, written)
                for written in dict.fromkeys([value.strip(), _flow(given), _json(given)])
                if written and "\n" not in written
            ]
        for candidate in candidates:
            if candidate is not None and _is(candidate, expected):
                return candidate
    raise ConfigError(
        f"the key {key!r} cannot be changed here without changing what stands around it", todo="change it in the text"
    )


def _read(text: str, origin: str) -> Any:
    try:
        return read_yaml(text, origin)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin} is not valid YAML: {' '.join(str(error).split())}", todo="correct it") from error


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").strip()


def _json(value: Any) -> str:
    """Return a value as JSON; an empty text for one that JSON does not have: a mapping with other keys, or a value within itself."""
    try:
        return json.dumps(value, default=str, ensure_ascii=False)
    except (TypeError, ValueError):
        return ""


def _is(text: str, expected: Any) -> bool:
    try:
        return bool((read_yaml(text, "the file") or {}) == expected)
    except (yaml.YAMLError, ConfigError, RecursionError):  # a value within itself cannot be compared
        return False


def _with(whole: Any, parts: Sequence[str], value: Any) -> dict[str, Any]:
    changed = dict(whole) if isinstance(whole, dict) else {}
    changed[parts[0]] = _with(changed.get(parts[0]), parts[1:], value) if len(parts) > 1 else copy.deepcopy(value)
    return changed


def _without(whole: Any, parts: Sequence[str]) -> dict[str, Any]:
    changed = dict(whole) if isinstance(whole, dict) else {}
    inner = _without(changed.get(parts[0]), parts[1:]) if len(parts) > 1 else {}
    if inner:
        changed[parts[0]] = inner
    else:
        changed.pop(parts[0], None)
    return changed


def _path(text: str, parts: Sequence[str]) -> tuple[list[_Pair], yaml.MappingNode | None]:
    """Return the pairs of key and value that lead to a place, as far as they exist, and the mapping in which the next one is missing."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    pairs: list[_Pair] = []
    for part in parts:
        if not isinstance(node, yaml.MappingNode):
            return pairs, None
        pair = next((each for each in node.value if each[0].value == part), None)
        if pair is None:
            return pairs, node
        pairs.append(pair)
        node = pair[1]
    return pairs, None


def _end(text: str, node: yaml.Node) -> int:
    """Return where a node ends; marks of block collections and block scalars lie behind comments and empty lines that follow."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(text, last[1] if isinstance(last, tuple) else last)
    end: int = node.end_mark.index
    return node.start_mark.index + len(text[node.start_mark.index : end].rstrip())


def _placed(text: str, parts: Sequence[str], written: str) -> str | None:
    pairs, mapping = _path(text, parts)
    rest = parts[len(pairs) :]
    nested = written
    for part in reversed(rest[1:] if mapping is not None else rest):
        nested = f"{{{part}: {nested}}}"
    if mapping is None and not pairs:  # an empty text, or only comments
        head = text if not text or text.endswith("\n") else f"{text}\n"
        return f"{head}{_entry(parts, written)}\n"
    if mapping is None:
        value = pairs[-1][1]
        begin, end = value.start_mark.index, _end(text, value)
        if _COMMENT.search(text[begin:end]):
            return None
        space = " " if begin == end and not text[begin - 1 : begin].isspace() else ""
        return f"{text[:begin]}{space}{nested}{text[end:]}"
    if mapping.flow_style:
        if not mapping.value:
            begin = mapping.end_mark.index - 1
            return f"{text[:begin]}{rest[0]}: {nested}{text[begin:]}"
        begin = _end(text, mapping.value[-1][1])
        return f"{text[:begin]}, {rest[0]}: {nested}{text[begin:]}"
    begin = _line_end(text, _end(text, mapping.value[-1][1]))
    entry = _entry(rest, written) if not pairs else f"{rest[0]}: {nested}"
    indent = " " * mapping.start_mark.column
    tail = text[begin:] or "\n"
    return f"{text[:begin]}\n{indent}{entry}{tail}"


def _entry(parts: Sequence[str], written: str) -> str:
    """Return a new entry at the top of a file: a section of its own with a line for its key."""
    nested = written
    for part in reversed(parts[2:]):
        nested = f"{{{part}: {nested}}}"
    return f"{parts[0]}: {nested}" if len(parts) == 1 else f"{parts[0]}:\n  {parts[1]}: {nested}"


def _line_end(text: str, index: int) -> int:
    end = text.find("\n", index)
    return len(text) if end < 0 else end


def _removed(text: str, parts: Sequence[str]) -> str | None:
    pairs, mapping = _path(text, parts)
    if mapping is not None or len(pairs) < len(parts):
        return text
    holder: Any = yaml.compose(text, Loader=yaml.SafeLoader) if len(parts) == 1 else pairs[-2][1]
    if len(holder.value) == 1 and len(parts) > 1:
        return _removed(text, parts[:-1])
    keys = [key.start_mark.index for key, _ in holder.value]
    key, value = pairs[-1]
    place = keys.index(key.start_mark.index)
    begin, end = key.start_mark.index, _end(text, value)
    if _COMMENT.search(text[begin:end]):
        return None
    if not holder.flow_style:
        end = min(_line_end(text, end) + 1, len(text))
        return text[: text.rfind("\n", 0, begin) + 1] + text[end:]
    if place + 1 < len(keys):
        return text[:begin] + text[keys[place + 1] :]
    if place:
        return text[: _end(text, holder.value[place - 1][1])] + text[end:]
    return text[:begin] + text[end:]
