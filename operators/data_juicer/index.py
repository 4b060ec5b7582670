"""What Data-Juicer offers, read from its source files: names, kinds and files of its operators.

Importing Data-Juicer costs seconds and hundreds of megabytes, and its operators accept any keyword without complaint.
Reading the files finds a misspelt operator or argument in milliseconds, in a process that never runs one. What a file says
about its operator (arguments, columns, statistics) is read by `operators.data_juicer.source`, for those that a chain names.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

KINDS = ("filter", "mapper", "deduplicator", "selector", "grouper", "aggregator", "pipeline")
_REGISTERED = re.compile(r"@OPERATORS\.register_module\(\s*(?:(?P<f>f)?\"(?P<text>[^\"]+)\"|(?P<constant>\w+))\s*\)")
_CONSTANT = re.compile(r"^(\w+) = [\"'](\w+)[\"']", re.MULTILINE)
_CLASS = re.compile(r"^class (\w+)\(", re.MULTILINE)


@dataclass(frozen=True)
class IndexedOperator:
    """One operator: its kind (the folder it lives in) and its file."""

    name: str
    kind: str
    path: Path


@functools.cache
def package_folder() -> Path | None:
    """Where Data-Juicer is installed; None when it is not."""
    spec = importlib.util.find_spec("data_juicer")
    return Path(spec.origin).parent if spec and spec.origin else None


@functools.cache
def _files() -> list[tuple[str, Path, str]]:
    folder = package_folder()
    return [
        (kind, path, path.read_text())
        for kind in (KINDS if folder else ())
        for path in sorted((folder / "ops" / kind).rglob("*.py"))  # type: ignore[operator]
    ]


@functools.cache
def index() -> dict[str, IndexedOperator]:
    """All operators by name; empty when Data-Juicer is not installed."""
    return {
        name: IndexedOperator(name, kind, path)
        for kind, path, source in _files()
        for name in registered_names(source, source)
    }


@functools.cache
def class_files() -> dict[str, Path]:
    """The file of every class that stands beside the operators."""
    return {name: path for _, path, source in _files() for name in _CLASS.findall(source)}


def operator_names() -> list[str]:
    """Names of all operators, sorted."""
    return sorted(index())


def registered_names(segment: str, source: str) -> list[str]:
    """The names under which `segment`, a part of the file `source`, registers operators."""
    constants = dict(_CONSTANT.findall(source))
    names = []
    for match in _REGISTERED.finditer(segment):
        name = constants.get(match["constant"], "") if match["constant"] else match["text"]
        if match["f"]:
            name = re.sub(r"\{(\w+)\}", lambda inner: constants.get(inner[1], ""), name)
        names.append(name)
    return [name for name in names if name]


@functools.cache
def general_arguments(kind: str) -> dict[str, str]:
    """The arguments that all operators of a kind take, with the names of their types, which are empty where any will do.

    They are keys of `_BASE_PARAMS` of `OP` and of the kind's base class.
    """
    folder = package_folder()
    assert folder is not None
    found: dict[str, str] = {}
    for node in ast.parse((folder / "ops" / "base_op.py").read_text()).body:
        if not isinstance(node, ast.ClassDef) or node.name not in ("OP", kind.capitalize()):
            continue
        for item in node.body:
            if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == "_BASE_PARAMS":
                given = item.value if isinstance(item.value, ast.Dict) else ast.Dict([], [])
                found |= {
                    key.value: _type_of_parameter(value)
                    for key, value in zip(given.keys, given.values)
                    if isinstance(key, ast.Constant) and isinstance(key.value, str)
                }
    return found


def _type_of_parameter(value: ast.expr) -> str:
    """The first of a pair (type or None, default)."""
    named = value.elts[0] if isinstance(value, ast.Tuple) and value.elts else None
    return named.id if isinstance(named, ast.Name) else ""


@functools.cache
def constants(class_name: str) -> dict[str, str]:
    """Attributes of a class of Data-Juicer's constants, such as `MetaKeys`: attribute -> the name it stands for."""
    folder = package_folder()
    assert folder is not None
    found: dict[str, str] = {}
    for node in ast.parse((folder / "utils" / "constant.py").read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for item in node.body:
                if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
                    found[item.targets[0].id] = _text(item.value)
    return found


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.Name):
        return "__dj__"  # DEFAULT_PREFIX, the only name used there
    return str(node.value) if isinstance(node, ast.Constant) else ""
