"""YAML that users write. A key that stands twice in one mapping is a mistake: PyYAML would use the second value and ignore the first silently."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import yaml

from rftdata.errors import ConfigError, refuse

_MOST_VALUES = 1_000_000
_MOST_BITS = 10_000  # of an integer; Python writes no integer of more than 4300 digits as a decimal number
_SHOWN = 60
# What constructors and the scanner of PyYAML raise for values that they cannot read.
_UNREADABLE = (ValueError, LookupError, ArithmeticError, AttributeError, TypeError)


def read_yaml(text: str, origin: str) -> Any:
    """Return the value of a YAML text.

    Args:
        origin: names the text in errors.

    Raises:
        yaml.YAMLError: the text is not YAML, or has a value that is none of its kind, such as the date 2020-13-45.
        ConfigError, SeveralErrors: a mapping has a key twice, or the text is nested too deeply, or aliases make it too large.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if _num_values(node, {}) > _MOST_VALUES:
            raise ConfigError(f"{origin}: aliases repeat values more than a million times", todo="write fewer aliases")
        value = None if node is None else loader.construct_document(node)
    except RecursionError as error:
        raise ConfigError(f"{origin} is nested too deeply", todo="use fewer levels") from error
    except _UNREADABLE as error:
        raise yaml.YAMLError(f"{origin} has a value that cannot be read: {error}") from error
    finally:
        loader.dispose()
    refuse(
        [
            ConfigError(
                f"{origin}: the key {key!r} is written twice in one section, in the lines {', '.join(map(str, lines))}",
                todo="remove one of them, or merge both by one list: <<: [*one, *other]"
                if key == "<<"
                else "remove or rename one of them",
            )
            for key, lines in loader.repeated
        ]
    )
    return value


def _num_values(node: yaml.Node | None, known: dict[int, int]) -> int:
    """Return the number of values of a node with all aliases written out; a node within itself counts as one."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = 1
        inner = (part for each in node.value for part in (each if isinstance(each, tuple) else (each,)))
        known[id(node)] = 1 + sum(_num_values(each, known) for each in inner)
    return known[id(node)]


class _Loader(yaml.SafeLoader):
    """Loads plain values, refuses those that are none of their kind, and collects the keys that a mapping has more than once, with their lines."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.repeated: list[tuple[str, list[int]]] = []

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except _UNREADABLE as error:
            raise _refused(node, str(error)) from error
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise _refused(node, f"an integer has at most {_MOST_BITS} bits")
        return value

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Looked for here, because a mapping's node receives the keys of `<<` later, which it may override.
        node = super().compose_mapping_node(anchor)
        lines: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                lines[key.tag, key.value].append(key.start_mark.line + 1)
        self.repeated += [(key, found) for (_, key), found in lines.items() if len(found) > 1]
        return node


def _refused(node: yaml.Node, reason: str) -> yaml.YAMLError:
    shown = f" {node.value[:_SHOWN]!r}" if isinstance(node, yaml.ScalarNode) else ""
    kind = node.tag.rpartition(":")[2]
    return yaml.constructor.ConstructorError(None, None, f"the value{shown} is no {kind}: {reason}", node.start_mark)
