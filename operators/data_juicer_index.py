"""What Data-Juicer offers, read from its source files: names, kinds and arguments of its operators.

Importing Data-Juicer costs seconds and hundreds of megabytes, and its operators accept any keyword without complaint.
Reading the files finds a misspelt operator or argument in milliseconds, in a process that never runs one.
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


@dataclass(frozen=True)
class IndexedOperator:
    """One operator: its kind (the folder it lives in) and its file."""

    name: str
    kind: str
    path: Path

    @property
    def reads_only_text(self) -> bool:
        """Whether the source names no other column than the text's."""
        return set(re.findall(r"self\.(\w+_key)\b", self.path.read_text())) == {"text_key"}

    def arguments(self) -> list[str] | None:
        """Names of the constructor's own arguments; None when the source does not say."""
        source = self.path.read_text()
        lines = source.splitlines()
        for node in ast.parse(source).body:
            if not isinstance(node, ast.ClassDef) or not node.decorator_list:
                continue
            decorators = "\n".join(lines[node.decorator_list[0].lineno - 1 : node.lineno])
            if self.name in _registered_names(decorators, source):
                return _constructor_arguments(node)
        return None

    def general_arguments(self) -> tuple[str, ...]:
        """Names of the arguments that all operators of this kind take."""
        return _general_arguments(self.kind)


@functools.cache
def package_folder() -> Path | None:
    """Where Data-Juicer is installed; None when it is not."""
    spec = importlib.util.find_spec("data_juicer")
    return Path(spec.origin).parent if spec and spec.origin else None


@functools.cache
def index() -> dict[str, IndexedOperator]:
    """All operators by name; empty when Data-Juicer is not installed."""
    folder = package_folder()
    found: dict[str, IndexedOperator] = {}
    for kind in KINDS if folder else ():
        assert folder is not None
        for path in sorted((folder / "ops" / kind).rglob("*.py")):
            source = path.read_text()
            for name in _registered_names(source, source):
                found[name] = IndexedOperator(name, kind, path)
    return found


def operator_names() -> list[str]:
    """Names of all operators, sorted."""
    return sorted(index())


def _constructor_arguments(node: ast.ClassDef) -> list[str] | None:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return [argument.arg for argument in (*item.args.args[1:], *item.args.kwonlyargs)]
    return None


def _registered_names(segment: str, source: str) -> list[str]:
    constants = dict(_CONSTANT.findall(source))
    names = []
    for match in _REGISTERED.finditer(segment):
        name = constants.get(match["constant"], "") if match["constant"] else match["text"]
        if match["f"]:
            name = re.sub(r"\{(\w+)\}", lambda inner: constants.get(inner[1], ""), name)
        names.append(name)
    return [name for name in names if name]


@functools.cache
def _general_arguments(kind: str) -> tuple[str, ...]:
    """Keys of `_BASE_PARAMS` of the base class of all operators, and of the base class of this kind."""
    folder = package_folder()
    assert folder is not None
    names: list[str] = []
    for node in ast.parse((folder / "ops" / "base_op.py").read_text()).body:
        if not isinstance(node, ast.ClassDef) or node.name not in ("OP", kind.capitalize()):
            continue
        for item in node.body:
            if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == "_BASE_PARAMS":
                keys = item.value.keys if isinstance(item.value, ast.Dict) else []
                names += [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return tuple(names)
